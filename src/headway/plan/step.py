"""Time of one data-parallel step: compute, contention, exposed all-reduce, and the wait for the slowest device.

T = (t0 + c b) (1 + k log2 L) + xi_N cv c b + exposed, with the fixed time t0 (launches, optimizer), the samples b of a
device, the contention k among the L devices of a node, the expected maximum xi_N of N standard normals, and the
coefficient of variation cv of a device's compute time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from headway.core import collectives
from headway.core.collectives import LARGEST_BUCKET, SMALLEST_BUCKET, Algorithm, Network
from headway.core.errors import UsageError
from headway.core.workload import Workload
from headway.plan.losses import StepLosses

# Backward pass over forward and backward: two matrix products to one. For a workload the exact share is counted.
BACKWARD_SHARE = 2 / 3
# Bucket sizes to try, within the limits of Headway's own buckets. They do not depend on the network, so that faster
# links never make a step longer.
BUCKET_SIZES = tuple(1 << power for power in range((SMALLEST_BUCKET - 1).bit_length(), LARGEST_BUCKET.bit_length()))
# Bytes -> (seconds, algorithm) of an all-reduce.
Cost = Callable[[float], tuple[float, Algorithm]]
# Algorithms of NCCL, which most software uses; Headway composes one more of three of its calls.
NCCL_ALGORITHMS: tuple[Algorithm, ...] = ("ring", "double_tree")
GPU_ALGORITHMS: tuple[Algorithm, ...] = (*NCCL_ALGORITHMS, "two_dimensional")
NO_LOSSES = StepLosses()


@final
@dataclass(frozen=True)
class ComputeTime:
    """Compute time of a step on one device."""

    # Seconds of any step, whatever its batch.
    fixed_s: float
    # Additional seconds of each sample.
    sample_s: float
    # Seconds of the optimizer's matrix products, once a step however many micro-batches it has.
    update_s: float = 0.0

    def seconds(self, samples: float) -> float:
        """Returns the seconds of a micro-batch, without the optimizer's products."""
        return self.fixed_s + self.sample_s * samples


@final
@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that are all-reduced together."""

    # Bytes of the gradients.
    nbytes: float
    # Share of the backward pass after which all of them exist.
    ready: float


@final
@dataclass(frozen=True)
class ExchangeTime:
    """Time of all buckets of a step."""

    # Seconds of all buckets together, hidden or not.
    seconds: float
    # Seconds that remain after the end of the backward pass.
    exposed_s: float
    # All-reduce algorithm of each bucket.
    algorithms: tuple[Algorithm, ...]


@final
@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by cause."""

    # Compute time: fixed part, and the part of the samples.
    fixed_s: float
    sample_s: float
    # Wait for the slowest device.
    slowest_s: float
    # Exchange that the backward pass does not hide.
    exposed_s: float
    # All of the exchange, hidden or not.
    exchange_s: float
    algorithms: tuple[Algorithm, ...] = ()
    # Slower compute because the devices of a node share it.
    contention_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return self.fixed_s + self.sample_s + self.contention_s + self.slowest_s + self.exposed_s

    @property
    def communication_ratio(self) -> float:
        """Seconds of the exchange over those of compute."""
        return self.exchange_s / (self.fixed_s + self.sample_s)


def predict_step(
    compute: ComputeTime,
    samples: float,
    buckets: Sequence[PlannedBucket],
    network: Network,
    *,
    losses: StepLosses = NO_LOSSES,
    among: Sequence[Algorithm] = GPU_ALGORITHMS,
    wire_ratio: float = 1.0,
    accumulate: int = 1,
    backward: float = BACKWARD_SHARE,
) -> StepTime:
    """Predicts one step.

    Args:
        samples: micro-batch of a device.
        accumulate: micro-batches per step. Gradients are exchanged during the last one.
        backward: share of the compute time that the backward pass takes.
    """
    if samples <= 0 or accumulate < 1:
        raise UsageError(f"a step needs samples above 0 and 1 micro-batch or more, not {samples:g} and {accumulate}")
    alone = compute.seconds(samples)
    # Variations of independent micro-batches add up in squares: their sum varies by the square root of their number.
    waits = accumulate**0.5 * losses.jitter * compute.sample_s * samples * compute_expected_maximum(network.ranks)
    crowded = alone * losses.contention * math.log2(network.ranks_per_host)
    cost = build_cost_function(losses.slow_links(network), tuple(among), wire_ratio)
    exchange = (
        overlap_exchange(buckets, backward * (alone + crowded), cost)
        if network.ranks > 1
        else ExchangeTime(0.0, 0.0, ())
    )
    exposed = losses.hidden * exchange.exposed_s + (1 - losses.hidden) * exchange.seconds
    return StepTime(
        accumulate * compute.fixed_s + compute.update_s, accumulate * compute.sample_s * samples, waits, exposed,
        exchange.seconds, tuple(sorted(set(exchange.algorithms))), accumulate * crowded,
    )  # fmt: skip


