"""Calibration of a device's compute time from measured runs on one device, one node or several.

A run gives the length of a step, not its parts. The predicted exchange and the wait for the slowest device are
subtracted; the rest is t0 + c b, fitted to all runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.errors import UsageError
from headway.plan.step import ComputeTime, StepTime

# Likely fixed time of a step, and the factor by which it varies (one standard deviation): launches of a few hundred
# kernels at some 10 us each, and one pass of the optimizer over the weights. It is a prior, for runs that do not
# determine the fixed time.
TYPICAL_FIXED_S, FIXED_S_FACTOR = 8e-3, 2.5
# Relative error of a measured run, from one day to the next.
RUN_ERROR = 0.03
# Iterations between the fit and the exchange time, which depends on it; a few are enough.
MAX_ROUNDS = 20


@final
@dataclass(frozen=True)
class MeasuredRun:
    """Measured throughput of a data-parallel run.

    Attributes:
        ranks: number of devices.
        samples_per_rank: samples of one device per step.
        images_s: throughput of all devices together.
    """

    ranks: int
    samples_per_rank: float
    images_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.ranks * self.samples_per_rank / self.images_s


def fit_compute_time(
    runs: Sequence[MeasuredRun],
    predict_run: Callable[[ComputeTime, MeasuredRun], StepTime],
    *,
    fixed_s: float | None = None,
) -> ComputeTime:
    """Fits the compute time that explains the runs best.

    Args:
        predict_run: predicts the step of a run; everything but its compute time is subtracted from the measurement.
        fixed_s: fixed time of a step, if it is known from elsewhere.

    Raises:
        UsageError: there is no run, or a number of one is not positive.
    """
    if not runs:
        raise UsageError("a calibration needs at least one measured run")
    if any(not (run.ranks >= 1 and run.samples_per_rank > 0 and run.images_s > 0) for run in runs):
        raise UsageError("devices, samples and images/s of a measured run must be above 0")
    # Start with all time proportional to the batch. The exchange that overlaps with backward depends on the compute
    # time, so fit and subtraction alternate until they agree.
    shortest_sample_s = min(run.seconds / run.samples_per_rank for run in runs)
    fitted = ComputeTime(0.0, shortest_sample_s)
    samples = [run.samples_per_rank for run in runs]
    for _ in range(MAX_ROUNDS):
        compute_seconds = []
        for run in runs:
            step = predict_run(fitted, run)
            # At least 5 % stay: a predicted exchange longer than the measured step must not turn the rest negative.
            compute_seconds.append(max(run.seconds - step.slowest_s - step.exposed_s, 0.05 * run.seconds))
        previous, fitted = fitted, _fit_least_squares(samples, compute_seconds, fixed_s)
        if math.isclose(previous.sample_s, fitted.sample_s, rel_tol=1e-9):
            break
    return fitted


def _fit_least_squares(samples: Sequence[float], seconds: Sequence[float], fixed_s: float | None) -> ComputeTime:
    """Fits t0 and c by least squares: ln(predicted / measured) of each run over its error, and ln(t0 / 8 ms) over
    ln 2.5 as a prior unless t0 is given."""
    b, t = np.asarray(samples, np.float64), np.asarray(seconds, np.float64)

    def fit_sample_time(fixed: float) -> tuple[float, float]:
        """Returns (sum of squares, best c) for a fixed t0, by Newton's method in ln c."""
        fixed = min(fixed, 0.95 * float(t.min()))
        log_c = math.log(float(np.median((t - fixed) / b)))
        for _ in range(30):
            sample_part = math.exp(log_c) * b
            log_error, d_log_error = np.log((fixed + sample_part) / t), sample_part / (fixed + sample_part)
            newton_step = float((log_error * d_log_error).sum() / (d_log_error**2).sum())
            log_c -= newton_step
            if abs(newton_step) < 1e-12:
                break
        log_error = np.log((fixed + math.exp(log_c) * b) / t) / RUN_ERROR
        prior_penalty = 0.0
        if fixed_s is None:
            prior_penalty = (math.log(fixed / TYPICAL_FIXED_S) / math.log(FIXED_S_FACTOR)) ** 2
        return float((log_error**2).sum()) + prior_penalty, math.exp(log_c)

    if fixed_s is not None:
        return ComputeTime(min(fixed_s, 0.95 * float(t.min())), fit_sample_time(fixed_s)[1])
    # The fixed time stays below the shortest step. The sum of squares has one minimum in ln t0: five nested grids find
    # it.
    most = math.log(0.95 * float(t.min()) / TYPICAL_FIXED_S)
    low, high = -6 * math.log(FIXED_S_FACTOR), 6 * math.log(FIXED_S_FACTOR)
    if most <= low:
        return ComputeTime(0.0, float(np.median(t / b)))
    high = min(high, most)
    for _ in range(5):
        grid = np.linspace(low, high, 41)
        best = int(np.argmin([fit_sample_time(TYPICAL_FIXED_S * math.exp(log_ratio))[0] for log_ratio in grid]))
        low, high = float(grid[max(0, best - 2)]), float(grid[min(len(grid) - 1, best + 2)])
    fixed = TYPICAL_FIXED_S * math.exp(float(grid[best]))
    return ComputeTime(fixed, fit_sample_time(fixed)[1])
