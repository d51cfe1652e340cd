"""The engine of one rank: takes named operations from any thread, and carries them out when all ranks have them."""

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
from headway.comm.hvd.executor import Finish, ProcessSetExecutor, SubmittedOperation
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
    "the job has been shut down: another rank has finished, or has ended with an exception, which then is in its output"
)


@final
class Engine:
    """One rank's side. All ranks make theirs together, and it is over on all of them when one shuts down or fails.

    Args:
        communicator: of the world; the engine closes both.
        choose: the algorithm of a sum of so many bytes over all ranks; asked on rank 0.

    Attributes:
        timeline: of rank 0; those of the others stay empty.
        sets: the ranks of each process set, by its id.
        cuda: the device of this rank's latest CUDA tensor; there it brings zeros after it has joined.
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
        self._handles: dict[int, tuple[SubmittedOperation, bool]] = {}
        self._numbers = itertools.count(1)
        self._unnamed, self._joins = Counter[tuple[int, str]](), 0
        self._why, self._failed = "", False
        self._lanes: dict[int, ProcessSetExecutor] = {}
        self._collectives: dict[int, ProcessSetCollectives] = {}
        self._made = itertools.count()
        self._communicator = communicator
        self.cuda = torch.device("cuda", 0)
        connections, self._connection = _connect(world, settings.timeout_s)
        self._add(ALL, range(world.size), communicator)
        self._negotiator = Negotiator(connections, settings, self.timeline, choose) if connections else None
        self._reader = threading.Thread(target=self._read, name="headway-hvd-reader", daemon=True)
        self._reader.start()

    @property
    def failed(self) -> bool:
        """Whether a rank was lost or a transfer failed: then there is no coming together without a launcher of ours."""
        return self._failed

    def name(self, kind: str, process_set: int, given: str | None) -> str:
        """The name that ranks find each other by: with a number where the caller gave none.

        Ranks that joined early have counted fewer; so all begin to count anew at each join.
        """
        if given:
            return f"{kind}.{given}"
        with self._lock:
            self._unnamed[process_set, kind] += 1
            return f"{kind}.noname.{self._joins}.{self._unnamed[process_set, kind]}"

    def submit(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        single: bool = True,
    ) -> int:
        """Asks for an operation; returns its handle.

        Args:
            single: `wait` gives the one tensor of the result, not the tuple.

        Raises:
            HorovodInternalError: the engine is over. ValueError: the set is unknown or without this rank, or an
                operation of this name is pending.
        """
        entry = SubmittedOperation(request, inputs, outputs)
        if request.device == "cuda":
            self.cuda = inputs[0].device
        key = request.process_set, request.name
        with self._lock:
            if self._why:
                raise HorovodInternalError(self._why)
            if request.process_set not in self.sets:
                raise ValueError(f"{request.kind}: there is no such process set; was it removed?")
            if request.process_set not in self._lanes:
                what = f"{request.kind}: rank {self.world.rank} is not a member of the process set"
                raise ValueError(f"{what} {list(self.sets[request.process_set])}")
            if key in self._pending:
                what = f"{request.name} is already under way on this rank"
                raise ValueError(f"{what}; wait for it first, or give this one another name")
            self._pending[key] = entry
            handle = next(self._numbers)
            self._handles[handle] = entry, single
        self._connection.send("request", request=request.packed())
        return handle

    def poll(self, handle: int) -> bool:
        """Whether `wait` would return at once.

        Raises:
            ValueError: there is no such handle, or it was waited for already.
        """
        with self._lock:
            if handle not in self._handles:
                raise ValueError(f"handle {handle} was never given, or was waited for already")
            return self._handles[handle][0].wait(0)

    def wait(self, handle: int) -> Any:
        """The result of an operation; None where it was waited for already.

        Raises:
            HorovodInternalError: it failed.
        """
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
        if entry.request.device == "cuda":  # its memory was allocated on another stream
            for tensor in entry.result:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return entry.result[0] if single and entry.result else entry.result

    def shut_down(self) -> None:
        """Ends the engines of all ranks; what the ranks agreed on before is still carried out."""
        if self._failed:
            self._connection.hang_up()
        else:
            self._connection.send("stop")
        self._reader.join(self._settings.timeout_s)
        if self._reader.is_alive():  # a rank is stopped, or cannot be reached
            self._end_pending("the ranks could not shut down together", failed=True)
            self._connection.hang_up()
            self._reader.join()
        if self._negotiator is not None:
            self._negotiator.close()

    def fail(self, why: str) -> None:
        """Ends the engines of all ranks at once: whatever is under way fails. From any thread."""
        self._end_pending(why, failed=True)
        self._connection.send("fail", why=why)

    # The reader's thread, and the lanes'.

    def _read(self) -> None:
        drain: threading.Thread | None = None
        for message in self._connection:
            if message["kind"] == "go":
                response = Response.unpacked(message["response"])
                self._lanes[response.process_set].put(response, self._claim(response))
            elif message["kind"] == "stop":
                self._end_pending(SHUT_DOWN, failed=False)
                drain = threading.Thread(target=self._drain, name="headway-hvd-drain", daemon=True)
                drain.start()
            elif message["kind"] == "fail":
                self._end_pending(message["why"], failed=True)
                break
            else:  # over: all ranks have drained their lanes
                break
        else:
            self._end_pending("rank 0 is lost: its connection ended", failed=True)
        if drain is not None:
            drain.join()
        self._close_lanes()
        self._connection.close()
        self._communicator.close()
        self.world.close()
        self.timeline.stop()

    def _drain(self) -> None:
        self._close_lanes()
        self._connection.send("ended")

    def _close_lanes(self) -> None:
        self._lanes[ALL].close()  # it is the one that adds and removes the others
        for lane in self._lanes.values():
            lane.close()

    def _end_pending(self, why: str, *, failed: bool) -> None:
        """Nothing new is taken, and what was not handed out fails; where something failed also what was."""
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

    def _broken(self, error: BaseException) -> None:
        self.fail(f"rank {self.world.rank}: {error}")

    def _claim(self, response: Response) -> list[SubmittedOperation]:
        """The entries of a response: this rank's own, or zeros where it has joined."""
        entries = []
        with self._lock:
            for number, name in enumerate(response.names):
                entry = self._pending.pop((response.process_set, name), None)
                if entry is None and response.like:
                    entry = self._zeros(response.like[number])
                if entry is not None:
                    entries.append(entry)
        return entries

    def _zeros(self, request: Request) -> SubmittedOperation:
        """What a rank that has joined brings to a reduction."""
        device = self.cuda if request.device == "cuda" else torch.device("cpu")
        pairs = zip(request.types, request.shapes, strict=True)
        zeros = [torch.zeros(shape, dtype=getattr(torch, kind), device=device) for kind, shape in pairs]
        return SubmittedOperation(request, zeros, zeros)

    def _begin(
        self, collectives: ProcessSetCollectives, response: Response, entries: list[SubmittedOperation]
    ) -> Finish:
        kind: Kind = response.kind
        if kind == "add_set":
            self._add(response.value, entries[0].request.splits, None)
            entries[0].result = (response.value,)
        elif kind == "remove_set":
            self._remove(entries[0].request.root)
        elif kind == "join":
            with self._lock:
                self._joins += 1
                self._unnamed.clear()
            entries[0].result = (response.value,)
        elif kind != "barrier":
            return collectives.begin(response, entries)
        return _nothing

    def _done(self, response: Response, began_s: float) -> None:
        if self._negotiator is not None:
            for name in response.names:
                self.timeline.done(name, response.kind, began_s)
        if self.world.rank == self.sets[response.process_set][0]:
            self._connection.send("done", process_set=response.process_set)

    def _add(self, number: int, ranks: Sequence[int], communicator: Communicator | None) -> None:
        made = next(self._made)
        if self.world.rank in ranks:
            collectives = ProcessSetCollectives(self.world, f"hvd-{made}", ranks, communicator)
            self._collectives[number] = collectives
            self._lanes[number] = ProcessSetExecutor(
                number,
                begin=lambda response, entries: self._begin(collectives, response, entries),
                done=self._done,
                broken=self._broken,
            )
        self.sets[number] = tuple(ranks)

    def _remove(self, number: int) -> None:
        with self._lock:
            lane = self._lanes.pop(number, None)
            left = [self._pending.pop(key) for key in list(self._pending) if key[0] == number]
        for entry in left:
            entry.end("its process set was removed")
        if lane is not None:
            lane.close()
            self._collectives.pop(number).close()
        self.sets.pop(number, None)


def _nothing() -> None:
    pass


def _connect(world: World, timeout_s: float) -> tuple[dict[int, Connection], Connection]:
    """This rank's connection to the negotiator; on rank 0 first those of all ranks to it."""
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
    """The connections of the other ranks to this one, each of which has said who it is."""
    found: dict[int, ChannelPeer] = {}

    def heed(peer: ChannelPeer, message: bytes) -> None:
        found.setdefault(int(message[:8]), peer)

    address = find_interface_address(world.interface)
    server = ChannelServer(address, 0, world.secret, PURPOSE, on_message=heed, limit_bytes=LIMIT_BYTES)
    try:
        world.control.broadcast_bytes(f"{address} {server.port}".encode())
        until_s = monotonic() + timeout_s
        while found.keys() != set(range(1, world.size)):
            if monotonic() > until_s:
                raise CommunicationError("some ranks did not connect to rank 0")
            server.poll(until_s - monotonic())
        ends = {rank: Connection(*server.detach(peer)) for rank, peer in found.items()}
    finally:
        server.close()
    for rank in found:
        tune_socket(found[rank].connection, timeout_s)
    return ends
