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
from headway.comm.links import measure_links, reduce_max
from headway.core.collectives import LinearCost, Network, choose_bucket_for_cost, predict_cost, predict_phase_costs
from headway.core.text_format import format_bytes, pluralise

# The cost model predicts the bytes on each link. Two timed trials per algorithm add the costs that it does not know
# (threads, library, copies): one all-reduce of a few bytes and one of some megabytes.

# For the trials of all algorithms together.
TRIALS_BUDGET_S = 0.4

# fp32 elements of the small trial, and limits for the large one.
SMALL_TRIAL_ELEMENTS = 1 << 8
MIN_LARGE_TRIAL_ELEMENTS, MAX_LARGE_TRIAL_ELEMENTS = 1 << 15, 1 << 22

TRIAL_ROUNDS = 4

# An algorithm's own factor counts if it exceeds the common one (headers, processor time) by this much. A smaller
# factor is noise: no algorithm sends its bytes faster than the links do.
OUTLIER_RATIO = 1.1

# No algorithm is four times faster than the links: such a trial took as long for a few bytes as for many.
MIN_FACTOR = 0.25

TABLE_SIZES_BYTES = (1 << 16, 1 << 20, 16 << 20)


@final
@dataclass(frozen=True)
class AlgorithmTrial:
    """The measured cost of an algorithm.

    Attributes:
        latency_s: time of an all-reduce of a few bytes.
        factor: measured time per byte over the cost model's.
    """

    latency_s: float
    factor: float


def list_candidates(communicator: Communicator) -> tuple[Algorithm, ...]:
    """Lists the algorithms that differ on this world."""
    hosts = communicator.world.hosts
    # With one host, or with one rank on each, the hierarchical algorithms are the ring.
    is_flat = len(hosts) == 1 or all(len(ranks) == 1 for ranks in hosts)
    return tuple(name for name in communicator.algorithms if not (is_flat and name in ("leader", "two_dimensional")))


