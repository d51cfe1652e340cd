"""The line through what messages of several sizes took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.core.collectives import LinearCost
from headway.core.errors import UsageError

EXPECTED_ERROR, REWEIGHTED = 0.05, 20
"""Relative errors above the first count less; so often the weights are set anew."""
FASTER = 8
"""A line through noise may rise hardly or not at all."""
SHORTEST_S = 1e-9
"""No step takes less."""

Floats = NDArray[np.float64]


def fit_line(points: Sequence[tuple[float, float]]) -> LinearCost:
    """Fits seconds = latency + bytes / bandwidth by least squares of relative errors, which count the less the larger
    they are (Huber 1964): on a busy machine some sizes are late, and the line goes through the others.

    The latency lies between 0 and the shortest time, and the bandwidth is at most FASTER times what the largest size
    had with its latency.

    Args:
        points: (bytes, seconds).

    Raises:
        UsageError: no point, or one whose bytes are not positive.
    """
    if not points or any(not nbytes > 0 for nbytes, _ in points):
        raise UsageError("a line is fitted to messages of 1 byte or more")
    n, t = (np.array(side, np.float64) for side in zip(*points, strict=True))
    t = np.maximum(t, SHORTEST_S)
    weights = np.ones_like(t)
    for _ in range(REWEIGHTED):
        latency, slope = _solve_weighted(n, t, weights)
        errors = (latency + n * slope) / t - 1
        weights = np.minimum(1, EXPECTED_ERROR / np.maximum(np.abs(errors), 1e-12))
    return LinearCost(latency, slope)


def _solve_weighted(n: Floats, t: Floats, weights: Floats) -> tuple[float, float]:
    """Latency and seconds a byte with the least sum of weights * ((latency + n * slope) / t - 1)^2."""
    root = np.sqrt(weights)
    latency, slope = map(float, np.linalg.lstsq(np.stack([root / t, root * n / t], 1), root, rcond=None)[0])
    if not (0 <= latency <= t.min() and slope > 0):
        latency = min(max(latency, 0.0), float(t.min()))
        slope = float((weights * n / t * (1 - latency / t)).sum() / (weights * (n / t) ** 2).sum())
    return latency, max(slope, float(t[n.argmax()] / n.max()) / FASTER)
