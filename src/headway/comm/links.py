"""Links: how fast ranks reach each other, measured at the start, so that algorithms can be chosen for it.

Everything is measured in rings: each rank sends to the next one and receives from the one before at the same time, as
in the algorithms themselves. Inside hosts all ranks do; between hosts first one rank of each host, then all at once,
since they share their host's link. The time of a step is that of its slowest rank; of several rounds the fastest
counts, since what a busy machine adds is never less than nothing. All ranks do the same number of steps: how many is
decided from numbers that all of them have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal, final

import torch

from headway.comm.hardware import gpu_links, nccl_chose, nccl_log, nics
from headway.core.collectives import Link, Network
from headway.core.line_fit import FASTER, SHORTEST_S, fit_line
from headway.core.world import Group, World

BUDGET_S = 0.9
"""For all measurements together; a link so slow that six messages take longer takes longer."""

FIRST, ENOUGH, LARGEST = 1 << 10, 256 << 10, 64 << 20
"""Bytes. Below ENOUGH only a very slow link keeps larger messages from being tried: a busy machine is late too."""

SHARES = (1, 2, 4, 16, 64, 256, 1024)
"""Of the largest message: dense where buckets are."""

ROUNDS = range(3, 12)

RAILS = (1, 2, 4)
RAIL_GAIN = 1.1
"""More rails have to be so much faster: each costs a connection to every rank, and threads."""

RAIL_HOSTS = 4
"""Rails are tried on so many hosts at most."""

NOISE = 0.5
"""Relative error above which the line says nothing of the link."""

SUMMED = 1 << 20
"""Elements; 4 MiB, as large as a bucket."""


@final
@dataclass(frozen=True)
class Fit:
    """The line that fits measured steps best.

    Attributes:
        link: latency and bandwidth of a rank.
        residual: root mean square of (fitted - measured) / measured.
        sizes, seconds: what was measured.
    """

    link: Link
    residual: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def cells(self) -> tuple[str, str, str]:
        """Latency, bandwidth, and how well the line fits; where it says nothing, what the steps themselves do."""
        latency, bandwidth, fits = self.link.latency_s, self.link.bandwidth_bytes_s, f"{self.residual:.0%}"
        speeds = {size: size / max(took, SHORTEST_S) for size, took in zip(self.sizes, self.seconds, strict=True)}
        noise = self.residual > NOISE
        if noise or bandwidth > 0.99 * FASTER * speeds[max(speeds)]:  # its upper end: the line hardly rises
            speed = f"> {max(speeds.values()) / 1e6:,.0f} MB/s"
        else:
            speed = f"{bandwidth / 1e6:,.0f} MB/s"
        if noise:
            return f"< {min(self.seconds) * 1e6:,.0f} us", speed, "nothing: noise"
        return f"{latency * 1e6:,.0f} us", speed, fits


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """As `headway.core.line_fit.fit_line` has it."""
    line = fit_line(list(zip(map(float, sizes), seconds, strict=True)))
    off = [line.seconds(size) / max(took, SHORTEST_S) - 1 for size, took in zip(sizes, seconds, strict=True)]
    residual = math.sqrt(sum(error**2 for error in off) / len(off))
    return Fit(Link(line.latency_s, 1 / line.s_per_byte), residual, tuple(sizes), tuple(seconds))


@final
@dataclass(frozen=True)
class Links:
    """What was measured; all ranks hold rank 0's numbers.

    Attributes:
        inside: between ranks of a host, all of them at once; None where no host has two.
        alone: between hosts, one rank of each; None on one host.
        together: the same with all ranks of each host at once, the bandwidth is that of one rank; None where alone.
        reduce_bytes_s: of adding one array to another.
        rails: groups over which large operations are striped. rails_s: measured seconds by number of rails.
        notes: NICs and GPUs of rank 0's host, and what NCCL chose.
    """

    inside: Fit | None
    alone: Fit | None
    together: Fit | None
    reduce_bytes_s: float
    rails: int
    rails_s: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def network(self, world: World) -> Network:
        """What the cost model takes; for this world or one of its next generations, which may have lost a host."""
        ranks = max(len(ranks) for ranks in world.hosts)
        known = self.inside or self.alone
        nothing = Link(0.0, math.inf)
        inside = known.link if known else nothing
        between = self.alone.link if self.alone else inside
        if self.together:
            all_at_once = self.together.link.bandwidth_bytes_s * min(len(ranks) for ranks in world.hosts)
            between = Link(between.latency_s, max(between.bandwidth_bytes_s, all_at_once))
        return Network(len(world.hosts), ranks, inside, between, self.reduce_bytes_s)

    def rows(self) -> list[tuple[str, ...]]:
        """A table: link, latency, bandwidth, and how far off the line times are; the first row is its heading."""
        out = [("link", "latency", "bandwidth a rank", "scatter of the times")]
        named = {
            "inside a host": self.inside,
            "between hosts, one rank of each": self.alone,
            "between hosts, all ranks": self.together,
        }
        for name, found in named.items():
            if found:
                out.append((name, *found.cells()))
        return [*out, ("sum of two arrays", "", f"{self.reduce_bytes_s / 1e6:,.0f} MB/s", "")]

    def lines(self, world: World) -> list[str]:
        """The report of the start: where the ranks are, the table, the rails, and the hardware."""
        counts = sorted({len(ranks) for ranks in world.hosts})
        many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        where = f"{len(world.hosts)} host{'s'[: len(world.hosts) > 1]} with {many} rank{'s'[: counts[-1] > 1]}"
        tried = ", ".join(f"{taken * 1e3:.3g} ms by {rails}" for rails, taken in self.rails_s.items())
        rails = f", {self.rails} rails" if self.rails > 1 else ""
        rails += f" (a sum takes {tried} rails)" if tried else ""
        return [f"{where}, {world.backend} over {world.interface}{rails}", *table(self.rows()), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Numbers and strings only; `of_json` reads it."""
        return asdict(self)

    @staticmethod
    def of_json(data: dict[str, Any]) -> Links:
        """What `to_json` gave, also after a way through JSON."""

        def one(found: dict[str, Any] | None) -> Fit | None:
            if found is None:
                return None
            return Fit(Link(**found["link"]), found["residual"], tuple(found["sizes"]), tuple(found["seconds"]))

        fits = {name: one(data[name]) for name in ("inside", "alone", "together")}
        rails_s = {int(rails): taken for rails, taken in data["rails_s"].items()}
        return Links(**{**data, **fits, "rails_s": rails_s, "notes": tuple(data["notes"])})


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width: the first flush left, the others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def share(world: World, links: Links | None) -> Links:
    """Rank 0's links on every rank: the same numbers make the same choices. For newcomers of a later generation too."""
    data = None if links is None else json.dumps(links.to_json()).encode()
    return Links.of_json(json.loads(world.control.broadcast_bytes(data)))