def run_trials(
    communicator: Communicator, network: Network, *, wire: Wire = "fp32", budget_s: float = TRIALS_BUDGET_S
) -> dict[Algorithm, AlgorithmTrial]:
    """Times each algorithm that differs on this world. Every rank calls it.

    Args:
        network: measured links, which predict how large the large trial may be.
        wire: dtype of the gradients between hosts.
        budget_s: approximate time that it takes.

    Returns:
        the cost of each algorithm, the same on all ranks; empty in a world of one rank.

    Raises:
        GenerationEndedError: a rank was lost.
        CommunicationError: a rank did not answer.
    """
    world, names = communicator.world, list_candidates(communicator)
    if world.size == 1:
        return {}
    costs = {name: predict_cost(name, network, wire_ratio=get_wire_ratio(wire)) for name in names}
    round_s_per_byte = sum(cost.s_per_byte for cost in costs.values()) + costs[names[0]].s_per_byte
    affordable = budget_s / TRIAL_ROUNDS / round_s_per_byte / 4
    # A length whose shards need no padding, as in buckets.
    multiple = math.lcm(ALIGNED_ELEMENTS, *(len(ranks) for ranks in world.hosts))
    large = -(-int(min(max(affordable, MIN_LARGE_TRIAL_ELEMENTS), MAX_LARGE_TRIAL_ELEMENTS)) // multiple) * multiple
    buffer = torch.zeros(large, device=world.device)

    def time_all_reduce(name: Algorithm, numel: int) -> float:
        start_s = perf_counter()
        communicator.all_reduce(buffer[:numel], algorithm=name, wire=wire, tag="trial").wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return perf_counter() - start_s

    rounds = []
    for _ in range(TRIAL_ROUNDS):
        # Not counted: it uses up the burst that a traffic shaper lets pass.
        time_all_reduce(names[0], large)
        rounds.append([time_all_reduce(name, numel) for numel in (large, SMALL_TRIAL_ELEMENTS) for name in names])
    # The first round opens connections. A busy machine only ever adds time: the minimum counts.
    seconds = reduce_max(world, [min(times) for times in zip(*rounds[1:], strict=True)])
    large_s, small_s = (dict(zip(names, seconds[start:], strict=False)) for start in (0, len(names)))
    predicted_s = {name: costs[name].s_per_byte * large * 4 for name in names}
    return compute_corrections(small_s, large_s, predicted_s)


def compute_corrections(
    small_s: Mapping[Algorithm, float], large_s: Mapping[Algorithm, float], predicted_s: Mapping[Algorithm, float]
) -> dict[Algorithm, AlgorithmTrial]:
    """Returns latency and factor of each algorithm.

    Args:
        small_s, large_s: measured seconds of the small and of the large trial.
        predicted_s: predicted seconds of the large trial, without latency.
    """
    # The algorithms share the median of their factors; one that is clearly slower keeps its own.
    factors = {
        name: max(large_s[name] - small_s[name], MIN_FACTOR * predicted_s[name]) / predicted_s[name] for name in small_s
    }
    common = median_low(factors.values())
    return {
        name: AlgorithmTrial(small_s[name], factor if factor > common * OUTLIER_RATIO else common)
        for name, factor in factors.items()
    }


def get_wire_ratio(wire: Wire) -> float:
    """Returns the bytes on the wire over the bytes of fp32."""
    return 1.0 if wire == "fp32" else 0.5


@final
class AlgorithmChooser:
    """Maps the bytes of a bucket to an algorithm; the same on every rank that has the same numbers.

    Args:
        network: measured links.
        trials: measured costs of the algorithms to choose among; empty in a world of one rank.
        total_bytes: bytes of all gradients.
        algorithm: algorithm for every bucket; `auto`: the one with the least predicted time.
        wire: dtype of the gradients between hosts.
        bucket_bytes: size of the buckets; default: the best one.
        phased: True if buckets are in several phases at the same time, as on a CPU.

    Attributes:
        bucket_bytes: size of the buckets; by default the one that all-reduces all gradients soonest
            (`choose_bucket_for_cost`).
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
        self._candidates = names if algorithm == "auto" else (algorithm,)
        self._unhidden_costs: dict[Algorithm, LinearCost] = {}
        self._hidden_costs: dict[Algorithm, LinearCost] = {}
        ratio = get_wire_ratio(wire)
        for name in dict.fromkeys((*names, *self._candidates)):
            model = predict_cost(name, network, wire_ratio=ratio)
            # An algorithm without a trial costs what the model says.
            trial = trials.get(name, AlgorithmTrial(model.latency_s, 1.0))
            first, second, third = (part.s_per_byte for part in predict_phase_costs(name, network, wire_ratio=ratio))
            # The first and the third phase share the links inside a host; the second one has those between hosts.
            slowest = max(second, first + third) if phased else first + second + third
            self._unhidden_costs[name] = LinearCost(trial.latency_s, trial.factor * model.s_per_byte)
            self._hidden_costs[name] = LinearCost(trial.latency_s, trial.factor * slowest)
        self.bucket_bytes = bucket_bytes or self._find_best_bucket_bytes(total_bytes)

    def __call__(self, nbytes: int) -> Algorithm:
        """Returns the algorithm for a bucket of `nbytes`."""
        seconds = self.predict_seconds(nbytes)
        return min(self._candidates, key=lambda name: seconds[name])

    def predict_seconds(self, nbytes: int) -> dict[Algorithm, float]:
        """Returns the predicted seconds of a bucket by each algorithm."""
        costs = self._hidden_costs if nbytes * LAST_BUCKET_DIVISOR > self.bucket_bytes else self._unhidden_costs
        return {name: cost.seconds(nbytes) for name, cost in costs.items()}

    def describe(self, sizes: Sequence[int]) -> str:
        """Describes the choice for buckets of these bytes, and the predicted cost of the largest by each algorithm."""
        if not sizes:
            return "There are no gradients to sum."
        counts = Counter(self(size) for size in sizes)
        counts_text = ", ".join(f"{count} by {name}" for name, count in counts.most_common())
        max_size = max(sizes)
        costs = sorted(self.predict_seconds(max_size).items(), key=lambda cost: cost[1])
        costs_text = ", ".join(f"{seconds * 1e3:.3g} ms by {name}" for name, seconds in costs)
        return (
            f"Gradients are summed in {pluralise(len(sizes), 'bucket')} ({counts_text}). "
            f"Predicted for the largest, {format_bytes(max_size)}: {costs_text}."
        )

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds a table of predicted milliseconds, with `*` at the choice; the first row is its heading."""
        rows: list[tuple[str, ...]] = [("predicted ms", *self._unhidden_costs)]
        for size in TABLE_SIZES_BYTES:
            chosen = self(size)
            costs = self.predict_seconds(size).items()
            cells = (f"{seconds * 1e3:.3g}{' *' if name == chosen else '  '}" for name, seconds in costs)
            rows.append((format_bytes(size), *cells))
        return rows

    @staticmethod
    def measure(communicator: Communicator, bucket_bytes: int, *, wire: Wire = "fp32") -> AlgorithmChooser:
        """Measures the links, tries the algorithms and builds a chooser for buckets of a given size.

        Takes about 1.5 s. Every rank calls it, and raises as `measure_links` does.
        """
        network = measure_links(communicator.world, rails=1).build_network(communicator.world)
        trials = run_trials(communicator, network, wire=wire)
        # On CUDA one stream runs the phases of all buckets one after another.
        is_phased = communicator.world.device.type != "cuda"
        return AlgorithmChooser(network, trials, 0, wire=wire, bucket_bytes=bucket_bytes, phased=is_phased)

    def _find_best_bucket_bytes(self, total_bytes: int) -> int:
        # For the cheapest algorithm at 4 MB: at such sizes the cheapest one hardly depends on the size.
        name = min(self._candidates, key=lambda name: self._hidden_costs[name].seconds(4e6))
        return choose_bucket_for_cost(total_bytes, self._unhidden_costs[name])
