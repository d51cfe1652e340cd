"""Chooses the all-reduce algorithm of each bucket, from measured links and a trial of each algorithm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import Literal, final

import torch

from headway.comm.buckets import ALIGNED_ELEMENTS, LAST_BUCKET_DIVISOR
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator
from headway.comm.links import reduce_max
from headway.core.collectives import LinearCost, Network, choose_bucket_for_cost, predict_cost, predict_phase_costs
from headway.core.text_format import pluralise

# The cost model predicts the bytes on each link. Two timed trials per algorithm add the costs that it does not know
# (threads, library, copies): one all-reduce of a few bytes and one of some megabytes.

# For the trials of all algorithms together.
BUDGET_S = 0.4

# fp32 numbers in a trial: the small one, and the limits of the large one.
TINY_NUMBERS, LEAST_NUMBERS, MOST_NUMBERS = 1 << 8, 1 << 15, 1 << 22

ROUNDS = 4

# An algorithm's own factor counts if it exceeds the common one (headers, processor time) by this much. A smaller
# factor is noise: no algorithm sends its bytes faster than the links do.
STANDS_OUT = 1.1

# No algorithm is four times faster than the links: such a trial took as long for a few bytes as for many.
LEAST_FACTOR = 0.25

SHOWN_BYTES = (1 << 16, 1 << 20, 16 << 20)


@final
@dataclass(frozen=True)
class AlgorithmTrial:
    """The cost of an algorithm beyond the model: its seconds without bytes, and its bytes' time over the model's."""

    latency_s: float
    factor: float


def list_candidates(communicator: Communicator) -> tuple[Algorithm, ...]:
    """Lists the algorithms that differ on this world."""
    # With one host, or with one rank on each, the hierarchical algorithms are the ring.
    flat = len(communicator.world.hosts) == 1 or all(len(ranks) == 1 for ranks in communicator.world.hosts)
    return tuple(name for name in communicator.algorithms if not (flat and name in ("leader", "two_dimensional")))


def run_trials(
    communicator: Communicator, network: Network, *, wire: Wire = "fp32", budget_s: float = BUDGET_S
) -> dict[Algorithm, AlgorithmTrial]:
    """Times each algorithm that differs on this world. Every rank calls it; all get rank 0's numbers.

    Args:
        wire: form of the gradients between hosts. budget_s: approximate time that it takes.

    Raises:
        GenerationEndedError, CommunicationError: a rank did not answer.
    """
    world, names = communicator.world, list_candidates(communicator)
    if world.size == 1:
        return {}
    lines = {name: predict_cost(name, network, wire_ratio=get_wire_ratio(wire)) for name in names}
    per_byte = sum(cost.s_per_byte for cost in lines.values()) + lines[names[0]].s_per_byte
    # A length whose slices need no padding, as in buckets.
    even = math.lcm(ALIGNED_ELEMENTS, *(len(ranks) for ranks in world.hosts))
    large = -(-int(min(max(budget_s / ROUNDS / per_byte / 4, LEAST_NUMBERS), MOST_NUMBERS)) // even) * even
    buffer = torch.zeros(large, device=world.device)

    def time_all_reduce(name: Algorithm, numbers: int) -> float:
        began = perf_counter()
        communicator.all_reduce(buffer[:numbers], algorithm=name, wire=wire, tag="trial").wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return perf_counter() - began

    rounds = []
    for _ in range(ROUNDS):
        # Not counted: it uses up the burst that a traffic shaper lets pass.
        time_all_reduce(names[0], large)
        rounds.append([time_all_reduce(name, numbers) for numbers in (large, TINY_NUMBERS) for name in names])
    # The first round opens connections. A busy machine only ever adds time: the minimum counts.
    seconds = reduce_max(world, [min(times) for times in zip(*rounds[1:], strict=True)])
    whole, tiny = (dict(zip(names, seconds[start:], strict=False)) for start in (0, len(names)))
    modelled = {name: lines[name].s_per_byte * large * 4 for name in names}
    return compute_corrections(tiny, whole, modelled)


def compute_corrections(
    tiny: Mapping[Algorithm, float], whole: Mapping[Algorithm, float], modelled: Mapping[Algorithm, float]
) -> dict[Algorithm, AlgorithmTrial]:
    """Computes latency and factor of each algorithm.

    Args:
        tiny, whole: measured seconds for a few bytes, and for many. modelled: predicted seconds for the many bytes.
    """
    # The algorithms share the median of their factors; one that is clearly slower keeps its own.
    factors = {name: max(whole[name] - tiny[name], LEAST_FACTOR * modelled[name]) / modelled[name] for name in tiny}
    common = median_low(factors.values())
    return {
        name: AlgorithmTrial(tiny[name], factor if factor > common * STANDS_OUT else common)
        for name, factor in factors.items()
    }


def get_wire_ratio(wire: Wire) -> float:
    """Returns the bytes on the wire over the bytes of fp32."""
    return 1.0 if wire == "fp32" else 0.5


@final
class AlgorithmChooser:
    """Maps the bytes of a bucket to an algorithm; the same on every rank that has the same numbers.

    Args:
        network: as measured. trials: of the algorithms to choose among; empty in a world of one rank.
        total_bytes: of all gradients.
        algorithm: use this one for every bucket; `auto`: the one with the least predicted time.
        wire: form of the gradients between hosts.
        bucket_bytes: size of the buckets; default: the best one.
        phased: buckets are in several phases at the same time, as on a CPU.

    Attributes:
        bucket_bytes: as given; else the size that all-reduces all gradients soonest (`choose_bucket_for_cost`).
    """

    def __init__(
        self,
        network: Network,
        trials: Mapping[Algorithm, AlgorithmTrial],
        total_bytes: int,
        *,
        algorithm: Algorithm | Literal["auto"] = "auto",
        wire: Wire = "fp32",
        bucket_bytes: int | None = None,
        phased: bool = True,
    ) -> None:
        names: tuple[Algorithm, ...] = tuple(trials) or ("ring",)
        # A bucket that others follow costs the time of its slowest phase, since the others fill the remaining phases.
        # The last bucket, at most a quarter as large, costs all of its phases.
        self._among = names if algorithm == "auto" else (algorithm,)
        self._alone: dict[Algorithm, LinearCost] = {}
        self._followed: dict[Algorithm, LinearCost] = {}
        ratio = get_wire_ratio(wire)
        for name in dict.fromkeys((*names, *self._among)):
            model = predict_cost(name, network, wire_ratio=ratio)
            # An algorithm without a trial costs what the model says.
            trial = trials.get(name, AlgorithmTrial(model.latency_s, 1.0))
            first, second, third = (part.s_per_byte for part in predict_phase_costs(name, network, wire_ratio=ratio))
            # The first and the third phase share the links inside a host; the second one has those between hosts.
            slowest = max(second, first + third) if phased else first + second + third
            self._alone[name] = LinearCost(trial.latency_s, trial.factor * model.s_per_byte)
            self._followed[name] = LinearCost(trial.latency_s, trial.factor * slowest)
        self.bucket_bytes = bucket_bytes or self._find_best_bucket_bytes(total_bytes)

    def __call__(self, nbytes: int) -> Algorithm:
        """Returns the algorithm for a bucket of `nbytes`."""
        found = self.predict_seconds(nbytes)
        return min(self._among, key=lambda name: found[name])

    def predict_seconds(self, nbytes: int) -> dict[Algorithm, float]:
        """Predicts the cost of a bucket by each algorithm."""
        costs = self._followed if nbytes * LAST_BUCKET_DIVISOR > self.bucket_bytes else self._alone
        return {name: cost.seconds(nbytes) for name, cost in costs.items()}

    def describe(self, sizes: Sequence[int]) -> str:
        """Describes the choice for buckets of these bytes, and the predicted cost of the largest by each algorithm."""
        if not sizes:
            return "There are no gradients to sum."
        counts = Counter(self(size) for size in sizes)
        many = ", ".join(f"{count} by {name}" for name, count in counts.most_common())
        largest = max(sizes)
        costs = sorted(self.predict_seconds(largest).items(), key=lambda cost: cost[1])
        predicted = ", ".join(f"{taken * 1e3:.3g} ms by {name}" for name, taken in costs)
        return (
            f"Gradients are summed in {pluralise(len(sizes), 'bucket')} ({many}). "
            f"Predicted for the largest, {largest / 1e6:.3g} MB: {predicted}."
        )

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds a table of predicted milliseconds, with `*` at the choice; the first row is its heading."""
        out: list[tuple[str, ...]] = [("predicted ms", *self._alone)]
        for size in SHOWN_BYTES:
            found, chosen = self.predict_seconds(size), self(size)
            cells = (f"{taken * 1e3:.3g}{' *' if name == chosen else '  '}" for name, taken in found.items())
            out.append((f"{size / 1e6:.3g} MB", *cells))
        return out

    def _find_best_bucket_bytes(self, total_bytes: int) -> int:
        # For the cheapest algorithm at 4 MB: at such sizes the cheapest one hardly depends on the size.
        name = min(self._among, key=lambda name: self._followed[name].seconds(4e6))
        return choose_bucket_for_cost(total_bytes, self._alone[name])
