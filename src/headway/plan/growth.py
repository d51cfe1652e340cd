"""What more data give, what networks they want, and what computing those takes.

Hestness et al. 2017 (arXiv 1712.00409): over the range in which a network learns from its data, error falls as a power
of their number, and the size of network that fits best grows as a power below 1 of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.errors import UsageError
from headway.core.statistics import student_t

PF_S_DAY = 1e15 * 86_400
"""Operations of a day at 10^15 a second; a multiply-add is two."""
CPU_FLOPS = 2 * 28 * 64 * 1.7e9
"""Operations a second of a server with two processors at their peak: 28 cores each, 64 operations a cycle (two units of
AVX-512) at 1.7 GHz. 1,000 PF/s-days are 449 years of it."""


@final
@dataclass(frozen=True)
class PowerLaw:
    """y = scale * x ** exponent. Attributes:
    spread: standard deviation of ln y around it.
    low, high: x between which it was fitted. count: of points.
    mean_log, squares: of ln x: its mean, and the sum of squared deviations.
    """

    scale: float
    exponent: float
    spread: float
    low: float
    high: float
    count: int
    mean_log: float
    squares: float

    def __call__(self, x: float) -> float:
        return self.scale * float(x**self.exponent)

    def band(self, x: float) -> tuple[float, float]:
        """In which a new point lies with 95 %, if the law goes on; it widens away from the points. Of two points the
        law has no band: (0, infinity)."""
        free = self.count - 2
        if free < 1:
            return 0.0, math.inf
        far = (math.log(x) - self.mean_log) ** 2 / self.squares
        width = student_t(free) * self.spread * math.sqrt(1 + 1 / self.count + far)
        return self(x) * math.exp(-width), self(x) * math.exp(width)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """A line through the logarithms, by least squares.

    Args:
        points: (x, y), all above 0.

    Raises:
        UsageError: fewer than two x, or a number that is not positive.
    """
    if any(not (x > 0 and y > 0) for x, y in points):
        raise UsageError("a power law is fitted to numbers above 0")
    if len({x for x, _ in points}) < 2:
        raise UsageError("a power law is fitted to 2 points or more that differ in their size", where="--errors-at")
    log_x, log_y = (np.log(np.array(side, np.float64)) for side in zip(*points, strict=True))
    mean_x, mean_y = float(log_x.mean()), float(log_y.mean())
    squares = float(((log_x - mean_x) ** 2).sum())
    exponent = float(((log_x - mean_x) * (log_y - mean_y)).sum() / squares)
    left = log_y - mean_y - exponent * (log_x - mean_x)
    free = max(1, len(points) - 2)
    sizes = [x for x, _ in points]
    return PowerLaw(
        math.exp(mean_y - exponent * mean_x),
        exponent,
        math.sqrt(float((left**2).sum()) / free),
        min(sizes),
        max(sizes),
        len(points),
        mean_x,
        squares,
    )


@final
@dataclass(frozen=True)
class GrowthPrediction:
    """What a larger set would take. Attributes:
    samples: of it. error: that the network would make, with its band.
    parameters: of the network that would fit; None: no law for it.
    pf_s_days: to train it. cpu_years: the same on a server without a GPU.
    extrapolated: how many times the largest set that was measured.
    """

    samples: float
    error: float
    low: float
    high: float
    parameters: float | None
    pf_s_days: float | None
    cpu_years: float | None
    extrapolated: float


def predict_growth(
    samples: float,
    error: PowerLaw,
    *,
    size: PowerLaw | None = None,
    flops_per_sample: float | None = None,
    now_parameters: float | None = None,
    epochs: float = 1.0,
) -> GrowthPrediction:
    """Error, network and computing for a set of so many samples.

    Args:
        error: by samples; falls. size: parameters by samples; grows less than they do.
        flops_per_sample: of forward and backward, of the network there is; of a larger one in proportion.
        now_parameters: of the network there is; needed with `size`.
        epochs: over the set.

    Raises:
        UsageError: error does not fall with samples, or the network would grow as fast as the data.
    """
    if not samples > 0:
        raise UsageError("a set has samples")
    if error.exponent >= 0:
        what = f"the error does not fall with more data (exponent {error.exponent:+.3f})"
        raise UsageError(what, where="--errors-at")
    if size is not None and not 0 <= size.exponent < 1:
        what = f"a network's size grows with a power of the data between 0 and 1, not {size.exponent:.3f}"
        raise UsageError(what, fix="Look for points where a larger network was no better: leave them out.")
    parameters = None if size is None else size(samples)
    flops = flops_per_sample
    if flops is not None and parameters is not None and now_parameters:
        flops *= parameters / now_parameters
    total = None if flops is None else flops * samples * epochs
    return GrowthPrediction(
        samples,
        error(samples),
        *error.band(samples),
        parameters,
        None if total is None else total / PF_S_DAY,
        None if total is None else total / CPU_FLOPS / (365.25 * 86_400),
        samples / error.high,
    )
