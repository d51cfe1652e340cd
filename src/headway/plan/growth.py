"""Gain of more training data: error, network size and compute, by power laws.

Hestness et al. 2017 (arXiv 1712.00409): over the range in which a network learns from its data, the error falls as a
power of their number, and the best network size grows as a power below 1 of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.errors import UsageError
from headway.core.statistics import compute_student_t
from headway.core.workload import Workload

# Operations of one day at 10^15 per second; a multiply-add is two operations.
PF_S_DAY = 1e15 * 86_400
# Peak operations per second of a server with two CPUs: 28 cores each, 64 operations per cycle (two AVX-512 units), at
# 1.7 GHz. It needs 449 years for 1,000 PF/s-days.
CPU_FLOPS = 2 * 28 * 64 * 1.7e9


@final
@dataclass(frozen=True)
class PowerLaw:
    """Fitted law y = scale * x ** exponent."""

    scale: float
    exponent: float
    # Standard deviation of ln y around the law.
    spread: float
    # Range of the fitted x.
    low: float
    high: float
    # Number of fitted points.
    count: int
    # Mean of ln x.
    mean_log: float
    # Sum of squared deviations of ln x from that mean.
    squares: float

    def __call__(self, x: float) -> float:
        """Returns y at x."""
        return self.scale * float(x**self.exponent)

    def predict_band(self, x: float) -> tuple[float, float]:
        """Predicts the 95 % interval of a new point at x, if the law continues. Two points give (0, infinity)."""
        # The prediction interval of a linear regression in logarithms: it widens with the distance from the fitted
        # points.
        free = self.count - 2
        if free < 1:
            return 0.0, math.inf
        far = (math.log(x) - self.mean_log) ** 2 / self.squares
        width = compute_student_t(free) * self.spread * math.sqrt(1 + 1 / self.count + far)
        return self(x) * math.exp(-width), self(x) * math.exp(width)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Fits a power law by least squares in logarithms.

    Args:
        points: pairs (x, y), all above 0.

    Raises UsageError if there are fewer than two different x, or a number is not positive.
    """
    if any(not (x > 0 and y > 0) for x, y in points):
        raise UsageError("a power law needs numbers above 0")
    if len({x for x, _ in points}) < 2:
        problem = "a power law needs 2 points or more with different numbers of samples"
        raise UsageError(problem, where="--errors-at")
    log_x, log_y = (np.log(np.array(side, np.float64)) for side in zip(*points, strict=True))
    mean_x, mean_y = float(log_x.mean()), float(log_y.mean())
    squares = float(((log_x - mean_x) ** 2).sum())
    exponent = float(((log_x - mean_x) * (log_y - mean_y)).sum() / squares)
    left = log_y - mean_y - exponent * (log_x - mean_x)
    # Two parameters are fitted: two degrees of freedom fewer.
    free = max(1, len(points) - 2)
    sizes = [x for x, _ in points]
    return PowerLaw(
        math.exp(mean_y - exponent * mean_x), exponent, math.sqrt(float((left**2).sum()) / free), min(sizes),
        max(sizes), len(points), mean_x, squares,
    )  # fmt: skip


@final
@dataclass(frozen=True)
class GrowthPrediction:
    """Prediction for a larger training set."""

    samples: float
    # Error of the trained network, and its 95 % interval.
    error: float
    low: float
    high: float
    # Parameters of the network that suits the set; None: --sizes-at was not given.
    parameters: float | None
    # Compute of the training, in 10^15 operations per second for a day.
    pf_s_days: float | None
    # Years that a server without a GPU needs for it.
    cpu_years: float | None
    # Samples over those of the largest measured set: the further, the less the law is known to hold.
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
    """Predicts error, network size and compute for a training set of this size.

    Args:
        error: law of the error by samples; must fall.
        size: law of the parameters by samples; must grow slower than they do.
        flops_per_sample: forward and backward operations of the current network; scaled with the parameters.
        now_parameters: parameters of the current network; needed with `size`.
        epochs: passes over the set.

    Raises UsageError if the error does not fall with samples, or the network would grow as fast as the data.
    """
    if not samples > 0:
        raise UsageError(f"a training set has at least one sample, not {samples:g}")
    if error.exponent >= 0:
        problem = f"the error does not fall with more data (exponent {error.exponent:+.3f})"
        raise UsageError(problem, where="--errors-at", fix="Leave out the sets on which the network no longer learns.")
    if size is not None and not 0 <= size.exponent < 1:
        problem = f"network size must grow as a power of the data between 0 and 1, not {size.exponent:.3f}"
        raise UsageError(problem, where="--sizes-at", fix="Leave out points where a larger network was no better.")
    parameters = None if size is None else size(samples)
    # Operations per sample grow with the parameters of the network.
    flops = flops_per_sample
    if flops is not None and parameters is not None and now_parameters:
        flops *= parameters / now_parameters
    total = None if flops is None else flops * samples * epochs
    return GrowthPrediction(
        samples, error(samples), *error.predict_band(samples), parameters, None if total is None else total / PF_S_DAY,
        None if total is None else total / CPU_FLOPS / (365.25 * 86_400), samples / error.high,
    )  # fmt: skip


@final
@dataclass(frozen=True)
class DataGrowth:
    """Laws of error and network size by samples, and predictions for larger sets."""

    error: PowerLaw
    size: PowerLaw | None
    sizes: tuple[GrowthPrediction, ...]


def predict_data_growth(
    workload: Workload, errors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]] = ()
) -> DataGrowth:
    """Predicts the gain of 2, 5, 10 and 100 times the largest measured training set.

    Args:
        errors: pairs (samples, error). sizes: pairs (samples, parameters of the best network).

    Raises UsageError as `fit_power_law` and `predict_growth` do.
    """
    error, size = fit_power_law(errors), fit_power_law(sizes) if sizes else None
    growths = [
        predict_growth(
            times * error.high, error, size=size, flops_per_sample=workload.operations,
            now_parameters=workload.parameters, epochs=workload.run.epochs,
        )
        for times in (2, 5, 10, 100)
    ]  # fmt: skip
    return DataGrowth(error, size, tuple(growths))