@lru_cache(maxsize=64)
def build_cost_function(network: Network, among: tuple[Algorithm, ...], wire_ratio: float) -> Cost:
    """Builds the cost function of a network: for each size the cheapest of these algorithms."""
    # Buckets repeat in size, and the search over bucket sizes asks thousands of times.
    known = dict[float, tuple[float, Algorithm]]()

    def compute_cost(nbytes: float) -> tuple[float, Algorithm]:
        if nbytes not in known:
            known[nbytes] = collectives.choose_algorithm(nbytes, network, among, wire_ratio=wire_ratio)
        return known[nbytes]

    return compute_cost


def overlap_exchange(buckets: Sequence[PlannedBucket], backward_s: float, cost: Cost) -> ExchangeTime:
    """Overlaps the exchange with the backward pass: each bucket starts when it is full and the one before it is done.

    Args:
        buckets: in the order in which they become ready.
    """
    done = total = 0.0
    algorithms = []
    for bucket in buckets:
        seconds, algorithm = cost(bucket.nbytes)
        done = max(done, bucket.ready * backward_s) + seconds
        total += seconds
        algorithms.append(algorithm)
    return ExchangeTime(total, max(0.0, done - backward_s), tuple(algorithms))


def list_gradients(workload: Workload) -> list[PlannedBucket]:
    """Lists each layer's gradients in the order of the backward pass, whose progress is measured in multiply-adds."""
    total, gradients, spent = workload.backward_multiply_adds, list[PlannedBucket](), 0
    for layer in workload.order_by_gradient():
        spent += layer.backward_multiply_adds
        if layer.gradient_bytes:
            gradients.append(PlannedBucket(layer.gradient_bytes, spent / total if total else 1.0))
    return gradients


def pack_buckets(gradients: Sequence[PlannedBucket], nbytes: float) -> list[PlannedBucket]:
    """Packs gradients into buckets of at least this size, in order; the last one may be smaller."""
    buckets, held = list[PlannedBucket](), 0.0
    for one in gradients:
        held += one.nbytes
        if held >= nbytes:
            buckets.append(PlannedBucket(held, one.ready))
            held = 0.0
    return [*buckets, PlannedBucket(held, 1.0)] if held else buckets


def choose_buckets(
    gradients: Sequence[PlannedBucket],
    network: Network,
    *,
    nbytes: int | None = None,
    backward_s: float = 0.0,
    among: Sequence[Algorithm] = GPU_ALGORITHMS,
    wire_ratio: float = 1.0,
    hidden: float = 1.0,
) -> list[PlannedBucket]:
    """Chooses the buckets of an exchange.

    Args:
        nbytes: bucket size; None: the one of `BUCKET_SIZES` that leaves least of the exchange after the backward pass.
        backward_s: seconds of that pass.
        hidden: share of the exchange that overlaps with it.
    """
    if nbytes is not None:
        return pack_buckets(gradients, nbytes)
    cost = build_cost_function(network, tuple(among), wire_ratio)

    def measure_exposed(buckets: Sequence[PlannedBucket]) -> tuple[float, float]:
        exchange = overlap_exchange(buckets, backward_s, cost)
        return hidden * exchange.exposed_s + (1 - hidden) * exchange.seconds, exchange.seconds

    return min((pack_buckets(gradients, size) for size in BUCKET_SIZES), key=measure_exposed)


@lru_cache(maxsize=256)
def compute_expected_maximum(count: int) -> float:
    """Computes the expected maximum of this many standard normals, 1.42 of 8, 2.51 of 100, 3.24 of 1,000 (Harter 1961).

    It is the integral of x d(Phi(x)^n), by the trapezoidal rule on a fine grid.
    """
    if count < 1:
        raise UsageError(f"a maximum needs 1 number or more, not {count}")
    if count == 1:
        return 0.0
    x = np.linspace(-9.0, 9.0, 18_001)
    density = np.exp(-(x**2) / 2)
    # The distribution function by cumulative sums; its last value normalises it to 1.
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    power = (below / below[-1]) ** count
    return float((0.5 * (x[1:] + x[:-1]) * np.diff(power)).sum() / (power[-1] - power[0]))
