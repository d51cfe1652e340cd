"""Measures how fast ranks reach each other, so that all-reduce algorithms can be chosen for the network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal, final

import torch

from headway.comm.hardware import capture_nccl_log, list_gpu_links, list_nics, summarise_nccl_log
from headway.comm.rails import StripedGroup
from headway.core.collectives import Link, Network
from headway.core.group import Group
from headway.core.line_fit import FASTER, SHORTEST_S, fit_line
from headway.core.text_format import align_table, pluralise
from headway.core.world import World

# Everything is measured in rings, as in the algorithms themselves: each rank sends to the next one and receives from
# the one before at the same time. The slowest rank gives the time of a step; the fastest of several rounds counts,
# since a busy machine only ever adds time. All ranks do the same number of steps: it follows from shared numbers.

# For all measurements together. A link on which six messages take longer takes longer.
LINKS_BUDGET_S = 0.9

# Below TRUSTED_MESSAGE_BYTES only a very slow link stops the trial of larger messages: a busy machine is late, too.
FIRST_MESSAGE_BYTES = 1 << 10
TRUSTED_MESSAGE_BYTES = 256 << 10
MAX_MESSAGE_BYTES = 64 << 20

# The measured sizes are the largest one over these: dense at the sizes of buckets.
SIZE_DIVISORS = (1, 2, 4, 16, 64, 256, 1024)

MIN_LINK_ROUNDS, MAX_LINK_ROUNDS = 3, 12

# Sums over each network interface, of which the median counts.
RATE_ROUNDS = 5

# More rails have to be 10 % faster: each costs a connection to every rank, and threads.
RAIL_COUNTS = (1, 2, 4)
MIN_RAIL_SPEEDUP = 1.1

# Rails are tried on at most this many hosts.
MAX_RAIL_HOSTS = 4

# Relative error above which the fitted line says nothing about the link.
MAX_RESIDUAL = 0.5

# 4 MiB of fp32, as large as a bucket.
REDUCED_ELEMENTS = 1 << 20


@final
@dataclass(frozen=True)
class LinkFit:
    """The line that fits the measured steps best.

    Attributes:
        link: latency and bandwidth of a rank.
        residual: root mean square of (fitted - measured) / measured.
        sizes: bytes of the measured messages.
        seconds: measured time of each.
    """

    link: Link
    residual: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def is_bound(self) -> bool:
        """True at the fit's upper bound, where the line hardly rises: the bandwidth is at least that of the fastest
        step."""
        last = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        speed = self.sizes[last] / max(self.seconds[last], SHORTEST_S)
        return self.link.bandwidth_bytes_s > 0.99 * FASTER * speed

    def format_cells(self) -> tuple[str, str, str]:
        """Formats latency, bandwidth and residual; bounds from the steps themselves if the line does not fit."""
        bandwidth = self.link.bandwidth_bytes_s
        step_s = [max(seconds, SHORTEST_S) for seconds in self.seconds]
        speed_by_size = {size: size / seconds for size, seconds in zip(self.sizes, step_s, strict=True)}
        is_noise = self.residual > MAX_RESIDUAL
        if is_noise or self.is_bound:
            bandwidth_text = f"> {max(speed_by_size.values()) / 1e6:,.0f} MB/s"
        else:
            bandwidth_text = f"{bandwidth / 1e6:,.0f} MB/s"
        if is_noise:
            return f"< {min(self.seconds) * 1e6:,.0f} us", bandwidth_text, "nothing: noise"
        return f"{self.link.latency_s * 1e6:,.0f} us", bandwidth_text, f"{self.residual:.0%}"


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Fits latency and bandwidth to the time of messages of several sizes (bytes), see `line_fit.fit_line`."""
    # The residual is relative: small messages count as much as large ones.
    line = fit_line(list(zip(map(float, sizes), seconds, strict=True)))
    errors = [line.seconds(size) / max(step_s, SHORTEST_S) - 1 for size, step_s in zip(sizes, seconds, strict=True)]
    residual = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return LinkFit(Link(line.latency_s, 1 / line.s_per_byte), residual, tuple(sizes), tuple(seconds))


