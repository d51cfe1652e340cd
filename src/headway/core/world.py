"""The ranks, hosts and process groups of one generation of a run.

Groups are torch's raw backends (ProcessGroupGloo, ProcessGroupNCCL), independent of the user's default process group.
So several generations can follow each other in one process, Headway sets the order of ranks (the order of the ring),
and each group has its own network interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

# Default time-out of joining a world and of its collectives.
CONNECT_S = 300.0


@final
class CollectiveWork:
    """An asynchronous collective."""

    def __init__(self, world: World, works: Sequence[Any], timeout_s: float | None = None) -> None:
        self._world, self._works = world, works
        self._wait = () if timeout_s is None else (timedelta(seconds=timeout_s),)

    def wait(self) -> None:
        """Waits for its completion; on CUDA only the current stream waits.

        Raises:
            GenerationEndedError: the generation has ended.
            CommunicationError: it failed or timed out.
        """
        try:
            for work in self._works:
                work.wait(*self._wait)
        except RuntimeError as error:
            raise self._world.build_error(error) from error


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
    """

    def __init__(self, world: World, ranks: Sequence[int], backend: Any, sockets: list[ProcessSocket]) -> None:
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self._world, self._backend, self._sockets = world, backend, sockets

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """Reduces a tensor over all ranks, in place."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        # torch names the enum's members in capitals: ReduceOp.SUM.
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
        """Sends piece r of `into` to rank r and receives piece r of `out` from it.

        Args:
            out, into: flat tensors.
            out_splits, in_splits: elements of each piece; default: equal pieces.
        """
        # Without splits, torch divides the tensors equally.
        if self.size == 1:
            out.copy_(into)
            return CollectiveWork(self._world, ())
        splits, options = (list(out_splits or ()), list(in_splits or ())), load_c10d().AllToAllOptions()
        return self._work(lambda backend: backend.alltoall_base(out, into, *splits, options))

    def all_gather(self, out: torch.Tensor, piece: torch.Tensor) -> CollectiveWork:
        """Fills `out` with the pieces of all ranks in their order; all have the same length."""
        if self.size == 1:
            out.copy_(piece)
            return CollectiveWork(self._world, ())
        return self._work(lambda backend: backend._allgather_base(out, piece))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> CollectiveWork:
        """Broadcasts a tensor from rank `root` of the group, in place."""
        if self.size == 1:
            return CollectiveWork(self._world, ())
        options = load_c10d().BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._work(lambda backend: backend.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> CollectiveWork:
        """Sends a tensor to rank `to` of the group; NCCL ignores tags."""
        return self._work(lambda backend: backend.send([tensor], to, tag), single=True)

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
        """Makes pending operations fail at once, on this rank and on the ranks that wait for it."""
        # Only NCCL can abort; Gloo's connections are shut down instead.
        if self.size > 1 and not self._sockets and self._backend is not None:
            self._backend.abort()
        for end in self._sockets:
            end.shut_down()

    def close(self) -> None:
        """Releases its connections. No operation may be pending."""
        self._backend = None
        self._sockets = []

    def _record(self, what: str, nbytes: int) -> JournalEntry:
        # Only operations of all ranks are recorded: the ranks compare their logs to find a different order.
        journal = self._world.journal
        whole = journal is not None and self.size == self._world.size
        return journal(what, nbytes) if journal is not None and whole else _NullEntry()

    def _work(self, issue: Callable[[Any], Any], *, single: bool = False) -> CollectiveWork:
        if self._backend is None:
            raise self._world.build_error(RuntimeError("the group is closed"))
        try:
            # Gloo's send and recv use the time-out that the group was built with, not that of its collectives.
            given = self._world.timeout_s if single and self._world.backend == "gloo" else None
            return CollectiveWork(self._world, (issue(self._backend),), given)
        except RuntimeError as error:
            raise self._world.build_error(error) from error


@final
@dataclass(frozen=True)
class Membership:
    """The place of one rank in a generation.

    Attributes:
        rank, size: rank of this process and number of ranks.
        generation: number of the generation.
        identities: host identity of each rank; None: the ranks exchange them through the store.
    """

    rank: int
    size: int
    generation: int = 0
    identities: Sequence[str] | None = None


@final
class World:
    """The ranks of one generation. Use `World.create_single`, `World.join` or `World.create`.

    Attributes:
        rank, size: rank of this process and number of ranks.
        local_rank, local_size: the same on this host.
        host: number of this host.
        hosts: ranks of each host; hosts are ordered by their lowest rank.
        generation: 0, plus 1 whenever members were lost or joined.
        backend: `gloo` on a CPU, `nccl` on CUDA.
        interface: network interface of its groups.
        timeout_s: time-out of every operation.
        control: group of all ranks on Gloo, for bytes between the programs.
        store: this generation's part of the key-value store; None in a world of one rank.
        secret: the run's secret.
        rendezvous: holder of the store if another launcher started the ranks, else None.
        explain: returns which rank is behind, for messages of failed collectives; empty if unknown.
        journal: records an exchange of bytes among all ranks in the log of operations, if there is one.
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
        # `hosts` lists ranks by host: rank 2 may be alone on host 1, so local ranks are places in these lists.
        self.host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        self.local_rank, self.local_size = self.hosts[self.host].index(rank), len(self.hosts[self.host])
        self.device, self.store, self.generation, self.secret = device, store, generation, secret
        self.rendezvous: Rendezvous | None = None
        self.backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self.interface, self.timeout_s = interface, timeout_s
        self.explain: Callable[[], str] = lambda: ""
        self.journal: Callable[[str, int], JournalEntry] | None = None
        self._groups: list[Group] = []
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        # Set once by `abort`, from any thread; every later operation raises it.
        self._end_reason: str | None = None
        self._gloo_groups = GlooGroups(
            rank, interface, connect_s=connect_s, timeout_s=timeout_s, check_not_ended=self._check_not_ended
        )
        # Before the first group: connecting waits for other ranks, and another thread must be able to end that.
        on_created(self)
        try:
            self.control = self.create_group(name="control", backend="gloo")
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"World: rank {self.rank} of {self.size} on {len(self.hosts)} hosts, generation {self.generation}"

    @staticmethod
    def create_single(device: torch.device) -> World:
        """Returns a world of one rank, without any network."""
        return World(0, ((0,),), device, store=None, generation=0, interface="lo", timeout_s=CONNECT_S)

    @staticmethod
    def join(
        launched: LaunchedProcess, device: torch.device, *, timeout_s: float = CONNECT_S, interface: str | None = None
    ) -> World:
        """Joins the other processes of a launcher at its rendezvous, for which rank 0 serves the store.

        Raises:
            UsageError: the launcher gave no address.
            CommunicationError: the others did not join within CONNECT_S.
        """
        if launched.size == 1:
            return World.create_single(device)
        if launched.address is None or launched.port is None:
            fix = "Set MASTER_ADDR to the address of rank 0's host, and MASTER_PORT to a free port there."
            raise UsageError(f"{launched.launcher} gives no address of rank 0", fix=fix)
        rendezvous = join_rendezvous(launched, interface)
        world = World.create(
            rendezvous.store,
            Membership(launched.rank, launched.size, generation=rendezvous.attempt),
            device,
            master=launched.address,
            timeout_s=timeout_s,
            interface=interface,
            secret=rendezvous.secret,
        )
        world.rendezvous = rendezvous
        rendezvous.confirm()
        return world

    @staticmethod
    def create(
        store: Store,
        membership: Membership,
        device: torch.device,
        *,
        master: str,
        secret: bytes,
        timeout_s: float = CONNECT_S,
        interface: str | None = None,
        connect_s: float = CONNECT_S,
        on_created: Callable[[World], None] = lambda world: None,
    ) -> World:
        """Creates the world of ranks that share a store.

        Args:
            membership: the place of this rank.
            master: address of the host that serves the store; the route to it gives the default interface.
            secret: the run's secret.
            connect_s: time-out for building a group.
            on_created: called with the world before its first group is built, so that another thread can abort it.

        Raises:
            CommunicationError: some rank did not join.
        """
        rank, generation, identities = membership.rank, membership.generation, membership.identities
        mine = add_prefix(store, f"headway/{generation}")
        try:
            if identities is None:
                mine.set(f"host/{rank}", identify_host())
                identities = [mine.get(f"host/{other}").decode() for other in range(membership.size)]
            # Hosts come in the order of their first ranks, which is the same on every rank.
            hosts: dict[str, list[int]] = {}
            for other, identity in enumerate(identities):
                hosts.setdefault(identity, []).append(other)
            # Gloo connects over one interface. On a single host that is the loopback, whatever the network.
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
            what = f"rank {rank} of {membership.size} could not meet the others: {summarise_error(error)}"
            fix = f"Do all processes run, and can they reach each other through the interface {interface or 'chosen'}?"
            raise CommunicationError(what, where=f"generation {generation}", fix=fix) from error

    @property
    def is_lead(self) -> bool:
        """True on rank 0, which writes the run folder."""
        return self.rank == 0

    @property
    def ring_order(self) -> tuple[int, ...]:
        """All ranks, host by host: a ring in this order crosses each host's link once."""
        return tuple(rank for ranks in self.hosts for rank in ranks)

    def create_group(self, ranks: Iterable[int] | None = None, *, name: str, backend: Backend | None = None) -> Group:
        """Creates a process group; each of its ranks has to call this, in the same order for equal names.

        Args:
            ranks: ranks in the group's order; default: all, host by host.
            backend: default: the world's backend.

        Raises:
            GenerationEndedError, CommunicationError: it could not be built.
        """
        members = self.ring_order if ranks is None else tuple(ranks)
        number = self._names[name, members] = self._names.get((name, members), -1) + 1
        # A group of one needs no backend; `object()` marks it as open.
        if len(members) == 1:
            return Group(self, members, object(), [])
        self._check_not_ended()
        assert self.store is not None
        # `number` tells groups of one name and the same members apart, for example after one was closed.
        key = f"{name}/{number}/{'-'.join(map(str, members)) if len(members) < self.size else 'all'}"
        store = add_prefix(self.store, key)
        made: list[ProcessSocket] = []
        try:
            if (backend or self.backend) == "nccl":
                raw = self._create_nccl(store, members)
            else:
                raw, made = self._gloo_groups.build(store, members)
        except RuntimeError as error:
            raise self.build_error(error) from error
        group = Group(self, members, raw, made)
        self._groups.append(group)
        try:
            self._check_not_ended()
        # Another thread may have aborted the world while the group connected.
        except CommunicationError:
            group.abort()
            raise
        return group

    def _create_nccl(self, store: Store, members: Sequence[int]) -> Any:
        options = load_c10d().ProcessGroupNCCL.Options()
        # NCCL connects on the first collective, so building the group does not wait for the other ranks.
        options._timeout = timedelta(seconds=self.timeout_s)
        return load_c10d().ProcessGroupNCCL(store, members.index(self.rank), len(members), options)

    def build_error(self, error: BaseException) -> CommunicationError:
        """Returns the error to raise for a failed operation: GenerationEndedError once the world was aborted."""
        if self._end_reason is not None:
            return GenerationEndedError(self._end_reason)
        # torch raises RuntimeError for everything; only the text tells a time-out.
        summary = summarise_error(error)
        kind = CollectiveTimeoutError if "Timed out" in summary else CommunicationError
        who = self.explain()
        what = f"a collective failed: {summary}"
        return kind(f"{what}. {who}" if who else what, where=f"rank {self.rank} of {self.size}")

    def _check_not_ended(self) -> None:
        if self._end_reason is not None:
            raise GenerationEndedError(self._end_reason)

    def abort(self, why: str) -> None:
        """Ends the generation: every operation of its groups raises GenerationEndedError. Any thread may call it."""
        # The first reason stays: later ones are consequences of it.
        if self._end_reason is None:
            self._end_reason = why
        for group in tuple(self._groups):
            group.abort()

    def close(self) -> None:
        """Closes all groups and leaves the rendezvous."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._gloo_groups.close()
        if self.rendezvous is not None:
            self.rendezvous.close()