def measure(world: World, *, rails: int | Literal["auto"] = "auto", budget_s: float = BUDGET_S) -> Links:
    """Measures the links of a world. Every rank calls it, at a time when the devices have nothing else to do.

    Args:
        rails: so many, without a trial.
        budget_s: about how long it may take.

    Raises:
        GenerationEndedError, CommunicationError: a rank did not answer.
    """
    with nccl_log() as said:
        found = _measured(world, rails, budget_s)
        notes = [*nics(world.interface, infiniband=world.backend == "nccl"), *gpu_links()] if world.is_lead else []
        if world.backend == "nccl" and world.is_lead:
            notes.append(nccl_chose(said()))
    return share(world, Links(**found, notes=tuple(notes)))


def _measured(world: World, rails: int | Literal["auto"], budget_s: float) -> dict[str, Any]:
    hosts, mine = world.hosts, world.hosts[world.host]
    fewest, most = min(map(len, hosts)), max(map(len, hosts))
    inside = alone = together = None
    if most > 1:
        inside = _series(world, mine if len(mine) > 1 else None, budget_s / 4)
    if len(hosts) > 1:
        first = [ranks[0] for ranks in hosts]
        alone = _series(world, first if world.rank in first else None, budget_s / 4)
        if fewest > 1:
            slot = world.local_rank
            together = _series(world, [r[slot] for r in hosts] if slot < fewest else None, budget_s / 4)
    rails_s: dict[int, float] = {}
    if rails == "auto":
        rails = 1
        if alone and world.backend == "gloo" and not (together and _shared(alone, together, fewest)):
            rails, rails_s = _rails(world, alone.link, budget_s / 4)
    return {
        "inside": inside,
        "alone": alone,
        "together": together,
        "reduce_bytes_s": _reduce_speed(world),
        "rails": rails,
        "rails_s": rails_s,
    }


