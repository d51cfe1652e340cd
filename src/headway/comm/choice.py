"""Choice: by which algorithm a bucket is summed, from the measured links and a trial of each algorithm.

The cost model knows what crosses which link. What an operation costs besides (threads, the library, copies) is timed:
one of a few bytes by each algorithm, and one of some megabytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import Literal, final

import torch

from headway.comm.buckets import ALIGNED, LAST_SHARE
from headway.comm.communicator import Algorithm, Communicator
from headway.comm.links import slowest
from headway.comm.wire import Wire
from headway.core.collectives import LinearCost, Network, choose_bucket_for_cost, predict_cost, predict_phase_costs

BUDGET_S = 0.4
"""For the trials of all algorithms together."""

TINY, LEAST, MOST = 1 << 8, 1 << 15, 1 << 22
"""Numbers (fp32) of a trial: of the small one, and limits of the large one."""

ROUNDS = 4

STANDS_OUT = 1.1
"""An algorithm's own factor counts where it is so much above that of all, which is what headers and the processor cost;
none sends its bytes faster than the links are."""

LEAST_FACTOR = 0.25
"""Nothing is that much faster than the links: then a few bytes took as long as many."""

SHOWN = (1 << 16, 1 << 20, 16 << 20)


@final
@dataclass(frozen=True)
class Trial:
    """What an algorithm costs beyond the model: its seconds without bytes, and its bytes' time over the model's."""

    latency_s: float
    factor: float


def candidates(communicator: Communicator) -> tuple[Algorithm, ...]:
    """Algorithms that differ on this world: with one host, or one rank on each, the hierarchical ones are the ring."""
    flat = len(communicator.world.hosts) == 1 or all(len(ranks) == 1 for ranks in communicator.world.hosts)
    return tuple(name for name in communicator.algorithms if not (flat and name in ("leader", "two_dimensional")))


def try_out(
    communicator: Communicator, network: Network, *, wire: Wire = "fp32", budget_s: float = BUDGET_S
) -> dict[Algorithm, Trial]:
    """Times each algorithm that differs on this world. Every rank calls it; all get rank 0's numbers.

    Args:
        wire: as the gradients will go. budget_s: about how long it may take.

    Raises:
        GenerationEndedError, CommunicationError: a rank did not answer.
    """
    world, names = communicator.world, candidates(communicator)
    if world.size == 1:
        return {}
    lines = {name: predict_cost(name, network, wire_ratio=ratio(wire)) for name in names}
    per_byte = sum(cost.s_per_byte for cost in lines.values()) + lines[names[0]].s_per_byte
    even = math.lcm(ALIGNED, *(len(ranks) for ranks in world.hosts))  # slices that need no padding, as in buckets
    large = -(-int(min(max(budget_s / ROUNDS / per_byte / 4, LEAST), MOST)) // even) * even
    buffer = torch.zeros(large, device=world.device)

    def taken(name: Algorithm, numbers: int) -> float:
        began = perf_counter()
        communicator.all_reduce(buffer[:numbers], algorithm=name, wire=wire, tag="trial").wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return perf_counter() - began

    rounds = []
    for _ in range(ROUNDS):
        taken(names[0], large)  # not counted: it uses up what a traffic shaper lets pass at once
        rounds.append([taken(name, numbers) for numbers in (large, TINY) for name in names])
    # Connections open in the first round. What a busy machine adds is never less than nothing: the minimum counts.
    seconds = slowest(world, [min(times) for times in zip(*rounds[1:], strict=True)])
    whole, tiny = (dict(zip(names, seconds[start:], strict=False)) for start in (0, len(names)))
    modelled = {name: lines[name].s_per_byte * large * 4 for name in names}
    return corrections(tiny, whole, modelled)


def corrections(
    tiny: Mapping[Algorithm, float], whole: Mapping[Algorithm, float], modelled: Mapping[Algorithm, float]
) -> dict[Algorithm, Trial]:
    """Trials of measured seconds: of a few bytes, of many, and what the model says the bytes of the latter take.

    Algorithms have the median of their factors in common, but one that is clearly slower keeps its own.
    """
    factors = {name: max(whole[name] - tiny[name], LEAST_FACTOR * modelled[name]) / modelled[name] for name in tiny}
    common = median_low(factors.values())
    return {
        name: Trial(tiny[name], factor if factor > common * STANDS_OUT else common) for name, factor in factors.items()
    }


def ratio(wire: Wire) -> float:
    """Bytes on the wire over bytes of fp32."""
    return 1.0 if wire == "fp32" else 0.5


@final
class Chooser:
    """Bytes of a bucket -> the algorithm for it; the same on every rank that has the same numbers.

    A bucket that others follow costs the time of its slowest phase, since they are in the other phases meanwhile; the
    last one, at most a quarter as large as the others, costs all of its phases.

    Args:
        network: as measured. trials: of the algorithms to choose among; none in a world of one.
        total_bytes: of all gradients.
        algorithm: that one for every bucket; `auto`: the one with the fewest predicted seconds.
        wire: as the gradients go between hosts.
        bucket_bytes: of the buckets; unset: the best.
        phased: whether buckets are in several phases at the same time, as on a CPU.

    Attributes:
        bucket_bytes: as given; else the size that exchanges all gradients soonest (`collectives.bucket_bytes`).
    """

    def __init__(
        self,
        network: Network,
        trials: Mapping[Algorithm, Trial],
        total_bytes: int,
        *,
        algorithm: Algorithm | Literal["auto"] = "auto",
        wire: Wire = "fp32",
        bucket_bytes: int | None = None,
        phased: bool = True,
    ) -> None:
        names: tuple[Algorithm, ...] = tuple(trials) or ("ring",)
        self._among = names if algorithm == "auto" else (algorithm,)
        self._alone: dict[Algorithm, LinearCost] = {}
        self._followed: dict[Algorithm, LinearCost] = {}
        for name in dict.fromkeys((*names, *self._among)):
            model = predict_cost(name, network, wire_ratio=ratio(wire))
            trial = trials.get(name, Trial(model.latency_s, 1.0))
            first, second, third = (
                part.s_per_byte for part in predict_phase_costs(name, network, wire_ratio=ratio(wire))
            )
            slowest = max(second, first + third) if phased else first + second + third
            self._alone[name] = LinearCost(trial.latency_s, trial.factor * model.s_per_byte)
            self._followed[name] = LinearCost(trial.latency_s, trial.factor * slowest)
        self.bucket_bytes = bucket_bytes or self._best_size(total_bytes)

    def __call__(self, nbytes: int) -> Algorithm:
        """The algorithm for a bucket of so many bytes."""
        found = self.seconds(nbytes)
        return min(self._among, key=lambda name: found[name])

    def seconds(self, nbytes: int) -> dict[Algorithm, float]:
        """What a bucket is predicted to cost by each algorithm that is known."""
        costs = self._followed if nbytes * LAST_SHARE > self.bucket_bytes else self._alone
        return {name: cost.seconds(nbytes) for name, cost in costs.items()}

    def text(self, sizes: Sequence[int]) -> str:
        """A sentence about buckets of so many bytes: how each goes, and what the largest would cost otherwise."""
        if not sizes:
            return "There are no gradients to sum."
        counts = Counter(self(size) for size in sizes)
        many = ", ".join(f"{count} by {name}" for name, count in counts.most_common())
        largest = max(sizes)
        costs = sorted(self.seconds(largest).items(), key=lambda cost: cost[1])
        predicted = ", ".join(f"{taken * 1e3:.3g} ms by {name}" for name, taken in costs)
        return (
            f"Gradients are summed in {len(sizes)} bucket{'s'[: len(sizes) > 1]} ({many}). "
            f"Predicted for the largest, {largest / 1e6:.3g} MB: {predicted}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A table of predicted milliseconds by size and algorithm, the chosen one marked; first its heading."""
        out: list[tuple[str, ...]] = [("predicted ms", *self._alone)]
        for size in SHOWN:
            found, chosen = self.seconds(size), self(size)
            cells = (f"{taken * 1e3:.3g}{' *' if name == chosen else '  '}" for name, taken in found.items())
            out.append((f"{size / 1e6:.3g} MB", *cells))
        return out

    def _best_size(self, total_bytes: int) -> int:
        """Of the algorithm that is the cheapest for 4 MB: which one that is hardly depends on the size up there."""
        name = min(self._among, key=lambda name: self._followed[name].seconds(4e6))
        return choose_bucket_for_cost(total_bytes, self._alone[name])
