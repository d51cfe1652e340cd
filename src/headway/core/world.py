"""World: ranks, hosts and groups of one generation.

Groups are torch's raw backends (ProcessGroupGloo, ProcessGroupNCCL) beside any default group of the user's: several
generations can follow each other in one process, the order of ranks in a group is ours (it is the order of the ring),
and each group knows its network interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from headway.core.errors import CollectiveTimeoutError, CommunicationError, GenerationEndedError, UsageError
from headway.core.gloo import GlooGroups, add_prefix
from headway.core.hosts import find_interface_to, identify_host
from headway.core.launcher_environment import LaunchedProcess
from headway.core.process_sockets import ProcessSocket
from headway.core.rendezvous import Rendezvous, join_rendezvous
from headway.core.torch_c10d import load_c10d, summarise_error

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

Op = Literal["sum", "min", "max", "product"]
Backend = Literal["gloo", "nccl"]

CONNECT_S = 300.0
"""How long ranks wait for each other at the start."""


@final
class CollectiveWork:
    """A collective under way."""

    def __init__(self, world: World, works: Sequence[Any], timeout_s: float | None = None) -> None:
        self._world, self._works = world, works
        self._wait = () if timeout_s is None else (timedelta(seconds=timeout_s),)

    def wait(self) -> None:
        """Waits for its end; on CUDA only the current stream does.

        Raises:
            GenerationEndedError: the generation was given up. CommunicationError: it failed or timed out.
        """
        try:
            for work in self._works:
                work.wait(*self._wait)
        except RuntimeError as error:
            raise self._world.build_error(error) from error


class JournalEntry(Protocol):
    """An entry of a log of operations."""

    done: bool


@final
class _NullEntry:
    done = False


@final
class Group:
    """Some ranks of a world, in an order of their own. Made by `World.group`.

    Tensors are flat and contiguous where pieces are spoken of. In a group of one everything is done at once.

    Attributes:
        rank, size: in this group.
        ranks: the world's ranks, in this group's order.
    """

    def __init__(self, world: World, ranks: Sequence[int], backend: Any, sockets: list[ProcessSocket]) -> None:
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self._world, self._backend, self._sockets = world, backend, sockets

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """In place, over all ranks of the group."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        options = load_c10d().AllreduceOptions()
        options.reduceOp = getattr(load_c10d().ReduceOp, op.upper())
        return self._work(lambda backend: backend.allreduce([tensor], options))

    def all_to_all(
        self,
        out: torch.Tensor,
        into: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
    ) -> CollectiveWork:
        """Piece r of `into` goes to rank r; piece r of `out` comes from it.

        Args:
            out, into: flat. Splits: elements of each piece; default: equal ones.
        """
        if self.size == 1:
            out.copy_(into)
            return CollectiveWork(self._world, ())
        splits, options = (list(out_splits or ()), list(in_splits or ())), load_c10d().AllToAllOptions()
        return self._work(lambda backend: backend.alltoall_base(out, into, *splits, options))

    def all_gather(self, out: torch.Tensor, piece: torch.Tensor) -> CollectiveWork:
        """`out` becomes the pieces of all ranks, one behind the other; all have the same length."""
        if self.size == 1:
            out.copy_(piece)
            return CollectiveWork(self._world, ())
        return self._work(lambda backend: backend._allgather_base(out, piece))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> CollectiveWork:
        """In place, from rank `root` of the group."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        options = load_c10d().BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._work(lambda backend: backend.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> CollectiveWork:
        """To rank `to` of the group; NCCL knows no tags."""
        return self._work(lambda backend: backend.send([tensor], to, tag), single=True)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> CollectiveWork:
        """From rank `source` of the group."""
        return self._work(lambda backend: backend.recv([tensor], source, tag), single=True)

    def barrier(self) -> None:
        """Waits until all ranks of the group have come here."""
        self.gather_bytes(b"")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank of a Gloo group, of whatever length, on every rank."""
        import torch

        if self.size == 1:
            return [data]
        noted = self._record("gathering", len(data))
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.all_gather(lengths, torch.tensor([len(data)])).wait()
        longest = max(1, int(lengths.max()))
        mine, out = torch.zeros(longest, dtype=torch.uint8), torch.empty(self.size * longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        self.all_gather(out, mine).wait()
        noted.done = True
        return [row[:length].numpy().tobytes() for row, length in zip(out.view(self.size, -1), lengths, strict=True)]

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """The bytes of rank `root` of a Gloo group on every rank; the others' are not looked at."""
        import torch

        if self.rank == root and data is None:
            raise UsageError("the root of a broadcast has nothing to send")
        noted = self._record("broadcast", 0)
        length = torch.tensor([len(data) if self.rank == root and data is not None else 0])
        self.broadcast(length, root).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == root and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(content):
            self.broadcast(content, root).wait()
        noted.done = True
        return content.numpy().tobytes()

    def abort(self) -> None:
        """Makes every operation under way fail at once, here and at the ranks that wait for this one."""
        if self.size > 1 and not self._sockets and self._backend is not None:
            self._backend.abort()  # NCCL
        for end in self._sockets:
            end.shut_down()

    def close(self) -> None:
        """Lets go of its connections; what is under way should have ended."""
        self._backend = None
        self._sockets = []

    def _record(self, what: str, nbytes: int) -> JournalEntry:
        journal = self._world.journal
        whole = journal is not None and self.size == self._world.size
        return journal(what, nbytes) if journal is not None and whole else _NullEntry()

    def _work(self, issue: Callable[[Any], Any], *, single: bool = False) -> CollectiveWork:
        if self._backend is None:
            raise self._world.build_error(RuntimeError("the group is closed"))
        try:
            # Gloo's send and recv know the time-out that the group was built with, not the one of its collectives.
            given = self._world.timeout_s if single and self._world.backend == "gloo" else None
            return CollectiveWork(self._world, (issue(self._backend),), given)
        except RuntimeError as error:
            raise self._world.build_error(error) from error


@final
class World:
    """The ranks of one generation. `World.create_single`, `World.join` and `World.create` make one.

    Attributes:
        rank, size: of all. local_rank, local_size: on this host. host: number of this host.
        hosts: the ranks of each host; hosts are ring_order by their lowest rank.
        generation: 0, and one more whenever members were lost or came.
        backend: `gloo` on a CPU, `nccl` on CUDA.
        interface: the network interface of its groups.
        timeout_s: of every operation.
        control: all ranks, on Gloo: for bytes between hosts' programs.
        store: the generation's own part of the key-value store; None in a world of one.
        secret: what the processes of the run know, and nobody else.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        store: Store | None,
        generation: int,
        interface: str,
        timeout_s: float,
        connect_s: float = CONNECT_S,
        on_created: Callable[[World], None] = lambda world: None,
        secret: bytes = b"",
    ) -> None:
        self.rank, self.hosts = rank, tuple(tuple(ranks) for ranks in hosts)
        self.size = sum(len(ranks) for ranks in self.hosts)
        self.host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        self.local_rank, self.local_size = self.hosts[self.host].index(rank), len(self.hosts[self.host])
        self.device, self.store, self.generation, self.secret = device, store, generation, secret
        self.meeting: Rendezvous | None = None
        """Where the processes of another launcher met: it holds the store."""
        self.backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self.interface, self.timeout_s = interface, timeout_s
        self.explain: Callable[[], str] = lambda: ""
        """Says which rank is behind, where something knows: the words of errors."""
        self.journal: Callable[[str, int], JournalEntry] | None = None
        """Notes an exchange of bytes among all ranks in the log of operations, where there is one."""
        self._groups: list[Group] = []
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        self._end_reason: str | None = None
        self._meshes = GlooGroups(
            rank, interface, connect_s=connect_s, timeout_s=timeout_s, check_not_ended=self._check_not_ended
        )
        on_created(self)
        try:
            self.control = self.group(name="control", backend="gloo")
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"World: rank {self.rank} of {self.size} on {len(self.hosts)} hosts, generation {self.generation}"

    @staticmethod
    def create_single(device: torch.device) -> World:
        """A world of one process."""
        return World(0, ((0,),), device, store=None, generation=0, interface="lo", timeout_s=CONNECT_S)

    @staticmethod
    def join(
        launched: LaunchedProcess, device: torch.device, *, timeout_s: float = CONNECT_S, interface: str | None = None
    ) -> World:
        """Meets the other processes of a launcher at its address; rank 0 serves the store there.

        Raises:
            UsageError: the launcher gave no address. CommunicationError: the others did not come within CONNECT_S.
        """
        if launched.size == 1:
            return World.create_single(device)
        if launched.address is None or launched.port is None:
            fix = "Set MASTER_ADDR to the address of rank 0's host, and MASTER_PORT to a free port there."
            raise UsageError(f"{launched.launcher} says nowhere the processes meet", fix=fix)
        meeting = join_rendezvous(launched, interface)
        world = World.create(
            meeting.store,
            launched.rank,
            launched.size,
            device,
            master=launched.address,
            generation=meeting.attempt,
            timeout_s=timeout_s,
            interface=interface,
            secret=meeting.secret,
        )
        world.meeting = meeting
        meeting.confirm()
        return world

    @staticmethod
    def create(
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        master: str,
        secret: bytes,
        generation: int = 0,
        timeout_s: float = CONNECT_S,
        interface: str | None = None,
        identities: Sequence[str] | None = None,
        connect_s: float = CONNECT_S,
        on_created: Callable[[World], None] = lambda world: None,
    ) -> World:
        """A world of ranks that share a store.

        Args:
            master: address of the host that serves the store: its route gives the interface where none is named.
            secret: of the run.
            identities: which host each rank is on; unset: the ranks tell each other.
            connect_s: how long the building of a group may take.
            on_created: given the world before its first group is built, so that it can be given up meanwhile.

        Raises:
            CommunicationError: some rank did not come.
        """
        mine = add_prefix(store, f"headway/{generation}")
        try:
            if identities is None:
                mine.set(f"host/{rank}", identify_host())
                identities = [mine.get(f"host/{other}").decode() for other in range(size)]
            hosts: dict[str, list[int]] = {}
            for other, identity in enumerate(identities):
                hosts.setdefault(identity, []).append(other)
            if interface is None:
                interface = "lo" if len(hosts) == 1 else find_interface_to(master)
            return World(
                rank,
                list(hosts.values()),
                device,
                store=mine,
                generation=generation,
                interface=interface,
                timeout_s=timeout_s,
                connect_s=connect_s,
                on_created=on_created,
                secret=secret,
            )
        except RuntimeError as error:
            what = f"rank {rank} of {size} could not meet the others: {summarise_error(error)}"
            fix = f"Do all processes run, and can they reach each other through the interface {interface or 'chosen'}?"
            raise CommunicationError(what, where=f"generation {generation}", fix=fix) from error

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which writes the run folder."""
        return self.rank == 0

    @property
    def ring_order(self) -> tuple[int, ...]:
        """All ranks, host by host: a ring in this order crosses each host's link once."""
        return tuple(rank for ranks in self.hosts for rank in ranks)

    def group(self, ranks: Iterable[int] | None = None, *, name: str, backend: Backend | None = None) -> Group:
        """A group of some ranks; each of them has to call this, and in the same order where the name is the same.

        Args:
            ranks: in the group's order; default: all, host by host.
            backend: default: that of the world.

        Raises:
            GenerationEndedError, CommunicationError: it could not be built.
        """
        members = self.ring_order if ranks is None else tuple(ranks)
        number = self._names[name, members] = self._names.get((name, members), -1) + 1
        if len(members) == 1:
            return Group(self, members, object(), [])
        self._check_not_ended()
        assert self.store is not None
        key = f"{name}/{number}/{'-'.join(map(str, members)) if len(members) < self.size else 'all'}"
        store = add_prefix(self.store, key)
        made: list[ProcessSocket] = []
        try:
            if (backend or self.backend) == "nccl":
                raw = self._create_nccl(store, members)
            else:
                raw, made = self._meshes.build(store, members)
        except RuntimeError as error:
            raise self.build_error(error) from error
        group = Group(self, members, raw, made)
        self._groups.append(group)
        try:
            self._check_not_ended()
        except CommunicationError:  # it was given up meanwhile
            group.abort()
            raise
        return group

    def _create_nccl(self, store: Store, members: Sequence[int]) -> Any:
        options = load_c10d().ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return load_c10d().ProcessGroupNCCL(store, members.index(self.rank), len(members), options)

    def build_error(self, error: BaseException) -> CommunicationError:
        """The error that a failed operation is to its caller."""
        if self._end_reason is not None:
            return GenerationEndedError(self._end_reason)
        said = summarise_error(error)
        kind = CollectiveTimeoutError if "Timed out" in said else CommunicationError
        who = self.explain()
        what = f"a collective failed: {said}"
        return kind(f"{what}. {who}" if who else what, where=f"rank {self.rank} of {self.size}")

    def _check_not_ended(self) -> None:
        if self._end_reason is not None:
            raise GenerationEndedError(self._end_reason)

    def abort(self, why: str) -> None:
        """Ends the generation: every operation of its groups raises GenerationEndedError. Any thread may call it."""
        if self._end_reason is None:
            self._end_reason = why
        for group in tuple(self._groups):
            group.abort()

    def close(self) -> None:
        """Lets go of all groups."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._meshes.close()
        if self.meeting is not None:
            self.meeting.close()
