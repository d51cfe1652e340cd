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
from headway.comm.hvd.connection import HVD_PURPOSE, MAX_HVD_MESSAGE_BYTES, Connection, connect_pair
from headway.comm.hvd.errors import HorovodInternalError
from headway.comm.hvd.executor import Finish, ProcessSetExecutor, SubmittedOperation, do_nothing
from headway.comm.hvd.negotiator import GLOBAL_SET_ID, Negotiator
from headway.comm.hvd.requests import Kind, Request, Response
from headway.comm.hvd.settings import DYNAMIC, Settings
from headway.comm.hvd.timeline import Timeline
from headway.core.channel import connect, tune_socket
from headway.core.channel_server import ChannelPeer, ChannelServer
from headway.core.errors import CommunicationError
from headway.core.hosts import find_interface_address
from headway.core.world import World

SHUT_DOWN_REASON = (
    "the job has been shut down: another rank has finished, or has ended with an exception, which its output then shows"
)


@final
class Engine:
    """The engine of one rank. All ranks build theirs together; it ends on all of them when one shuts down or fails.

    Args:
        world, communicator: the engine closes both at its end.
        settings: limits and timeouts.
        choose_algorithm: returns the algorithm for a sum of so many bytes over all ranks; called on rank 0.

    Attributes:
        timeline: recorded on rank 0; on the others it stays empty.
        ranks_by_set_id: the ranks of each process set.
        cuda: device of this rank's latest CUDA tensor, and of its zeros after it has joined.
        has_failed: True if a rank was lost or a transfer failed: only Headway's launcher can bring the ranks together
            again.
    """

    def __init__(
        self, world: World, communicator: Communicator, settings: Settings, choose_algorithm: Callable[[int], str]
    ) -> None:
        self.world, self._settings = world, settings
        self.timeline = Timeline()
        if settings.timeline not in ("", DYNAMIC) and world.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)
        self.ranks_by_set_id: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], SubmittedOperation] = {}
        # Operation of each handle that was not waited for, and whether its result is a single tensor.
        self._handles: dict[int, tuple[SubmittedOperation, bool]] = {}
        self._handle_numbers = itertools.count(1)
        self._unnamed_counts = Counter[tuple[int, str]]()
        self._num_joins = 0
        self._end_reason = ""
        self.has_failed = False
        self._executors: dict[int, ProcessSetExecutor] = {}
        self._collectives: dict[int, ProcessSetCollectives] = {}
        self._group_numbers = itertools.count()
        self._communicator = communicator
        self.cuda = torch.device("cuda", 0)
        self._connection, rank_connections = _connect(world, settings.timeout_s)
        self._add_set(GLOBAL_SET_ID, range(world.size), communicator)
        self._negotiator: Negotiator | None = None
        if rank_connections:
            self._negotiator = Negotiator(rank_connections, settings, self.timeline, choose_algorithm)
        self._reader = threading.Thread(target=self._read, name="headway-hvd-reader", daemon=True)
        self._reader.start()

    def build_name(self, kind: str, process_set: int, name: str | None) -> str:
        """Returns the name by which ranks match an operation; numbered if the caller gave none."""
        if name:
            return f"{kind}.{name}"
        # A rank that joined early has counted fewer: the count restarts on all ranks at each join.
        with self._lock:
            self._unnamed_counts[process_set, kind] += 1
            return f"{kind}.noname.{self._num_joins}.{self._unnamed_counts[process_set, kind]}"

    def get_members(self, kind: str, process_set: int) -> tuple[int, ...]:
        """Returns the ranks of a process set. Raises ValueError, with `kind` in its message, if there is none."""
        members = self.ranks_by_set_id.get(process_set)
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
            inputs, outputs: see SubmittedOperation.
            single: if True, `wait` returns the one tensor of the result instead of the tuple.

        Raises:
            HorovodInternalError: the engine has ended.
            ValueError: the set is unknown or without this rank, or an operation of this name is pending.
        """
        operation = SubmittedOperation(request, inputs, outputs)
        if request.device == "cuda":
            self.cuda = inputs[0].device
        # Checked and stored under one lock, so that two threads cannot submit the same name.
        key = request.process_set, request.name
        with self._lock:
            if self._end_reason:
                raise HorovodInternalError(self._end_reason)
            members = self.get_members(request.kind, request.process_set)
            if request.process_set not in self._executors:
                what = f"{request.kind}: rank {self.world.rank} is not a member of the process set"
                raise ValueError(f"{what} {list(members)}")
            if key in self._pending:
                what = f"{request.name} is already under way on this rank"
                raise ValueError(f"{what}; wait for it first, or give this one another name")
            self._pending[key] = operation
            handle = next(self._handle_numbers)
            self._handles[handle] = operation, single
        self._connection.send("request", request=request.to_fields())
        return handle

    def execute(self, request: Request) -> Any:
        """Submits an operation without tensors, waits for it and returns its result. Raises as `submit` and `wait`."""
        return self.wait(self.submit(request))

    def poll(self, handle: int) -> bool:
        """Returns True if `wait` would return at once. Raises ValueError if the handle is unknown, or waited for."""
        with self._lock:
            if handle not in self._handles:
                raise ValueError(f"handle {handle} was never given, or was waited for already")
            return self._handles[handle][0].wait(0)

    def wait(self, handle: int) -> Any:
        """Waits for an operation and returns its result; None if the handle was waited for already.

        Raises HorovodInternalError if the operation failed.
        """
        with self._lock:
            if handle not in self._handles:
                return None
            operation, is_single = self._handles[handle]
        operation.wait()
        with self._lock:
            self._handles.pop(handle, None)
        if operation.error:
            raise HorovodInternalError(operation.error)
        # The caching allocator has to know it: the memory was allocated on another stream.
        if operation.request.device == "cuda":
            for tensor in operation.result:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return operation.result[0] if is_single and operation.result else operation.result

    def shut_down(self) -> None:
        """Ends the engines of all ranks; operations that the ranks have agreed on are executed first."""
        # A stop goes over the negotiator, which tells all ranks; after a failure it has told them already.
        if self.has_failed:
            self._connection.hang_up()
        else:
            self._connection.send("stop")
        self._reader.join(self._settings.timeout_s)
        # A rank is stopped, or cannot be reached.
        if self._reader.is_alive():
            self._fail_pending("the ranks could not shut down together", failed=True)
            self._connection.hang_up()
            self._reader.join()
        if self._negotiator is not None:
            self._negotiator.close()

    def fail(self, reason: str) -> None:
        """Ends the engines of all ranks at once, from any thread: all pending operations fail."""
        self._fail_pending(reason, failed=True)
        self._connection.send("fail", why=reason)

    # Called in the threads of the reader and of the executors.

    def _read(self) -> None:
        drain: threading.Thread | None = None
        for message in self._connection:
            if message["kind"] == "go":
                response = Response.from_fields(message["response"])
                self._executors[response.process_set].put(response, self._claim_operations(response))
            elif message["kind"] == "stop":
                self._fail_pending(SHUT_DOWN_REASON, failed=False)
                # In a thread of its own: this one has to hear of a failure meanwhile.
                drain = threading.Thread(target=self._drain, name="headway-hvd-drain", daemon=True)
                drain.start()
            elif message["kind"] == "fail":
                self._fail_pending(message["why"], failed=True)
                break
            # The message `over`: all ranks have drained their executors.
            else:
                break
        else:
            self._fail_pending("rank 0 is lost: its connection ended", failed=True)
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
        # The executor of all ranks first: it adds and removes the others.
        self._executors[GLOBAL_SET_ID].close()
        for executor in self._executors.values():
            executor.close()

    def _fail_pending(self, reason: str, *, failed: bool) -> None:
        """Ends the operations that were not handed out yet; after a failure also those under way."""
        with self._lock:
            self._end_reason = self._end_reason or reason
            self.has_failed = self.has_failed or failed
            operations = list(self._pending.values())
            self._pending.clear()
            if failed:
                operations += [operation for operation, _ in self._handles.values()]
        if failed:
            self.world.abort(reason)
        for operation in operations:
            operation.end(self._end_reason)

    def _claim_operations(self, response: Response) -> list[SubmittedOperation]:
        """Returns this rank's operations of a response, or zeros if it has joined."""
        operations = []
        with self._lock:
            for index, name in enumerate(response.names):
                operation = self._pending.pop((response.process_set, name), None)
                if operation is None and response.like:
                    operation = self._build_zeros(response.like[index])
                if operation is not None:
                    operations.append(operation)
        return operations

    def _build_zeros(self, request: Request) -> SubmittedOperation:
        # Another rank's request gives dtypes and shapes: this rank may never have seen such a tensor.
        device = self.cuda if request.device == "cuda" else torch.device("cpu")
        pairs = zip(request.dtypes, request.shapes, strict=True)
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in pairs]
        return SubmittedOperation(request, zeros, zeros)

    def _begin(
        self, collectives: ProcessSetCollectives, response: Response, operations: list[SubmittedOperation]
    ) -> Finish:
        kind: Kind = response.kind
        # Sets change here, in the executor of all ranks, so that all ranks change them in the same order.
        if kind == "add_set":
            self._add_set(response.value, operations[0].request.splits, None)
            operations[0].result = (response.value,)
        elif kind == "remove_set":
            self._remove_set(operations[0].request.root)
        elif kind == "join":
            with self._lock:
                self._num_joins += 1
                self._unnamed_counts.clear()
            operations[0].result = (response.value,)
        elif kind != "barrier":
            return collectives.begin(response, operations)
        return do_nothing

    def _report_done(self, response: Response, start_s: float) -> None:
        if self._negotiator is not None:
            for name in response.names:
                self.timeline.record_done(name, response.kind, start_s)
        # One rank of the set is enough to let the negotiator hand out the next round.
        if self.world.rank == self.ranks_by_set_id[response.process_set][0]:
            self._connection.send("done", process_set=response.process_set)

    def _add_set(self, set_id: int, ranks: Sequence[int], communicator: Communicator | None) -> None:
        # Counted on all ranks: ids of sets are used again, and names of groups must not be.
        group_number = next(self._group_numbers)
        if self.world.rank in ranks:
            collectives = ProcessSetCollectives(self.world, f"hvd-{group_number}", ranks, communicator)
            self._collectives[set_id] = collectives
            self._executors[set_id] = ProcessSetExecutor(
                set_id,
                begin=lambda response, operations: self._begin(collectives, response, operations),
                on_done=self._report_done,
                on_broken=lambda error: self.fail(f"rank {self.world.rank}: {error}"),
            )
        self.ranks_by_set_id[set_id] = tuple(ranks)

    def _remove_set(self, set_id: int) -> None:
        with self._lock:
            executor = self._executors.pop(set_id, None)
            operations = [self._pending.pop(key) for key in list(self._pending) if key[0] == set_id]
        for operation in operations:
            operation.end("its process set was removed")
        if executor is not None:
            executor.close()
            self._collectives.pop(set_id).close()
        self.ranks_by_set_id.pop(set_id, None)


