"""What one step takes on N nodes: computing, what of the exchange is not hidden, and waiting for the slowest.

T = t0 + c b (1 + xi_N cv) + exposed: t0 is what a step takes whatever its batch (launches, the optimizer), b the
samples of a device, xi_N the expected maximum of N standard normals, cv by how much a device's computing varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from headway.core import collectives
from headway.core.collectives import LARGEST_BUCKET, SMALLEST_BUCKET, Algorithm, AllReduceAlgorithm, Network
from headway.core.errors import UsageError
from headway.core.workload import Workload

BACKWARD = 2 / 3
"""Of forward and backward together: two matrix products to one. Of a Workload it is counted."""
FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Of buckets, if nothing is known: a small first one, so that the exchange begins early (as PyTorch's DDP has it)."""
SIZES = tuple(1 << power for power in range((SMALLEST_BUCKET - 1).bit_length(), LARGEST_BUCKET.bit_length()))
"""Bytes of buckets that are weighed: as small and as large as Headway's own may be. None hangs on the network, so that
with faster links no step takes longer."""
Cost = Callable[[float], tuple[float, Algorithm]]
"""Bytes -> (seconds, algorithm) of an all-reduce."""
GPU_ALGORITHMS: tuple[AllReduceAlgorithm, ...] = ("ring", "double_tree", "two_dimensional")
"""What NCCL has, or what can be made of it in three calls."""


@final
@dataclass(frozen=True)
class Compute:
    """Seconds of a device's step without others. Attributes: fixed_s: of any. sample_s: of each sample more."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: float) -> float:
        return self.fixed_s + self.sample_s * samples


@final
@dataclass(frozen=True)
class Bucket:
    """Attributes: nbytes: of gradients. ready: share of the backward pass after which they are all there."""

    nbytes: float
    ready: float


@final
@dataclass(frozen=True)
class Exchanged:
    """Attributes:
    seconds: of all buckets, one after the other. exposed_s: of these, after the end of the backward pass.
    algorithms: of the buckets, in their order.
    """

    seconds: float
    exposed_s: float
    algorithms: tuple[Algorithm, ...]


@final
@dataclass(frozen=True)
class Step:
    """Seconds of one step, by what takes them. Attributes:
    fixed_s, sample_s: of computing. slowest_s: waiting for the slowest of all devices. exposed_s: of the exchange.
    exchange_s: of it all, hidden or not. algorithms: that it takes.
    """

    fixed_s: float
    sample_s: float
    slowest_s: float
    exposed_s: float
    exchange_s: float
    algorithms: tuple[Algorithm, ...] = ()

    @property
    def seconds(self) -> float:
        return self.fixed_s + self.sample_s + self.slowest_s + self.exposed_s

    @property
    def communication_ratio(self) -> float:
        """Seconds of the exchange over those of computing."""
        return self.exchange_s / (self.fixed_s + self.sample_s)


def step(
    compute: Compute,
    samples: float,
    buckets: Sequence[Bucket],
    network: Network,
    *,
    jitter: float = 0.0,
    among: Sequence[Algorithm] = GPU_ALGORITHMS,
    wire_ratio: float = 1.0,
    accumulate: int = 1,
    backward: float = BACKWARD,
    overlap: bool = True,
) -> Step:
    """Of a device.

    Args:
        samples: that a device computes at once.
        accumulate: so often before gradients are exchanged; they are during the last time.
        backward: share of computing in which gradients are made.
        overlap: whether they are exchanged meanwhile; else after it.
    """
    if samples <= 0 or accumulate < 1:
        raise UsageError(f"a device has samples to compute, not {samples:g}, {accumulate} times")
    alone = compute.seconds(samples)
    waits = accumulate**0.5 * jitter * compute.sample_s * samples * expected_maximum(network.ranks)
    meanwhile = backward * alone if overlap else 0.0
    cost = cheapest(network, tuple(among), wire_ratio)
    told = exchanged(buckets, meanwhile, cost) if network.ranks > 1 else Exchanged(0.0, 0.0, ())
    return Step(
        accumulate * compute.fixed_s,
        accumulate * compute.sample_s * samples,
        waits,
        told.exposed_s,
        told.seconds,
        tuple(sorted(set(told.algorithms))),
    )


@lru_cache(maxsize=64)
def cheapest(network: Network, among: tuple[Algorithm, ...], wire_ratio: float) -> Cost:
    """Of each of these the algorithm with the fewest seconds."""
    known = dict[float, tuple[float, Algorithm]]()

    def cost(nbytes: float) -> tuple[float, Algorithm]:
        if nbytes not in known:
            found = collectives.choose_algorithm(nbytes, network, among, wire_ratio=wire_ratio)
            known[nbytes] = found.seconds, found.algorithm
        return known[nbytes]

    return cost


def exchanged(buckets: Sequence[Bucket], backward_s: float, cost: Cost) -> Exchanged:
    """One bucket after the other, each as soon as it is full and the one before it is done.

    Args:
        buckets: in the order in which they are ready.
    """
    done = total = 0.0
    algorithms = []
    for bucket in buckets:
        seconds, algorithm = cost(bucket.nbytes)
        done = max(done, bucket.ready * backward_s) + seconds
        total += seconds
        algorithms.append(algorithm)
    return Exchanged(total, max(0.0, done - backward_s), tuple(algorithms))


def gradients_of(workload: Workload) -> list[Bucket]:
    """Each layer's gradients, in the order in which the backward pass makes them; it goes on by multiply-adds."""
    total, found, spent = workload.backward_multiply_adds, list[Bucket](), 0
    for layer in workload.order_by_gradient():
        spent += layer.backward_multiply_adds
        if layer.gradient_bytes:
            found.append(Bucket(layer.gradient_bytes, spent / total if total else 1.0))
    return found


