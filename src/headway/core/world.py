"""The ranks, hosts and process groups of one generation of a run.

Groups are torch's raw backends (ProcessGroupGloo, ProcessGroupNCCL), independent of the user's default process group.
So several generations can follow each other in one process, Headway sets the order of ranks (the order of the ring),
and each group has its own network interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, final

from headway.core.errors import CollectiveTimeoutError, CommunicationError, GenerationEndedError, UsageError
from headway.core.exchange_waits import Exchange, ExchangeWaits
from headway.core.gloo import GlooGroups, add_prefix, gather_values
from headway.core.group import Group, JournalEntry
from headway.core.hosts import find_interface_to, identify_host
from headway.core.interfaces import check_interfaces, normalise_interfaces
from headway.core.launcher_environment import LaunchedProcess
from headway.core.process_sockets import ProcessSocket
from headway.core.rendezvous import Rendezvous, join_rendezvous
from headway.core.torch_c10d import load_c10d, summarise_error

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

Backend = Literal["gloo", "nccl"]

# Default time-out of joining a world and of its collectives.
CONNECT_S = 300.0


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
        interface: network interface of its groups, unless a group is created on another one.
        interfaces: `interface`, and those that the user names besides it.
        timeout_s: time-out of every operation.
        control: group of all ranks on Gloo, for bytes between the programs.
        store: this generation's part of the key-value store; None in a world of one rank.
        secret: the run's secret.
        rendezvous: holder of the store if another launcher started the ranks, else None.
        explain: returns which rank is behind, for messages of failed collectives; empty if unknown.
        journal: records an exchange of bytes among all ranks in the log of operations, if there is one.
        waits: time that this rank waits for exchanges.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        store: Store | None,
        generation: int,
        interface: str | Sequence[str],
        timeout_s: float,
        connect_s: float = CONNECT_S,
        on_created: Callable[[World], None] = lambda world: None,
        secret: bytes = b"",
    ) -> None:
        self.rank, self.hosts = rank, tuple(tuple(ranks) for ranks in hosts)
        self.size = sum(len(ranks) for ranks in self.hosts)
        # `hosts` lists ranks by host: rank 2 may be alone on host 1, so local ranks are places in these lists.
        self.host = self.find_host(rank)
        self.local_rank, self.local_size = self.hosts[self.host].index(rank), len(self.hosts[self.host])
        self.device, self.store, self.generation, self.secret = device, store, generation, secret
        self.rendezvous: Rendezvous | None = None
        self.backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self.interfaces, self.timeout_s = normalise_interfaces(interface), timeout_s
        self.interface = self.interfaces[0]
        self.explain: Callable[[], str] = lambda: ""
        self.journal: Callable[[str, int], JournalEntry] | None = None
        self.waits = ExchangeWaits()
        self._groups: list[Group] = []
        self._parts: list[World] = []
        self._connect_s = connect_s
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        # Set once by `abort`, from any thread; every later operation raises it.
        self._end_reason: str | None = None
        build = partial(GlooGroups, connect_s=connect_s, timeout_s=timeout_s, check_not_ended=self._check_not_ended)
        self._gloo_groups = {name: build(rank, name) for name in self.interfaces}
        # Before the first group: connecting waits for other ranks, and another thread must be able to end that.
        on_created(self)
        try:
            self.control = self.create_group(name="control", backend="gloo")
            self._check_gpus()
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
        launched: LaunchedProcess,
        device: torch.device,
        *,
        timeout_s: float = CONNECT_S,
        interface: str | Sequence[str] | None = None,
    ) -> World:
        """Joins the other processes of a launcher at its rendezvous, for which rank 0 serves the store.

        Args:
            interface: see `World.create`.

        Raises:
            UsageError: the launcher gave no address, or the interfaces cannot be used.
            CommunicationError: the others did not join within CONNECT_S.
        """
        if launched.size == 1:
            return World.create_single(device)
        if launched.address is None or launched.port is None:
            fix = "Set MASTER_ADDR to the address of rank 0's host, and MASTER_PORT to a free port there."
            raise UsageError(f"{launched.launcher} gives no address of rank 0", fix=fix)
        rendezvous = join_rendezvous(launched, next(iter(normalise_interfaces(interface)), None))
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
        interface: str | Sequence[str] | None = None,
        connect_s: float = CONNECT_S,
        on_created: Callable[[World], None] = lambda world: None,
    ) -> World:
        """Creates the world of ranks that share a store.

        Args:
            membership: the place of this rank.
            master: address of the host that serves the store; the route to it gives the default interface.
            secret: the run's secret.
            interface: network interface between hosts; or, on a CPU, several, which share large sums.
            connect_s: time-out for building a group.
            on_created: called with the world before its first group is built, so that another thread can abort it.

        Raises:
            UsageError: the interfaces cannot be used.
            CommunicationError: some rank did not join.
        """
        rank, generation, identities = membership.rank, membership.generation, membership.identities
        named = normalise_interfaces(interface)
        if len(named) > 1 and device.type == "cuda":
            what = f"several network interfaces ({', '.join(named)}) are for CPUs: on GPUs, NCCL opens the connections"
            fix = f"Name one interface, and set NCCL_SOCKET_IFNAME={','.join(named)}: NCCL uses all of these by itself."
            raise UsageError(what, fix=fix)
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
            interfaces = named or ("lo" if len(hosts) == 1 else find_interface_to(master),)
            # Traffic inside a host passes no network, so a single host has nothing to share over several interfaces.
            if len(hosts) == 1:
                interfaces = interfaces[:1]

            def begin(world: World) -> None:
                on_created(world)
                if named and len(identities) > 1:
                    world._check_interfaces(named, mine, connect_s)

            return World(
                rank,
                list(hosts.values()),
                device,
                store=mine,
                generation=generation,
                interface=interfaces,
                timeout_s=timeout_s,
                connect_s=connect_s,
                on_created=begin,
                secret=secret,
            )
        except RuntimeError as error:
            what = f"rank {rank} of {membership.size} could not meet the others: {summarise_error(error)}"
            through = f"through the interface {', '.join(named) or 'chosen'}"
            fix = f"Do all processes run, and can they reach each other {through}?"
            raise CommunicationError(what, where=f"generation {generation}", fix=fix) from error

    @property
    def is_lead(self) -> bool:
        """True on rank 0, which writes the run folder."""
        return self.rank == 0

    @property
    def ring_order(self) -> tuple[int, ...]:
        """All ranks, host by host: a ring in this order crosses each host's link once."""
        return tuple(rank for ranks in self.hosts for rank in ranks)

    def create_group(
        self,
        ranks: Iterable[int] | None = None,
        *,
        name: str,
        backend: Backend | None = None,
        interface: str | None = None,
        exchange: Exchange | None = None,
        timeout_s: float | None = None,
    ) -> Group:
        """Creates a process group; each of its ranks has to call this, in the same order for equal names.

        Args:
            ranks: ranks in the group's order; default: all, host by host.
            backend: default: the world's backend.
            interface: one of `interfaces`, for a group on Gloo; default: the first.
            exchange: what it is for, if this rank's steps wait for it: the waits are added to `waits`.
            timeout_s: time-out of its sends and receives on Gloo; default: the world's.

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
        # `number` tells groups of one name and the same members apart, for example after one was closed. All ranks in
        # another order are another group.
        key = f"{name}/{number}/{'all' if members == self.ring_order else '-'.join(map(str, members))}"
        store = add_prefix(self.store, key)
        made: list[ProcessSocket] = []
        via = None if (backend or self.backend) == "nccl" else interface or self.interface
        try:
            if via is None:
                raw = self._create_nccl(store, members)
            else:
                raw, made = self._gloo_groups[via].build(store, members)
        except RuntimeError as error:
            raise self.build_error(error, via) from error
        group = Group(self, members, raw, made, store, via, exchange, timeout_s)
        self._groups.append(group)
        try:
            self._check_not_ended()
        # Another thread may have aborted the world while the group connected.
        except CommunicationError:
            group.abort()
            raise
        return group

    def find_host(self, rank: int) -> int:
        """Returns the number of a rank's host in `hosts`."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    def check_rank(self, rank: int, size: int, has: str) -> None:
        """Raises UsageError if this process has not this rank of so many; `has` is what it took then."""
        if (self.rank, self.size) != (rank, size):
            what = f"rank {rank} of {size} has {has}, and is now {self.rank} of {self.size}"
            raise UsageError(what, fix="Start the run again with --resume.")

    def create_part(self, ranks: Iterable[int], *, name: str, on_hosts_of: Iterable[int] | None = None) -> World:
        """Creates a world of some ranks on the same store; each of these ranks has to call this.

        It ends, and is closed, with this world.

        Args:
            ranks: ranks of this world, which are numbered anew in this order.
            name: tells parts of one world apart.
            on_hosts_of: ranks whose hosts count as those of `ranks`; default: their own.

        Raises:
            GenerationEndedError, CommunicationError: it could not be built.
        """
        members = tuple(ranks)
        hosts: dict[int, list[int]] = {}
        for number, rank in enumerate(members if on_hosts_of is None else on_hosts_of):
            hosts.setdefault(self.find_host(rank), []).append(number)
        key = f"{name}/{'-'.join(map(str, members))}"

        # Before its first group: connecting waits for other ranks, and another thread must be able to end that.
        def begin(part: World) -> None:
            self._parts.append(part)
            part.explain = lambda: self.explain()
            part.waits = self.waits
            if self._end_reason is not None:
                part.abort(self._end_reason)

        return World(
            members.index(self.rank),
            list(hosts.values()),
            self.device,
            store=None if self.store is None else add_prefix(self.store, key),
            generation=self.generation,
            interface=self.interfaces,
            timeout_s=self.timeout_s,
            connect_s=self._connect_s,
            on_created=begin,
            secret=self.secret,
        )

    def _create_nccl(self, store: Store, members: Sequence[int]) -> Any:
        options = load_c10d().ProcessGroupNCCL.Options()
        # NCCL connects on the first collective, so building the group does not wait for the other ranks.
        options._timeout = timedelta(seconds=self.timeout_s)
        return load_c10d().ProcessGroupNCCL(store, members.index(self.rank), len(members), options)

    def _check_interfaces(self, names: Sequence[str], store: Store, connect_s: float) -> None:
        ranks, until_s = range(self.size), monotonic() + connect_s
        gather = partial(gather_values, store, self.rank, ranks, until_s=until_s, check_not_ended=self._check_not_ended)
        check_interfaces(names, self.hosts, self.rank, gather)

    def _check_gpus(self) -> None:
        """Raises UsageError if two ranks share a GPU, where NCCL would hang or fail at its first collective."""
        import torch

        if self.backend != "nccl" or self.size == 1:
            return
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        uuids = self.control.gather_bytes(uuid.encode())
        ranks: dict[bytes, int] = {}
        for rank, its in zip(self.control.ranks, uuids, strict=True):
            if (other := ranks.setdefault(its, rank)) != rank:
                what = f"ranks {other} and {rank} use the same GPU, and NCCL needs one for each"
                raise UsageError(what, fix="Start one process for each GPU, or set device to cpu.")

    def build_error(self, error: BaseException, interface: str | None = None) -> CommunicationError:
        """Returns the error to raise for a failed operation: GenerationEndedError once the world was aborted.

        With several interfaces it names the one that the operation used.
        """
        if self._end_reason is not None:
            return GenerationEndedError(self._end_reason)
        # torch raises RuntimeError for everything; only the text tells a time-out.
        summary = summarise_error(error)
        kind = CollectiveTimeoutError if "timed out" in summary.lower() else CommunicationError
        who = self.explain()
        what = f"a collective failed: {summary}"
        over = fix = ""
        if interface and len(self.interfaces) > 1:
            over, others = f", interface {interface}", [name for name in self.interfaces if name != interface]
            fix = f"If {interface} is down on a host, use {', '.join(others)} only."
        return kind(f"{what}. {who}" if who else what, where=f"rank {self.rank} of {self.size}{over}", fix=fix)

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
        for part in tuple(self._parts):
            part.abort(why)

    def close(self) -> None:
        """Closes all groups and parts, and leaves the rendezvous."""
        for part in self._parts:
            part.close()
        self._parts.clear()
        for group in self._groups:
            group.close()
        self._groups.clear()
        for builder in self._gloo_groups.values():
            builder.close()
        if self.rendezvous is not None:
            self.rendezvous.close()
