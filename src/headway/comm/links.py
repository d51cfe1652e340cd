"""Measures how fast ranks reach each other, so that all-reduce algorithms can be chosen for the network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal, final

import torch

from headway.comm.hardware import capture_nccl_log, list_gpu_links, list_nics, summarise_nccl_log
from headway.core.collectives import Link, Network
from headway.core.line_fit import FASTER, SHORTEST_S, fit_line
from headway.core.text_format import align_table, pluralise
from headway.core.world import Group, World

# Everything is measured in rings, as in the algorithms themselves: each rank sends to the next one and receives from
# the one before at the same time. The slowest rank gives the time of a step; the fastest of several rounds counts,
# since a busy machine only ever adds time. All ranks do the same number of steps: it follows from shared numbers.

# For all measurements together. A link on which six messages take longer takes longer.
BUDGET_S = 0.9

# Bytes. Below ENOUGH_BYTES only a very slow link stops the trial of larger messages: a busy machine is late, too.
FIRST_BYTES, ENOUGH_BYTES, LARGEST_BYTES = 1 << 10, 256 << 10, 64 << 20

# The measured sizes are the largest one over these: dense at the sizes of buckets.
SIZE_DIVISORS = (1, 2, 4, 16, 64, 256, 1024)

ROUNDS = range(3, 12)

# More rails have to be 10 % faster: each costs a connection to every rank, and threads.
RAILS = (1, 2, 4)
RAIL_GAIN = 1.1

# Rails are tried on at most this many hosts.
RAIL_HOSTS = 4

# Relative error above which the fitted line says nothing about the link.
NOISE_RESIDUAL = 0.5

# 4 MiB of fp32, as large as a bucket.
SUMMED_ELEMENTS = 1 << 20


@final
@dataclass(frozen=True)
class LinkFit:
    """The line that fits the measured steps best: `link` has latency and bandwidth of a rank.

    `residual` is the root mean square of (fitted - measured) / measured.
    """

    link: Link
    residual: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def format_cells(self) -> tuple[str, str, str]:
        """Formats latency, bandwidth and residual; bounds from the steps themselves if the line says nothing."""
        latency, bandwidth, fits = self.link.latency_s, self.link.bandwidth_bytes_s, f"{self.residual:.0%}"
        speeds = {size: size / max(took, SHORTEST_S) for size, took in zip(self.sizes, self.seconds, strict=True)}
        noise = self.residual > NOISE_RESIDUAL
        # At the fit's upper bound the line hardly rises: the bandwidth is at least that of the fastest step.
        if noise or bandwidth > 0.99 * FASTER * speeds[max(speeds)]:
            speed = f"> {max(speeds.values()) / 1e6:,.0f} MB/s"
        else:
            speed = f"{bandwidth / 1e6:,.0f} MB/s"
        if noise:
            return f"< {min(self.seconds) * 1e6:,.0f} us", speed, "nothing: noise"
        return f"{latency * 1e6:,.0f} us", speed, fits


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Fits latency and bandwidth to measured steps, see `headway.core.line_fit.fit_line`."""
    # The residual is relative: small messages count as much as large ones.
    line = fit_line(list(zip(map(float, sizes), seconds, strict=True)))
    off = [line.seconds(size) / max(took, SHORTEST_S) - 1 for size, took in zip(sizes, seconds, strict=True)]
    residual = math.sqrt(sum(error**2 for error in off) / len(off))
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
        rails: groups over which large operations are striped. rails_s: measured seconds by number of rails.
        notes: NICs and GPUs of rank 0's host, and NCCL's choices.
    """

    inside: LinkFit | None
    alone: LinkFit | None
    together: LinkFit | None
    reduce_bytes_s: float
    rails: int
    rails_s: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def build_network(self, world: World) -> Network:
        """Builds the cost model's network, for this world or a later generation, which may have lost a host."""
        ranks = max(len(ranks) for ranks in world.hosts)
        # A world of one rank per host has no link inside; a world of one host none between.
        known = self.inside or self.alone
        nothing = Link(0.0, math.inf)
        inside = known.link if known else nothing
        between = self.alone.link if self.alone else inside
        if self.together:
            all_at_once = self.together.link.bandwidth_bytes_s * min(len(ranks) for ranks in world.hosts)
            between = Link(between.latency_s, max(between.bandwidth_bytes_s, all_at_once))
        return Network(len(world.hosts), ranks, inside, between, self.reduce_bytes_s)

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds a table of link, latency, bandwidth and residual; the first row is its heading."""
        out = [("link", "latency", "bandwidth a rank", "scatter of the times")]
        names = ("inside a host", "between hosts, one rank of each", "between hosts, all ranks")
        fits = zip(names, (self.inside, self.alone, self.together), strict=True)
        out += [(name, *found.format_cells()) for name, found in fits if found]
        return [*out, ("sum of two arrays", "", f"{self.reduce_bytes_s / 1e6:,.0f} MB/s", "")]

    def describe(self, world: World) -> list[str]:
        """Formats the report of a run's start: hosts and ranks, the table of links, the rails, and the hardware."""
        counts = sorted({len(ranks) for ranks in world.hosts})
        many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        hosts = f"{pluralise(len(world.hosts), 'host')} with {many} rank{'s'[: counts[-1] > 1]}"
        tried = ", ".join(f"{taken * 1e3:.3g} ms by {rails}" for rails, taken in self.rails_s.items())
        rails = f", {self.rails} rails" if self.rails > 1 else ""
        rails += f" (a sum takes {tried} rails)" if tried else ""
        rows = align_table(self.build_rows())
        return [f"{hosts}, {world.backend} over {world.interface}{rails}", *rows, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Returns numbers and strings only; `from_json` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> MeasuredLinks:
        """Reads the dict that `to_json` gave, also after a way through JSON."""

        def read_fit(found: dict[str, Any] | None) -> LinkFit | None:
            if found is None:
                return None
            return LinkFit(Link(**found["link"]), found["residual"], tuple(found["sizes"]), tuple(found["seconds"]))

        fits = {name: read_fit(data[name]) for name in ("inside", "alone", "together")}
        rails_s = {int(rails): taken for rails, taken in data["rails_s"].items()}
        return MeasuredLinks(**{**data, **fits, "rails_s": rails_s, "notes": tuple(data["notes"])})


def broadcast_links(world: World, links: MeasuredLinks | None) -> MeasuredLinks:
    """Returns rank 0's links on every rank, newcomers included: the same numbers make the same choices."""
    data = None if links is None else json.dumps(links.to_json()).encode()
    return MeasuredLinks.from_json(json.loads(world.control.broadcast_bytes(data)))


def measure_links(world: World, *, rails: int | Literal["auto"] = "auto", budget_s: float = BUDGET_S) -> MeasuredLinks:
    """Measures the links of a world. Every rank calls it, while the devices are idle.

    Args:
        rails: use this number, without a trial.
        budget_s: approximate time that it takes.

    Raises:
        GenerationEndedError, CommunicationError: a rank did not answer.
    """
    with capture_nccl_log() as read_log:
        found = _measure_all(world, rails, budget_s)
        notes: list[str] = []
        if world.is_lead:
            notes = [*list_nics(world.interface, infiniband=world.backend == "nccl"), *list_gpu_links()]
        if world.backend == "nccl" and world.is_lead:
            notes.append(summarise_nccl_log(read_log()))
    return broadcast_links(world, MeasuredLinks(**found, notes=tuple(notes)))


def _measure_all(world: World, rails: int | Literal["auto"], budget_s: float) -> dict[str, Any]:
    # Inside hosts all ranks measure at once; between hosts first one rank of each, then all, since the ranks of a host
    # share its link. Each of the four measurements gets a quarter of the time.
    hosts, mine = world.hosts, world.hosts[world.host]
    fewest, most = min(map(len, hosts)), max(map(len, hosts))
    inside = alone = together = None
    if most > 1:
        inside = _measure_ring(world, mine if len(mine) > 1 else None, budget_s / 4)
    if len(hosts) > 1:
        first = [ranks[0] for ranks in hosts]
        alone = _measure_ring(world, first if world.rank in first else None, budget_s / 4)
        if fewest > 1:
            slot = world.local_rank
            together = _measure_ring(world, [r[slot] for r in hosts] if slot < fewest else None, budget_s / 4)
    rails_s: dict[int, float] = {}
    if rails == "auto":
        rails = 1
        if alone and world.backend == "gloo" and not (together and _is_saturated_by_one(alone, together, fewest)):
            rails, rails_s = _measure_rails(world, alone.link, budget_s / 4)
    fits = {"inside": inside, "alone": alone, "together": together}
    return {**fits, "reduce_bytes_s": _measure_reduce_speed(world), "rails": rails, "rails_s": rails_s}


def _is_saturated_by_one(alone: LinkFit, together: LinkFit, ranks: int) -> bool:
    # If all ranks together are no faster than one alone, one connection fills the host's link: rails cannot help.
    return together.link.bandwidth_bytes_s * ranks < RAIL_GAIN * alone.link.bandwidth_bytes_s


@final
class _LinkRing:
    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, place = world, ranks.index(world.rank)
        self._nccl: Group | None = None
        # A group of its own on NCCL: its sends in the world's group would open a connection per pair of ranks.
        if world.backend == "nccl":
            self._nccl = world.create_group(ranks, name="links", backend="nccl")
            self._to, self._source = (place + 1) % len(ranks), (place - 1) % len(ranks)
        else:
            order = world.control.ranks
            self._to, self._source = (order.index(ranks[(place + step) % len(ranks)]) for step in (1, -1))
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def time_step(self, nbytes: int) -> float:
        if nbytes not in self._buffers:
            pair = torch.zeros(2, nbytes, dtype=torch.uint8, device=self._world.device)
            self._buffers[nbytes] = (pair[0], pair[1])
        out, into = self._buffers[nbytes]
        began = perf_counter()
        if self._nccl is not None:
            size = self._nccl.size
            splits = [[nbytes * (rank == peer) for rank in range(size)] for peer in (self._source, self._to)]
            self._nccl.all_to_all(into, out, *splits).wait()
            torch.cuda.synchronize(self._world.device)
        else:
            # Receive first: Gloo's word that a receiver is ready would queue behind what this rank sends, and the two
            # directions would take turns.
            got = self._world.control.recv(into, self._source)
            self._world.control.send(out, self._to).wait()
            got.wait()
        return perf_counter() - began

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()


def reduce_max(world: World, mine: Sequence[float]) -> list[float]:
    """Returns the maximum of each number over all ranks, on all ranks."""
    values = torch.tensor(mine, dtype=torch.float64)
    world.control.all_reduce(values, "max").wait()
    found: list[float] = values.tolist()
    return found


def _measure_ring(world: World, ranks: Sequence[int] | None, budget_s: float) -> LinkFit:
    # A rank without a ring (`ranks` is None) takes part in the maxima over all ranks.
    ring = None if ranks is None else _LinkRing(world, ranks)
    began = perf_counter()

    def time_steps(sizes: Sequence[int]) -> list[float]:
        return reduce_max(world, [0.0 if ring is None else ring.time_step(size) for size in sizes])

    # Find the largest size: grow by 4 while a step takes at most an eighth of the time. The first message opens
    # connections: it does not count.
    top = FIRST_BYTES
    least = took = min(time_steps([top] * 4)[1:])
    limit_s = budget_s / 8
    while top < LARGEST_BYTES and took < (
        limit_s if top < ENOUGH_BYTES else max(budget_s / 20, min(4 * least, limit_s))
    ):
        top *= 4
        # Two: one alone may be late for another reason.
        took = min(time_steps([top, top]))
    sizes = [top // divisor for divisor in SIZE_DIVISORS]
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS.stop:
        # A traffic shaper lets a burst pass: the first step, which does not count, uses it up, and the largest
        # messages come first.
        rounds.append(time_steps([top, *sizes])[1:])
        if len(rounds) >= ROUNDS.start and reduce_max(world, [perf_counter() - began])[0] > budget_s:
            break
    if ring is not None:
        ring.close()
    return fit_link(sizes, [min(taken) for taken in zip(*rounds, strict=True)])


def _measure_rails(world: World, link: Link, budget_s: float) -> tuple[int, dict[int, float]]:
    # All-reduces over one rank of some hosts, striped over 1, 2 and 4 groups in turn.
    ranks = [ranks[0] for ranks in world.hosts[:RAIL_HOSTS]]
    numbers = int(min(max(budget_s / 16 * link.bandwidth_bytes_s, ENOUGH_BYTES), 16 << 20)) // 4
    member = world.rank in ranks
    groups = [world.create_group(ranks, name="rails") for _ in range(max(RAILS))] if member else []
    values = torch.zeros(numbers if member else 0, device=world.device)
    rounds: list[list[float]] = []
    for _ in range(ROUNDS.start + 1):
        mine = []
        for count in RAILS:
            began = perf_counter()
            parts = zip(groups[:count], values.tensor_split(count), strict=True) if member else ()
            for work in [group.all_reduce(part) for group, part in parts]:
                work.wait()
            mine.append(perf_counter() - began)
        rounds.append(reduce_max(world, mine))
    for group in groups:
        group.close()
    # The first round opens connections: it does not count.
    taken = list(zip(*rounds[1:], strict=True))
    return choose_rails(taken), {count: median(times) for count, times in zip(RAILS, taken, strict=True)}


def choose_rails(taken: Sequence[Sequence[float]]) -> int:
    """Chooses the number of rails from seconds by number of rails (`RAILS`) and round."""
    # More than one rail has to be faster in every round: noise must not choose.
    faster = {
        count: median(times)
        for count, times in zip(RAILS, taken, strict=True)
        if count == 1 or all(time * RAIL_GAIN <= one for time, one in zip(times, taken[0], strict=True))
    }
    return next(count for count, time in faster.items() if time <= min(faster.values()) * RAIL_GAIN)


def _measure_reduce_speed(world: World) -> float:
    # Bytes per second of adding one array to another. All ranks at once: they share the host's memory bandwidth.
    one, other = torch.ones(2, SUMMED_ELEMENTS, device=world.device)
    cuda = world.device.type == "cuda"
    times = []
    for _ in range(ROUNDS.start + 1):
        world.control.barrier()
        began = perf_counter()
        one.add_(other)
        if cuda:
            torch.cuda.synchronize(world.device)
        times.append(perf_counter() - began)
    return SUMMED_ELEMENTS * 4 / reduce_max(world, [median(times[1:])])[0]
