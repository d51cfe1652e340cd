"""Group: the collectives of some ranks of a world, over connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from headway.core.errors import CommunicationError, UsageError
from headway.core.exchange_waits import Exchange
from headway.core.process_sockets import ProcessSocket
from headway.core.torch_c10d import load_c10d

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from headway.core.world import World

Op = Literal["sum", "min", "max", "product"]
DIRECT_BYTES = 1 << 16
"""Pieces that Gloo ranks send each other directly. See `Group._start_direct`."""
DIRECT_TAG = 1 << 20
"""Keeps these pieces apart from those of `Group.send`."""
ABORT_TAG, INTERRUPT_S = DIRECT_TAG + 1, 0.001
"""The tag of a message that nobody sends, and how long `Group.interrupt` waits for it."""


@final
class CollectiveWork:
    """An asynchronous collective."""

    def __init__(
        self,
        world: World,
        works: Sequence[Any],
        timeout_s: float | None = None,
        interface: str | None = None,
        exchange: Exchange | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._world, self._works, self._interface, self._exchange = world, works, interface, exchange
        self._wait = () if timeout_s is None else (timedelta(seconds=timeout_s),)
        self._finish = finish

    def wait(self, exchange: Exchange | None = None) -> None:
        """Waits for its completion; on CUDA only the current stream waits.

        Args:
            exchange: what the wait counts as in `World.waits`; default: as the group says.

        Raises:
            GenerationEndedError: the generation has ended.
            CommunicationError: it failed or timed out.
        """
        begun = perf_counter_ns()
        # Gloo's sends and receives cannot be waited for twice.
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait(*self._wait)
            if works and self._finish is not None:
                self._finish()
        except RuntimeError as error:
            raise self._world.build_error(error, self._interface) from error
        exchange = exchange or self._exchange
        # On CUDA the host has not waited, and a group of one rank has nothing to wait for.
        if exchange is not None and works and self._world.device.type == "cpu":
            self._world.waits.add(exchange, perf_counter_ns() - begun)


class JournalEntry(Protocol):
    """An entry in the log of operations; `done` is set once the operation has completed."""

    done: bool


@final
class _NullEntry:
    done = False


@final
class Group:
    """A process group: some ranks of a world, in an order of their own. Use `World.create_group` to create one.

    Tensors that are split into pieces are flat and contiguous. In a group of one rank every operation is immediate.

    Attributes:
        rank, size: this process's rank in the group, and its size.
        ranks: the world's ranks, in this group's order.
        interface: network interface of its connections; None: NCCL's choice, or a group of one rank.
    """

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        backend: Any,
        sockets: list[ProcessSocket],
        store: Store | None = None,
        interface: str | None = None,
        exchange: Exchange | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self._world, self._backend, self._sockets, self.interface = world, backend, sockets, interface
        self._exchange, self._timeout_s = exchange, world.timeout_s if timeout_s is None else timeout_s
        # NCCL connects at the first collective, through the store. A store written in Python has to be kept until then:
        # torch keeps its C++ part only, which fails without the other ("Not implemented").
        self._store = store
        self._is_aborted = False
        hosts = {world.find_host(rank) for rank in self.ranks}
        self._is_even = len(hosts) in (1, self.size)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """Reduces a tensor over all ranks, in place."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        # torch names the enum's members in capitals: ReduceOp.SUM.
        options = load_c10d().AllreduceOptions()
        options.reduceOp = getattr(load_c10d().ReduceOp, op.upper())
        return self._work(lambda backend: backend.allreduce([tensor], options))

    def all_reduce_pieces(self, pieces: Sequence[torch.Tensor]) -> CollectiveWork:
        """Sums several tensors over all ranks of a Gloo group, in place, as one tensor in which they follow each other.

        Gloo's thread copies them there and back.
        """
        options = load_c10d().AllreduceCoalescedOptions()
        return self._work(lambda backend: backend.allreduce_coalesced(list(pieces), options))

    def all_to_all(
        self,
        out: torch.Tensor,
        into: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
    ) -> CollectiveWork:
        """Sends piece r of `into` to rank r and receives piece r of `out` from it.

        It does not wait for operations that were started before and may still change `into`.

        Args:
            out, into: flat tensors.
            out_splits, in_splits: elements of each piece; default: equal pieces.
        """
        if self.size == 1:
            out.copy_(into)
            return CollectiveWork(self._world, ())
        if self.interface is not None:
            return self._exchange_pieces(out, into, out_splits, in_splits)
        # Without splits, torch divides the tensors equally.
        splits, options = (list(out_splits or ()), list(in_splits or ())), load_c10d().AllToAllOptions()
        return self._work(lambda backend: backend.alltoall_base(out, into, *splits, options))

    def all_gather(self, out: torch.Tensor, piece: torch.Tensor) -> CollectiveWork:
        """Fills `out` with the pieces of all ranks in their order; all have the same length.

        It does not wait for operations that were started before and may still change `piece`.
        """
        if self.size == 1:
            out.copy_(piece)
            return CollectiveWork(self._world, ())
        # With several ranks on each of several hosts, a piece would go to a host several times.
        if self.interface is not None and self._is_even and piece.nbytes >= DIRECT_BYTES:
            pieces, own = dict(enumerate(out.view(self.size, -1).unbind())), dict.fromkeys(range(self.size), piece)
            return self._work(lambda backend: self._start_direct(backend, pieces, own), single=True)
        return self._work(lambda backend: backend._allgather_base(out, piece))

    def reduce_scatter(self, out: torch.Tensor, pieces: torch.Tensor) -> None:
        """Sums piece r of all ranks into `out` on rank r, and waits for it, on CUDA with the current stream alone.

        NCCL adds in an order of its own. Gloo would send as much as for an all-reduce, so there each piece goes to its
        rank, which adds those of all in their order.

        Args:
            out, pieces: flat tensors; all pieces have the length of `out`.
        """
        if self.interface is None and self.size > 1:
            options = load_c10d().ReduceScatterOptions()
            self._work(lambda backend: backend._reduce_scatter_base(out, pieces, options)).wait()
            return
        received = pieces.new_empty(len(pieces))
        self.all_to_all(received, pieces).wait()
        first, *others = received.view(self.size, -1)
        out.copy_(first)
        for piece in others:
            out.add_(piece)

    def _exchange_pieces(
        self,
        out: torch.Tensor,
        into: torch.Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
    ) -> CollectiveWork:
        """An `all_to_all` of Gloo ranks, which send large pieces directly. Both ends of a piece know its size."""
        import torch

        got, sent = (
            one.split(list(splits)) if splits else one.view(self.size, len(one) // self.size).unbind()
            for one, splits in ((out, out_splits), (into, in_splits))
        )
        large_out, large_in = (
            {rank: piece for rank, piece in enumerate(pieces) if piece.nbytes >= DIRECT_BYTES} for pieces in (got, sent)
        )
        # Without splits all pieces of all ranks have one size.
        if large_in and not out_splits and not in_splits:
            return self._work(lambda backend: self._start_direct(backend, large_out, large_in), single=True)
        # Other ranks may have small pieces, so that each rank takes part in this, even with nothing.
        small_out, small_in = (
            [piece[:0] if rank in large else piece for rank, piece in enumerate(pieces)]
            for pieces, large in ((got, large_out), (sent, large_in))
        )
        lengths = [[len(piece) for piece in pieces] for pieces in (small_out, small_in)]
        small, rest = torch.cat(small_out) if large_out else out, torch.cat(small_in) if large_in else into

        def issue(backend: Any) -> list[Any]:
            direct = self._start_direct(backend, large_out, large_in)
            return [*direct, backend.alltoall_base(small, rest, *lengths, load_c10d().AllToAllOptions())]

        def finish() -> None:
            for piece, arrived in zip(small_out, small.split(lengths[0]), strict=True):
                piece.copy_(arrived)

        return self._work(issue, single=bool(large_out or large_in), finish=finish if large_out else None)

    def _start_direct(
        self, backend: Any, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]
    ) -> list[Any]:
        """Sends `into[r]` to rank r of a Gloo group and receives `out[r]` from it.

        Each rank posts what it receives before what it sends. Gloo's own collectives send first: what tells the other
        rank that it may send is then often queued behind this rank's data, and the two directions of a connection take
        turns. Two hosts at 200 Mbit/s exchanged 8 MB in 0.68 s in place of 0.34, and gathered them in 0.53. Small
        pieces take as long, and longer if the thread that sends goes on computing: a network of small strips made 0.82
        times as many steps.
        """
        if self.rank in out:
            out[self.rank].copy_(into[self.rank])
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        return [
            *(backend.recv([out[rank]], rank, DIRECT_TAG) for rank in reversed(others) if rank in out),
            *(backend.send([into[rank]], rank, DIRECT_TAG) for rank in others if rank in into),
        ]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> CollectiveWork:
        """Broadcasts a tensor from rank `root` of the group, in place."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        options = load_c10d().BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._work(lambda backend: backend.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, timeout_s: float | None = None) -> CollectiveWork:
        """Sends a tensor to rank `to` of the group; NCCL ignores tags.

        Args:
            timeout_s: Gloo's limit of its wait. Default: that of the group.
        """
        return self._work(lambda backend: backend.send([tensor], to, tag), single=True, timeout_s=timeout_s)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> CollectiveWork:
        """Receives a tensor from rank `source` of the group; NCCL ignores tags."""
        return self._work(lambda backend: backend.recv([tensor], source, tag), single=True)

    def barrier(self) -> None:
        """Waits until all ranks of the group have reached this call."""
        self.gather_bytes(b"")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers byte strings of any length from all ranks of a Gloo group, on every rank."""
        import torch

        if self.size == 1:
            return [data]
        noted = self._record("gathering", len(data))
        # Lengths first, then the padded bytes: all_gather needs pieces of one length.
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.all_gather(lengths, torch.tensor([len(data)])).wait()
        longest = max(1, int(lengths.max()))
        mine, out = torch.zeros(longest, dtype=torch.uint8), torch.empty(self.size * longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        self.all_gather(out, mine).wait()
        noted.done = True
        return [row[:length].numpy().tobytes() for row, length in zip(out.view(self.size, -1), lengths, strict=True)]

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Returns the bytes of rank `root` of a Gloo group on every rank; other ranks' `data` are ignored."""
        import torch

        if self.rank == root and data is None:
            raise UsageError("the root of a broadcast has nothing to send")
        noted = self._record("broadcast", 0)
        # The other ranks learn the length first, to allocate the tensor that they receive into.
        length = torch.tensor([len(data) if self.rank == root and data is not None else 0])
        self.broadcast(length, root).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == root and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        # An empty string needs no second collective.
        if len(content):
            self.broadcast(content, root).wait()
        noted.done = True
        return content.numpy().tobytes()

    def abort(self) -> None:
        """Makes pending operations fail at once, on this rank and on the ranks that wait for it.

        Gloo may forget a send that is under way, whose wait then lasts until its time-out; see `interrupt`.
        """
        self._is_aborted = True
        # Only NCCL can abort; Gloo's connections are shut down instead.
        if self.size > 1 and not self._sockets and self._backend is not None:
            self._backend.abort()
        for end in self._sockets:
            end.shut_down()

    def interrupt(self, other: int) -> None:
        """Aborts a Gloo group of two ranks; no operation of this rank is forgotten.

        After a wait that timed out, Gloo fails all operations of its connections and closes them. If a connection is
        shut down instead, a send that is about to write to it is forgotten, and its wait does not end.

        Args:
            other: the other rank of the group.
        """
        import torch

        with suppress(CommunicationError):
            self._work(
                lambda backend: backend.recv([torch.empty(1)], other, ABORT_TAG), single=True, timeout_s=INTERRUPT_S
            ).wait()
        self.abort()

    def close(self) -> None:
        """Releases its connections. No operation may be pending."""
        self._backend = None
        self._sockets = []

    def _record(self, what: str, nbytes: int) -> JournalEntry:
        # Only operations of all ranks are recorded: the ranks compare their logs to find a different order.
        journal = self._world.journal
        whole = journal is not None and self.size == self._world.size
        return journal(what, nbytes) if journal is not None and whole else _NullEntry()

    def _work(
        self,
        issue: Callable[[Any], Any],
        *,
        single: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], object] | None = None,
    ) -> CollectiveWork:
        """Starts what `issue` returns, a work of the backend or a list of them.

        Args:
            single: some are a send or a receive.
            timeout_s: their limit. Default: that of the group.
            finish: called once they have completed.
        """
        if self._backend is None:
            raise self._world.build_error(RuntimeError("the group is closed"), self.interface)
        try:
            # Gloo's send and recv use the time-out that the group was built with, not that of its collectives.
            given = (timeout_s or self._timeout_s) if single and self.interface is not None else None
            works = issue(self._backend)
            # Gloo forgets a send that finds its connection shut down: a wait for it would not end.
            if single and self._is_aborted:
                raise RuntimeError("the group was aborted")
            works = works if isinstance(works, list) else [works]
            return CollectiveWork(self._world, works, given, self.interface, self._exchange, finish)
        except RuntimeError as error:
            raise self._world.build_error(error, self.interface) from error