def packed(gradients: Sequence[Bucket], nbytes: float) -> list[Bucket]:
    """In buckets of at least so many bytes."""
    found, held = list[Bucket](), 0.0
    for one in gradients:
        held += one.nbytes
        if held >= nbytes:
            found.append(Bucket(held, one.ready))
            held = 0.0
    return [*found, Bucket(held, 1.0)] if held else found


def buckets(
    gradients: Sequence[Bucket],
    network: Network,
    *,
    nbytes: int | None = None,
    backward_s: float = 0.0,
    among: Sequence[Algorithm] = GPU_ALGORITHMS,
    wire_ratio: float = 1.0,
) -> list[Bucket]:
    """As they are exchanged.

    Args:
        nbytes: of a bucket; default: the one of SIZES that leaves least of the exchange after the backward pass.
        backward_s: of that.
    """
    if nbytes is not None:
        return packed(gradients, nbytes)
    cost = cheapest(network, tuple(among), wire_ratio)

    def left(found: Sequence[Bucket]) -> tuple[float, float]:
        told = exchanged(found, backward_s, cost)
        return told.exposed_s, told.seconds

    return min((packed(gradients, size) for size in SIZES), key=left)


def even_buckets(nbytes: float, *, each: float = BUCKET_BYTES, first: float = FIRST_BYTES) -> list[Bucket]:
    """Of a network nothing is known of but its gradients' bytes, which the backward pass makes evenly."""
    found, made = list[Bucket](), 0.0
    while made < nbytes:
        part = min(each if found else first, nbytes - made)
        made += part
        found.append(Bucket(part, made / nbytes))
    return found


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Of so many standard normals: the integral of x d(Phi(x)^n), by the trapezoidal rule on a fine grid.

    1.42 of 8, 2.51 of 100, 3.24 of 1,000 (order statistics; Harter 1961).
    """
    if count < 1:
        raise UsageError(f"a maximum is of 1 or more, not {count}")
    if count == 1:
        return 0.0
    x = np.linspace(-9.0, 9.0, 18_001)
    density = np.exp(-(x**2) / 2)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    power = (below / below[-1]) ** count
    return float((0.5 * (x[1:] + x[:-1]) * np.diff(power)).sum() / (power[-1] - power[0]))
