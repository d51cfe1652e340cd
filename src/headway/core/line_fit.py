"""Fit of latency and bandwidth to the measured times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.core.collectives import LinearCost
from headway.core.errors import UsageError

# Huber's threshold of the relative error, and the number of reweighted least-squares rounds.
EXPECTED_ERROR, REWEIGHTED = 0.05, 20
# A line through noise may be nearly flat, which would mean an infinite bandwidth.
FASTER = 8
# Below the resolution of any clock: keeps the relative errors finite.
SHORTEST_S = 1e-9

Floats = NDArray[np.float64]


def fit_line(points: Sequence[tuple[float, float]]) -> LinearCost:
    """Fits seconds = latency + bytes / bandwidth by least squares of the relative errors.

    Large errors count less (Huber 1964): on a busy machine some sizes are late, and the line goes through the others.
    The latency is between 0 and the shortest time; the bandwidth is at most FASTER times that of the largest message.

    Args:
        points: (bytes, seconds).

    Raises:
        UsageError: no point, or one whose bytes are not positive.
    """
    if not points or any(not nbytes > 0 for nbytes, _ in points):
        raise UsageError("cannot fit a line: every message needs 1 byte or more")
    n, t = (np.array(side, np.float64) for side in zip(*points, strict=True))
    t = np.maximum(t, SHORTEST_S)
    weights = np.ones_like(t)
    for _ in range(REWEIGHTED):
        latency, slope = _solve_weighted(n, t, weights)
        errors = (latency + n * slope) / t - 1
        weights = np.minimum(1, EXPECTED_ERROR / np.maximum(np.abs(errors), 1e-12))
    return LinearCost(latency, slope)


def _solve_weighted(n: Floats, t: Floats, weights: Floats) -> tuple[float, float]:
    """Returns the (latency, slope) that minimise the sum of weights * ((latency + n * slope) / t - 1)^2."""
    root = np.sqrt(weights)
    latency, slope = map(float, np.linalg.lstsq(np.stack([root / t, root * n / t], 1), root, rcond=None)[0])
    # Outside its bounds, the latency is clamped and the slope solved for alone.
    if not (0 <= latency <= t.min() and slope > 0):
        latency = min(max(latency, 0.0), float(t.min()))
        slope = float((weights * n / t * (1 - latency / t)).sum() / (weights * (n / t) ** 2).sum())
    return latency, max(slope, float(t[n.argmax()] / n.max()) / FASTER)
