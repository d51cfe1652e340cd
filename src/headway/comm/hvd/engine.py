"""The engine of one rank: takes named operations from any thread, and executes them when all ranks have them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, final

import torch

from headway.comm.communicator import Communicator
from headway.comm.hvd.collectives import ProcessSetCollectives
from headway.comm.hvd.connection import LIMIT_BYTES, PURPOSE, Connection, connect_pair
from headway.comm.hvd.errors import HorovodInternalError
from headway.comm.hvd.executor import Finish, ProcessSetExecutor, SubmittedOperation, do_nothing
from headway.comm.hvd.negotiator import ALL, Negotiator
from headway.comm.hvd.requests import Kind, Request, Response
from headway.comm.hvd.settings import DYNAMIC, Settings
from headway.comm.hvd.timeline import Timeline
from headway.core.channel import connect, tune_socket
from headway.core.channel_server import ChannelPeer, ChannelServer
from headway.core.errors import CommunicationError
from headway.core.hosts import find_interface_address
from headway.core.world import World

SHUT_DOWN = (
    "the job has been shut down: another rank has finished, or has ended with an exception, which its output then shows"
)


@final
class Engine:
    """The engine of one rank. All ranks build theirs together; it ends on all of them when one shuts down or fails.

    Args:
        communicator: of the world; the engine closes both.
        choose: bytes of a sum over all ranks -> algorithm; called on rank 0.

    Attributes:
        timeline: recorded on rank 0; on the others it stays empty.
        sets: the ranks of each process set, by its id.
        cuda: device of this rank's latest CUDA tensor; that of its zeros after it has joined.
    """

    def __init__(
        self, world: World, communicator: Communicator, settings: Settings, choose: Callable[[int], str]
    ) -> None:
        self.world, self._settings = world, settings
        self.timeline = Timeline()
        if settings.timeline not in ("", DYNAMIC) and world.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)
        self.sets: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], SubmittedOperation] = {}
        # Operation of each handle that was not waited for, and whether its result is a single tensor.
        self._handles: dict[int, tuple[SubmittedOperation, bool]] = {}
        self._numbers = itertools.count(1)
        self._unnamed, self._joins = Counter[tuple[int, str]](), 0
        self._why, self._failed = "", False
        self._executors: dict[int, ProcessSetExecutor] = {}
        self._collectives: dict[int, ProcessSetCollectives] = {}
        self._group_numbers = itertools.count()
        self._communicator = communicator
        self.cuda = torch.device("cuda", 0)
        connections, self._connection = _connect(world, settings.timeout_s)
        self._add_set(ALL, range(world.size), communicator)
        self._negotiator = Negotiator(connections, settings, self.timeline, choose) if connections else None
        self._reader = threading.Thread(target=self._read, name="headway-hvd-reader", daemon=True)
        self._reader.start()

    @property
    def has_failed(self) -> bool:
        """A rank was lost or a transfer failed: only our launcher can bring the ranks together again."""
        return self._failed

    def build_name(self, kind: str, process_set: int, given: str | None) -> str:
        """Builds the name by which ranks match an operation; numbered if the caller gave none."""
        if given:
            return f"{kind}.{given}"
        # A rank that joined early has counted fewer: the count restarts on all ranks at each join.
        with self._lock:
            self._unnamed[process_set, kind] += 1
            return f"{kind}.noname.{self._joins}.{self._unnamed[process_set, kind]}"

    def get_members(self, kind: str, process_set: int) -> tuple[int, ...]:
        """Returns the ranks of a process set. ValueError: there is none; the message names the operation `kind`."""
        members = self.sets.get(process_set)
        if members is None:
            raise ValueError(f"{kind}: there is no process set {process_set}; was it removed?")
        return members

    def submit(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        single: bool = True,
    ) -> int:
        """Submits an operation; returns its handle.

        Args:
            single: `wait` returns the one tensor of the result instead of the tuple.

        Raises:
            HorovodInternalError: the engine has ended. ValueError: the set is unknown or without this rank, or an
                operation of this name is pending.
        """
        entry = SubmittedOperation(request, inputs, outputs)
        if request.device == "cuda":
            self.cuda = inputs[0].device
        # Checked and noted under one lock, so that two threads cannot submit the same name.
        key = request.process_set, request.name
        with self._lock:
            if self._why:
                raise HorovodInternalError(self._why)
            members = self.get_members(request.kind, request.process_set)
            if request.process_set not in self._executors:
                what = f"{request.kind}: rank {self.world.rank} is not a member of the process set"
                raise ValueError(f"{what} {list(members)}")
            if key in self._pending:
                what = f"{request.name} is already under way on this rank"
                raise ValueError(f"{what}; wait for it first, or give this one another name")
            self._pending[key] = entry
            handle = next(self._numbers)
            self._handles[handle] = entry, single
        self._connection.send("request", request=request.to_fields())
        return handle

    def poll(self, handle: int) -> bool:
        """Returns True if `wait` would return at once. ValueError: no such handle, or waited for already."""
        with self._lock:
            if handle not in self._handles:
                raise ValueError(f"handle {handle} was never given, or was waited for already")
            return self._handles[handle][0].wait(0)

    def wait(self, handle: int) -> Any:
        """Waits for an operation; returns its result, None if waited for already. HorovodInternalError: it failed."""
        with self._lock:
            found = self._handles.get(handle)
        if found is None:
            return None
        entry, single = found
        entry.wait()
        with self._lock:
            self._handles.pop(handle, None)
        if entry.error:
            raise HorovodInternalError(entry.error)
        # The caching allocator has to know it: the memory was allocated on another stream.
        if entry.request.device == "cuda":
            for tensor in entry.result:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return entry.result[0] if single and entry.result else entry.result

    def shut_down(self) -> None:
        """Ends the engines of all ranks; operations that the ranks have agreed on are executed first."""
        # A stop goes over the negotiator, which tells all ranks; after a failure it has told them already.
        if self._failed:
            self._connection.hang_up()
        else:
            self._connection.send("stop")
        self._reader.join(self._settings.timeout_s)
        # A rank is stopped, or cannot be reached.
        if self._reader.is_alive():
            self._end_pending("the ranks could not shut down together", failed=True)
            self._connection.hang_up()
            self._reader.join()
        if self._negotiator is not None:
            self._negotiator.close()

    def fail(self, why: str) -> None:
        """Ends the engines of all ranks at once, from any thread: all pending operations fail."""
        self._end_pending(why, failed=True)
        self._connection.send("fail", why=why)

    # Called in the threads of the reader and of the executors.

    def _read(self) -> None:
        drain: threading.Thread | None = None
        for message in self._connection:
            if message["kind"] == "go":
                response = Response.from_fields(message["response"])
                self._executors[response.process_set].put(response, self._claim_operations(response))
            elif message["kind"] == "stop":
                self._end_pending(SHUT_DOWN, failed=False)
                # In a thread of its own: this one has to hear of a failure meanwhile.
                drain = threading.Thread(target=self._drain, name="headway-hvd-drain", daemon=True)
                drain.start()
            elif message["kind"] == "fail":
                self._end_pending(message["why"], failed=True)
                break
            # The message `over`: all ranks have drained their executors.
            else:
                break
        else:
            self._end_pending("rank 0 is lost: its connection ended", failed=True)
        if drain is not None:
            drain.join()
        self._close_executors()
        self._connection.close()
        self._communicator.close()
        self.world.close()
        self.timeline.stop()

    def _drain(self) -> None:
        self._close_executors()
        self._connection.send("ended")

    def _close_executors(self) -> None:
        # The one of all ranks first: it adds and removes the others.
        self._executors[ALL].close()
        for executor in self._executors.values():
            executor.close()

    def _end_pending(self, why: str, *, failed: bool) -> None:
        # Operations that were not handed out yet fail; those under way do so only after a failure.
        with self._lock:
            self._why = self._why or why
            self._failed = self._failed or failed
            left = list(self._pending.values())
            self._pending.clear()
            if failed:
                left += [entry for entry, _ in self._handles.values()]
        if failed:
            self.world.abort(why)
        for entry in left:
            entry.end(self._why)

    def _claim_operations(self, response: Response) -> list[SubmittedOperation]:
        # This rank's own operations, or zeros if it has joined.
        entries = []
        with self._lock:
            for number, name in enumerate(response.names):
                entry = self._pending.pop((response.process_set, name), None)
                if entry is None and response.like:
                    entry = self._build_zeros(response.like[number])
                if entry is not None:
                    entries.append(entry)
        return entries

    def _build_zeros(self, request: Request) -> SubmittedOperation:
        # `like` gives types and shapes: this rank may never have seen such a tensor.
        device = self.cuda if request.device == "cuda" else torch.device("cpu")
        pairs = zip(request.types, request.shapes, strict=True)
        zeros = [torch.zeros(shape, dtype=getattr(torch, kind), device=device) for kind, shape in pairs]
        return SubmittedOperation(request, zeros, zeros)

    def _begin(
        self, collectives: ProcessSetCollectives, response: Response, entries: list[SubmittedOperation]
    ) -> Finish:
        kind: Kind = response.kind
        # Sets change here, in the executor of all ranks, so that all ranks change them in the same order.
        if kind == "add_set":
            self._add_set(response.value, entries[0].request.splits, None)
            entries[0].result = (response.value,)
        elif kind == "remove_set":
            self._remove_set(entries[0].request.root)
        elif kind == "join":
            with self._lock:
                self._joins += 1
                self._unnamed.clear()
            entries[0].result = (response.value,)
        elif kind != "barrier":
            return collectives.begin(response, entries)
        return do_nothing

    def _report_done(self, response: Response, began_s: float) -> None:
        if self._negotiator is not None:
            for name in response.names:
                self.timeline.record_done(name, response.kind, began_s)
        # One rank of the set is enough to let the negotiator hand out the next round.
        if self.world.rank == self.sets[response.process_set][0]:
            self._connection.send("done", process_set=response.process_set)

    def _add_set(self, number: int, ranks: Sequence[int], communicator: Communicator | None) -> None:
        # Counted on all ranks: ids of sets are used again, and names of groups must not be.
        group_number = next(self._group_numbers)
        if self.world.rank in ranks:
            collectives = ProcessSetCollectives(self.world, f"hvd-{group_number}", ranks, communicator)
            self._collectives[number] = collectives
            self._executors[number] = ProcessSetExecutor(
                number,
                begin=lambda response, entries: self._begin(collectives, response, entries),
                on_done=self._report_done,
                on_broken=lambda error: self.fail(f"rank {self.world.rank}: {error}"),
            )
        self.sets[number] = tuple(ranks)

    def _remove_set(self, number: int) -> None:
        with self._lock:
            executor = self._executors.pop(number, None)
            left = [self._pending.pop(key) for key in list(self._pending) if key[0] == number]
        for entry in left:
            entry.end("its process set was removed")
        if executor is not None:
            executor.close()
            self._collectives.pop(number).close()
        self.sets.pop(number, None)


def _connect(world: World, timeout_s: float) -> tuple[dict[int, Connection], Connection]:
    # Returns on rank 0 the negotiator's connections to all ranks, and on every rank its own to the negotiator.
    if world.rank:
        host, port = world.control.broadcast_bytes(None).decode().rsplit(" ", 1)
        try:
            limit = LIMIT_BYTES
            end, channel = connect(host, int(port), world.secret, PURPOSE, timeout_s=timeout_s, limit_bytes=limit)
            end.sendall(channel.seal(str(world.rank).encode()))
        except OSError as error:
            raise CommunicationError(f"rank 0 cannot be reached ({error})", where=f"{host}:{port}") from error
        tune_socket(end, timeout_s)
        return {}, Connection(end, channel)
    own, mine = connect_pair(world.secret)
    ends = {0: own}
    if world.size > 1:
        ends |= _accept_ranks(world, timeout_s)
    return ends, mine


def _accept_ranks(world: World, timeout_s: float) -> dict[int, Connection]:
    # The first message of a connection is the rank at its other end.
    found: dict[int, ChannelPeer] = {}

    def note_rank(peer: ChannelPeer, message: bytes) -> None:
        found.setdefault(int(message[:8]), peer)

    address = find_interface_address(world.interface)
    server = ChannelServer(address, 0, world.secret, PURPOSE, on_message=note_rank, limit_bytes=LIMIT_BYTES)
    try:
        world.control.broadcast_bytes(f"{address} {server.port}".encode())
        until_s = monotonic() + timeout_s
        while found.keys() != set(range(1, world.size)):
            if monotonic() > until_s:
                missing = sorted(set(range(1, world.size)) - found.keys())
                raise CommunicationError(f"ranks {missing} did not connect to rank 0 within {timeout_s:g} s")
            server.poll(until_s - monotonic())
        ends = {rank: Connection(*server.detach(peer)) for rank, peer in found.items()}
    finally:
        server.close()
    for rank in found:
        tune_socket(found[rank].connection, timeout_s)
    return ends
