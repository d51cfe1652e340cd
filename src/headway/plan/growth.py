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
from headway.core.workload import Workload
from headway.plan.error_curve import ErrorCurve, fit_error_curve

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

    def __call__(self, x: float) -> float:
        """Returns y at x."""
        return self.scale * float(x**self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Fits a power law by least squares in logarithms.

    Args:
        points: pairs (x, y), all above 0.

    Raises UsageError if there are fewer than two different x, or a number is not positive.
    """
    if any(not (x > 0 and y > 0) for x, y in points):
        raise UsageError("a power law needs numbers above 0", where="--sizes-at")
    if len({x for x, _ in points}) < 2:
        problem = "a power law needs 2 points or more with different numbers of samples"
        raise UsageError(problem, where="--sizes-at")
    log_x, log_y = (np.log(np.array(side, np.float64)) for side in zip(*points, strict=True))
    far = log_x - log_x.mean()
    exponent = float((far * (log_y - log_y.mean())).sum() / (far**2).sum())
    return PowerLaw(math.exp(float(log_y.mean()) - exponent * float(log_x.mean())), exponent)


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
    error: ErrorCurve,
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
    error.expect_fall()
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

    error: ErrorCurve
    size: PowerLaw | None
    sizes: tuple[GrowthPrediction, ...]


def predict_data_growth(
    workload: Workload | None, errors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]] = ()
) -> DataGrowth:
    """Predicts the gain of 2, 5, 10 and 100 times the largest measured training set.

    Args:
        workload: without one, no compute is predicted.
        errors: pairs (samples, error). sizes: pairs (samples, parameters of the best network).

    Raises UsageError as `fit_error_curve`, `fit_power_law` and `predict_growth` do.
    """
    error, size = fit_error_curve(errors), fit_power_law(sizes) if sizes else None
    needs: dict[str, float] = {}
    if workload is not None:
        needs = {
            "flops_per_sample": workload.operations,
            "now_parameters": workload.parameters,
            "epochs": workload.run.epochs,
        }
    growths = [predict_growth(times * error.high, error, size=size, **needs) for times in (2, 5, 10, 100)]
    return DataGrowth(error, size, tuple(growths))


@final
@dataclass(frozen=True)
class HeldOutSet:
    """The largest measured set, and the samples that the smaller ones alone would have asked for its error."""

    measured: float
    samples: float


@final
@dataclass(frozen=True)
class DataNeed:
    """Training set that an error needs."""

    error: float
    samples: float
    # The 95 % interval; 0 to infinity without points to spare.
    low: float
    high: float
    # Samples over those of the largest measured set.
    extrapolated: float
    # None: too few points are left, or they lead to another law.
    held_out: HeldOutSet | None


def predict_data_need(curve: ErrorCurve, error: float) -> DataNeed:
    """Predicts the samples that an error needs. Raises UsageError as `ErrorCurve.predict_samples` does."""
    if not 0 < error < math.inf:
        raise UsageError(f"an error to reach is a number above 0, not {error:g}", where="--error-target")
    samples, low, high = curve.predict_samples(error)
    return DataNeed(error, samples, low, high, samples / curve.high, _hold_out_largest(curve))


def _hold_out_largest(curve: ErrorCurve) -> HeldOutSet | None:
    smaller = [point for point in curve.points if point[0] < curve.high]
    errors = [error for samples, error in curve.points if samples == curve.high]
    try:
        alone = fit_error_curve(smaller)
        return HeldOutSet(curve.high, alone.predict_samples(sum(errors) / len(errors))[0])
    except UsageError:
        return None