def _shared(alone: Fit, together: Fit, ranks: int) -> bool:
    """Whether one connection fills the host's link already: then several are no faster."""
    return together.link.bandwidth_bytes_s * ranks < RAIL_GAIN * alone.link.bandwidth_bytes_s


@final
class _Ring:
    """Ranks of the world, each of which sends to the next and receives from the one before."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, place = world, ranks.index(world.rank)
        self._nccl: Group | None = None
        if world.backend == "nccl":  # its sends would open a connection for each pair of ranks
            self._nccl = world.create_group(ranks, name="links", backend="nccl")
            self._to, self._source = (place + 1) % len(ranks), (place - 1) % len(ranks)
        else:
            order = world.control.ranks
            self._to, self._source = (order.index(ranks[(place + step) % len(ranks)]) for step in (1, -1))
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, nbytes: int) -> float:
        """Seconds of one step."""
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
            # Gloo's word that a receiver is ready would otherwise queue behind what it sends itself, and the two ways
            # would take turns.
            got = self._world.control.recv(into, self._source)
            self._world.control.send(out, self._to).wait()
            got.wait()
        return perf_counter() - began

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()


def slowest(world: World, mine: Sequence[float]) -> list[float]:
    """Of each number the largest of any rank's; all ranks get the same."""
    values = torch.tensor(mine, dtype=torch.float64)
    world.control.all_reduce(values, "max").wait()
    found: list[float] = values.tolist()
    return found


def _series(world: World, ranks: Sequence[int] | None, budget_s: float) -> Fit:
    """Steps of several sizes, the largest as large as the time allows.

    Args:
        ranks: this rank's ring; None on a rank that is in none.
    """
    ring = None if ranks is None else _Ring(world, ranks)

    began = perf_counter()

    def steps(sizes: Sequence[int]) -> list[float]:
        return slowest(world, [0.0 if ring is None else ring.step(size) for size in sizes])

    top = FIRST
    least = took = min(steps([top] * 4)[1:])  # connections open with their first message
    while top < LARGEST and took < (budget_s / 8 if top < ENOUGH else max(budget_s / 20, min(4 * least, budget_s / 8))):
        top *= 4
        took = min(steps([top, top]))  # one alone may be late for another reason
    sizes = [top // share for share in SHARES]
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS.stop:
        # A traffic shaper lets some bytes pass at once: the first step, which is not counted, uses them up, and the
        # largest messages come first.
        rounds.append(steps([top, *sizes])[1:])
        if len(rounds) >= ROUNDS.start and slowest(world, [perf_counter() - began])[0] > budget_s:
            break
    if ring is not None:
        ring.close()
    return fit(sizes, [min(taken) for taken in zip(*rounds, strict=True)])


def _rails(world: World, link: Link, budget_s: float) -> tuple[int, dict[int, float]]:
    """How many groups sum soonest over one rank of each of some hosts; and the seconds of 1, 2 and 4."""
    ranks = [ranks[0] for ranks in world.hosts[:RAIL_HOSTS]]
    numbers = int(min(max(budget_s / 16 * link.bandwidth_bytes_s, ENOUGH), 16 << 20)) // 4
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
        rounds.append(slowest(world, mine))
    for group in groups:
        group.close()
    taken = list(zip(*rounds[1:], strict=True))  # the first round opens connections
    return fewest_rails(taken), {count: median(times) for count, times in zip(RAILS, taken, strict=True)}


def fewest_rails(taken: Sequence[Sequence[float]]) -> int:
    """Of seconds by number of rails and round: the number to take. More than one has to be faster in every round."""
    faster = {
        count: median(times)
        for count, times in zip(RAILS, taken, strict=True)
        if count == 1 or all(time * RAIL_GAIN <= one for time, one in zip(times, taken[0], strict=True))
    }
    return next(count for count, time in faster.items() if time <= min(faster.values()) * RAIL_GAIN)


def _reduce_speed(world: World) -> float:
    """Bytes a second of adding one array to another, all ranks at once; the slowest rank's."""
    one, other = torch.ones(2, SUMMED, device=world.device)
    cuda = world.device.type == "cuda"
    times = []
    for _ in range(ROUNDS.start + 1):
        world.control.barrier()
        began = perf_counter()
        one.add_(other)
        if cuda:
            torch.cuda.synchronize(world.device)
        times.append(perf_counter() - began)
    return SUMMED * 4 / slowest(world, [median(times[1:])])[0]