def _connect(world: World, timeout_s: float) -> tuple[Connection, dict[int, Connection]]:
    """Returns this rank's connection to the negotiator; and on rank 0 the negotiator's connections to all ranks."""
    if world.rank == 0:
        own_connection, negotiator_end = connect_pair(world.secret)
        return own_connection, {0: negotiator_end, **(_accept_ranks(world, timeout_s) if world.size > 1 else {})}
    host, port = world.control.broadcast_bytes(None).decode().rsplit(" ", 1)
    limit = MAX_HVD_MESSAGE_BYTES
    try:
        sock, channel = connect(host, int(port), world.secret, HVD_PURPOSE, timeout_s=timeout_s, limit_bytes=limit)
        sock.sendall(channel.seal(str(world.rank).encode()))
    except OSError as error:
        raise CommunicationError(f"rank 0 cannot be reached ({error})", where=f"{host}:{port}") from error
    tune_socket(sock, timeout_s)
    return Connection(sock, channel), {}


def _accept_ranks(world: World, timeout_s: float) -> dict[int, Connection]:
    """Accepts a connection of every other rank. Raises CommunicationError if one does not come in time."""
    peer_by_rank: dict[int, ChannelPeer] = {}

    # The first message of a connection is the rank at its other end.
    def store_rank(peer: ChannelPeer, message: bytes) -> None:
        peer_by_rank.setdefault(int(message[:8]), peer)

    address, limit = find_interface_address(world.interface), MAX_HVD_MESSAGE_BYTES
    server = ChannelServer(address, 0, world.secret, HVD_PURPOSE, on_message=store_rank, limit_bytes=limit)
    try:
        world.control.broadcast_bytes(f"{address} {server.port}".encode())
        deadline_s = monotonic() + timeout_s
        while missing := sorted(set(range(1, world.size)) - peer_by_rank.keys()):
            if monotonic() > deadline_s:
                raise CommunicationError(f"ranks {missing} did not connect to rank 0 within {timeout_s:g} s")
            server.poll(deadline_s - monotonic())
        for peer in peer_by_rank.values():
            tune_socket(peer.connection, timeout_s)
        return {rank: Connection(*server.detach(peer)) for rank, peer in peer_by_rank.items()}
    finally:
        server.close()