@final
@dataclass(frozen=True)
class MeasuredLinks:
    """The measured links; all ranks hold rank 0's numbers.

    Attributes:
        inside: between the ranks of a host, all at once; None if no host has two.
        alone: between hosts, one rank of each; None on one host.
        together: between hosts, all ranks at once, with the bandwidth of one rank; None if a host has one rank only.
        reduce_bytes_s: speed of adding one array to another.
        rails: number of groups on each network interface over which large operations are striped.
        rails_s: measured seconds by number of rails; empty if that number was not measured.
        notes: NICs and GPUs of rank 0's host, and NCCL's choices.
        rates_bytes_s: bandwidth of each network interface alone; empty if hosts are joined by one.
    """

    inside: LinkFit | None
    alone: LinkFit | None
    together: LinkFit | None
    reduce_bytes_s: float
    rails: int
    rails_s: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rates_bytes_s: tuple[float, ...] = ()

    @property
    def scatter(self) -> float:
        """Largest residual of the fits; infinite if a bandwidth is a bound alone."""
        fits = (fit for fit in (self.inside, self.alone, self.together) if fit is not None)
        return max((math.inf if fit.is_bound else fit.residual for fit in fits), default=0.0)

    def build_network(self, world: World) -> Network:
        """Builds the cost model's network, for this world or a later generation, which may have lost a host."""
        host_sizes = [len(ranks) for ranks in world.hosts]
        # A world of one rank per host has no link inside hosts; a world of one host none between hosts.
        fit = self.inside or self.alone
        intra_host = fit.link if fit else Link(0.0, math.inf)
        inter_host = self.alone.link if self.alone else intra_host
        if self.together:
            all_ranks_bytes_s = self.together.link.bandwidth_bytes_s * min(host_sizes)
            inter_host = Link(inter_host.latency_s, max(inter_host.bandwidth_bytes_s, all_ranks_bytes_s))
        return Network(len(host_sizes), max(host_sizes), intra_host, inter_host, self.reduce_bytes_s)

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds a table of link, latency, bandwidth and residual; the first row is its heading."""
        heading = ("link", "latency", "bandwidth a rank", "scatter of the times")
        names = ("inside a host", "between hosts, one rank of each", "between hosts, all ranks")
        fits = zip(names, (self.inside, self.alone, self.together), strict=True)
        rows = [(name, *fit.format_cells()) for name, fit in fits if fit]
        return [heading, *rows, ("sum of two arrays", "", f"{self.reduce_bytes_s / 1e6:,.0f} MB/s", "")]

    def describe(self, world: World) -> list[str]:
        """Formats the report of a run's start: hosts and ranks, the table of links, the rails, and the hardware."""
        host_sizes = sorted({len(ranks) for ranks in world.hosts})
        size_text = f"{host_sizes[0]} to {host_sizes[-1]}" if len(host_sizes) > 1 else str(host_sizes[0])
        hosts = pluralise(len(world.hosts), "host")
        ranks = f"{size_text} rank{'s'[: host_sizes[-1] > 1]}"
        trials = ", ".join(f"{seconds * 1e3:.3g} ms by {rails}" for rails, seconds in self.rails_s.items())
        rails = f", {self.rails} rails" if self.rails > 1 else ""
        rails += f" (a sum takes {trials} rails)" if trials else ""
        rows = align_table(self.build_rows())
        # After a loss one host may be left, with one interface.
        over = world.interface
        if len(self.rates_bytes_s) == len(world.interfaces):
            rates = zip(world.interfaces, self.rates_bytes_s, strict=True)
            over = " and ".join(f"{interface} ({rate / 1e6:,.0f} MB/s)" for interface, rate in rates)
        return [f"{hosts} with {ranks}, {world.backend} over {over}{rails}", *rows, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a JSON object; `from_json` reads it."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> MeasuredLinks:
        """Returns the links of a dict from `to_json`, also after a way through JSON."""

        def read_fit(tree: dict[str, Any] | None) -> LinkFit | None:
            if tree is None:
                return None
            return LinkFit(Link(**tree["link"]), tree["residual"], tuple(tree["sizes"]), tuple(tree["seconds"]))

        fits = {name: read_fit(data[name]) for name in ("inside", "alone", "together")}
        rails_s = {int(rails): seconds for rails, seconds in data["rails_s"].items()}
        tuples = {name: tuple(data[name]) for name in ("rates_bytes_s", "notes")}
        return MeasuredLinks(**{**data, **fits, "rails_s": rails_s, **tuples})


def broadcast_links(world: World, links: MeasuredLinks | None) -> MeasuredLinks:
    """Returns rank 0's links on every rank, newcomers included: the same numbers make the same choices."""
    data = None if links is None else json.dumps(links.to_json()).encode()
    return MeasuredLinks.from_json(json.loads(world.control.broadcast_bytes(data)))


def measure_links(
    world: World, *, rails: int | Literal["auto"] = "auto", budget_s: float = LINKS_BUDGET_S
) -> MeasuredLinks:
    """Measures the links of a world. Every rank calls it, while the devices are idle.

    Args:
        rails: number of rails; `auto` measures which is fastest.
        budget_s: approximate time that it takes.

    Returns:
        rank 0's numbers, on every rank.

    Raises:
        GenerationEndedError: a rank was lost.
        CommunicationError: a rank did not answer.
    """
    with capture_nccl_log() as read_log:
        fields = _measure_all(world, rails, budget_s)
        notes: list[str] = []
        if world.is_lead:
            nics = [list_nics(interface, infiniband=world.backend == "nccl") for interface in world.interfaces]
            notes = [*(line for lines in nics for line in lines), *list_gpu_links()]
        if world.backend == "nccl" and world.is_lead:
            notes.append(summarise_nccl_log(read_log()))
    return broadcast_links(world, MeasuredLinks(**fields, notes=tuple(notes)))


def measure_rates(world: World, budget_s: float = LINKS_BUDGET_S / 2) -> tuple[float, ...]:
    """Measures the bandwidth of each network interface between hosts, in bytes/s. Every rank calls it.

    Returns:
        rank 0's numbers on every rank, in the order of `world.interfaces`; empty if there is only one.

    Raises:
        GenerationEndedError, CommunicationError: as in `measure_links`; the message names the interface.
    """
    if len(world.interfaces) == 1:
        return ()
    ranks = _list_first_ranks(world)
    create = partial(world.create_group, ranks, name="rates")
    groups = [create(interface=interface) for interface in world.interfaces] if ranks else []
    values = torch.zeros(MAX_MESSAGE_BYTES if ranks else 0, dtype=torch.uint8)

    def time_sums(nbytes: int) -> list[float]:
        times = [0.0] * len(world.interfaces)
        for number, group in enumerate(groups):
            # Not counted: it uses up the burst that a traffic shaper lets pass.
            group.all_reduce(values[:TRUSTED_MESSAGE_BYTES]).wait()
            start_s = perf_counter()
            group.all_reduce(values[:nbytes]).wait()
            times[number] = perf_counter() - start_s
        return reduce_max(world, times)

    # One large sum over each in turn, not the slope over many sizes: the ratio of the rates is what counts, and on a
    # busy machine, or behind a traffic shaper that lets bursts pass, a slope may be wrong by several times.
    nbytes = TRUSTED_MESSAGE_BYTES
    # The first sum opens connections: it does not count.
    time_sums(nbytes)
    limit_s = budget_s / (2 * RATE_ROUNDS)
    # Two: one alone may be late for another reason.
    while nbytes < MAX_MESSAGE_BYTES and 2 * min(sum(time_sums(nbytes)) for _ in range(2)) < limit_s:
        nbytes *= 2
    # The median: a rank that begins late finds its data there already, and looks fast.
    seconds = [median(times) for times in zip(*(time_sums(nbytes) for _ in range(RATE_ROUNDS)), strict=True)]
    for group in groups:
        group.close()
    # Bytes that each rank of a ring sends and receives.
    num_hosts = len(world.hosts)
    rates = [2 * (num_hosts - 1) / num_hosts * nbytes / step_s for step_s in seconds]
    # Ranks cut messages at the same places only if their numbers are the same to the last bit.
    return tuple(json.loads(world.control.broadcast_bytes(json.dumps(rates).encode())))


def _list_first_ranks(world: World) -> list[int] | None:
    """Returns one rank of each host, if this process is one of them; else None."""
    first_ranks = [ranks[0] for ranks in world.hosts]
    return first_ranks if world.rank in first_ranks else None


def _measure_all(world: World, rails: int | Literal["auto"], budget_s: float) -> dict[str, Any]:
    """Returns the fields of MeasuredLinks, except `notes`."""
    # Inside hosts all ranks measure at once; between hosts first one rank of each, then all, since the ranks of a host
    # share its link. Each of the four measurements gets a quarter of the time; the rates of interfaces come on top.
    hosts, host_ranks = world.hosts, world.hosts[world.host]
    min_host_size, max_host_size = min(map(len, hosts)), max(map(len, hosts))
    inside = alone = together = None
    if max_host_size > 1:
        inside = _measure_ring(world, host_ranks if len(host_ranks) > 1 else None, budget_s / 4)
    rates_bytes_s = measure_rates(world, budget_s / 2)
    if len(hosts) > 1:
        # What crosses between hosts shares all interfaces, as in a run.
        group = StripedGroup.create(world, name="links", rates_bytes_s=rates_bytes_s) if rates_bytes_s else None
        alone = _measure_ring(world, _list_first_ranks(world), budget_s / 4, group)
        if min_host_size > 1:
            index = world.local_rank
            peers = [ranks[index] for ranks in hosts] if index < min_host_size else None
            together = _measure_ring(world, peers, budget_s / 4, group)
        if group is not None:
            group.close()
    rails_s: dict[int, float] = {}
    if rails == "auto":
        rails = 1
        is_saturated = alone and together and _is_saturated_by_one(alone, together, min_host_size)
        if alone and world.backend == "gloo" and not is_saturated:
            rails, rails_s = _measure_rails(world, alone.link, rates_bytes_s, budget_s / 4)
    return {
        "inside": inside,
        "alone": alone,
        "together": together,
        "reduce_bytes_s": _measure_reduce_speed(world),
        "rails": rails,
        "rails_s": rails_s,
        "rates_bytes_s": rates_bytes_s,
    }


def _is_saturated_by_one(alone: LinkFit, together: LinkFit, num_ranks: int) -> bool:
    # If all ranks together are no faster than one alone, one connection fills the host's link: rails cannot help.
    return together.link.bandwidth_bytes_s * num_ranks < MIN_RAIL_SPEEDUP * alone.link.bandwidth_bytes_s


@final
class _LinkRing:
    """A ring of ranks, each of which sends to the next one and receives from the one before.

    Args:
        ranks: the ring.
        group: group of all ranks that carries the messages; on NCCL the ring has a group of its own.
    """

    def __init__(self, world: World, ranks: Sequence[int], group: Group | StripedGroup) -> None:
        self._world, self._group, index = world, group, ranks.index(world.rank)
        self._nccl_group: Group | None = None
        # A group of its own on NCCL: its sends in the world's group would open a connection per pair of ranks.
        if world.backend == "nccl":
            self._nccl_group = world.create_group(ranks, name="links", backend="nccl")
            self._destination, self._source = (index + 1) % len(ranks), (index - 1) % len(ranks)
        else:
            order = group.ranks
            self._destination, self._source = (order.index(ranks[(index + step) % len(ranks)]) for step in (1, -1))
        self._buffers: dict[int, torch.Tensor] = {}

    def time_step(self, nbytes: int) -> float:
        """Sends and receives `nbytes`, and returns the time in seconds."""
        if nbytes not in self._buffers:
            self._buffers[nbytes] = torch.zeros(2, nbytes, dtype=torch.uint8, device=self._world.device)
        send_buffer, receive_buffer = self._buffers[nbytes]
        start_s = perf_counter()
        if self._nccl_group is not None:
            ranks = range(self._nccl_group.size)
            receive_splits = [nbytes * (rank == self._source) for rank in ranks]
            send_splits = [nbytes * (rank == self._destination) for rank in ranks]
            self._nccl_group.all_to_all(receive_buffer, send_buffer, receive_splits, send_splits).wait()
            torch.cuda.synchronize(self._world.device)
        else:
            # Receive first: Gloo's word that a receiver is ready would queue behind what this rank sends, and the two
            # directions would take turns.
            receive_work = self._group.recv(receive_buffer, self._source)
            self._group.send(send_buffer, self._destination).wait()
            receive_work.wait()
        return perf_counter() - start_s

    def close(self) -> None:
        if self._nccl_group is not None:
            self._nccl_group.close()


def reduce_max(world: World, numbers: Sequence[float]) -> list[float]:
    """Returns the maximum of each number over all ranks, on all ranks."""
    values = torch.tensor(numbers, dtype=torch.float64)
    world.control.all_reduce(values, "max").wait()
    maxima: list[float] = values.tolist()
    return maxima


def _measure_ring(
    world: World, ranks: Sequence[int] | None, budget_s: float, group: Group | StripedGroup | None = None
) -> LinkFit:
    """Measures a ring of `ranks`, over a group of all ranks (default: `world.control`).

    A rank without a ring (None) takes part in the maxima over all ranks.
    """
    ring = None if ranks is None else _LinkRing(world, ranks, group or world.control)
    start_s = perf_counter()

    def time_steps(sizes: Sequence[int]) -> list[float]:
        return reduce_max(world, [0.0 if ring is None else ring.time_step(size) for size in sizes])

    # Find the largest size: grow by 4 while a step takes at most an eighth of the time. The first message opens
    # connections: it does not count.
    max_size = FIRST_MESSAGE_BYTES
    small_step_s = step_s = min(time_steps([max_size] * 4)[1:])
    small_limit_s = budget_s / 8
    large_limit_s = max(budget_s / 20, min(4 * small_step_s, small_limit_s))
    while max_size < MAX_MESSAGE_BYTES and step_s < (
        small_limit_s if max_size < TRUSTED_MESSAGE_BYTES else large_limit_s
    ):
        max_size *= 4
        # Two: one alone may be late for another reason.
        step_s = min(time_steps([max_size, max_size]))
    sizes = [max_size // divisor for divisor in SIZE_DIVISORS]
    rounds: list[list[float]] = []
    while len(rounds) < MAX_LINK_ROUNDS:
        # A traffic shaper lets a burst pass: the first step, which does not count, uses it up, and the largest
        # messages come first.
        rounds.append(time_steps([max_size, *sizes])[1:])
        if len(rounds) >= MIN_LINK_ROUNDS and reduce_max(world, [perf_counter() - start_s])[0] > budget_s:
            break
    if ring is not None:
        ring.close()
    return fit_link(sizes, [min(times) for times in zip(*rounds, strict=True)])


def _measure_rails(
    world: World, link: Link, rates_bytes_s: Sequence[float], budget_s: float
) -> tuple[int, dict[int, float]]:
    """Times all-reduces over one rank of some hosts, striped over 1, 2 and 4 groups on each interface in turn.

    Returns:
        the best number of rails, and the median seconds by number of rails.
    """
    ranks = [ranks[0] for ranks in world.hosts[:MAX_RAIL_HOSTS]]
    nbytes = min(max(budget_s / 16 * link.bandwidth_bytes_s, TRUSTED_MESSAGE_BYTES), 16 << 20)
    is_member = world.rank in ranks
    groups: dict[int, StripedGroup] = {}
    if is_member:
        most = StripedGroup.create(
            world, ranks, name="rails", connections=max(RAIL_COUNTS), rates_bytes_s=rates_bytes_s
        )
        groups = {count: most.take(count * len(world.interfaces)) for count in RAIL_COUNTS}
    values = torch.zeros(int(nbytes) // 4 if is_member else 0, device=world.device)
    rounds: list[list[float]] = []
    for _ in range(MIN_LINK_ROUNDS + 1):
        times = []
        for count in RAIL_COUNTS:
            start_s = perf_counter()
            if is_member:
                groups[count].all_reduce(values).wait()
            times.append(perf_counter() - start_s)
        rounds.append(reduce_max(world, times))
    if groups:
        groups[max(RAIL_COUNTS)].close()
    # The first round opens connections: it does not count.
    seconds = list(zip(*rounds[1:], strict=True))
    return choose_rails(seconds), {count: median(times) for count, times in zip(RAIL_COUNTS, seconds, strict=True)}


def choose_rails(seconds: Sequence[Sequence[float]]) -> int:
    """Returns the best number of rails, from the seconds by number of rails (`RAIL_COUNTS`) and round."""
    # More than one rail has to be faster in every round: noise must not choose.
    single_rail = seconds[0]
    median_s_by_count = {
        count: median(times)
        for count, times in zip(RAIL_COUNTS, seconds, strict=True)
        if count == 1 or all(time * MIN_RAIL_SPEEDUP <= single for time, single in zip(times, single_rail, strict=True))
    }
    limit_s = min(median_s_by_count.values()) * MIN_RAIL_SPEEDUP
    return next(count for count, median_s in median_s_by_count.items() if median_s <= limit_s)


def _measure_reduce_speed(world: World) -> float:
    """Returns the bytes per second of adding one array to another."""
    # All ranks at once: they share the host's memory bandwidth.
    target, addend = torch.ones(2, REDUCED_ELEMENTS, device=world.device)
    times = []
    for _ in range(MIN_LINK_ROUNDS + 1):
        world.control.barrier()
        start_s = perf_counter()
        target.add_(addend)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(perf_counter() - start_s)
    return REDUCED_ELEMENTS * 4 / reduce_max(world, [median(times[1:])])[0]
