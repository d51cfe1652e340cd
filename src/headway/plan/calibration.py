"""What a device's step takes, from runs that were measured: on one device, one node or several.

A run says how long a step was, not what it was made of. What exchange and waiting take is computed and taken off; what
is left is t0 + c b, fitted to all runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.errors import UsageError
from headway.plan.step import ComputeTime, StepTime

TYPICAL_FIXED_S, FIXED_S_FACTOR = 8e-3, 2.5
"""What a step takes whatever its batch, where runs do not tell: launches of a few hundred kernels at some 10 us, and an
optimizer's pass over the weights; likely within such a factor."""
RUN_ERROR = 0.03
"""Of a run that was measured, from one day to the next."""
MAX_ROUNDS = 20


@final
@dataclass(frozen=True)
class MeasuredRun:
    """Attributes: ranks: devices. samples: of each in a step. images_s: of all together."""

    ranks: int
    samples: float
    images_s: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.ranks * self.samples / self.images_s


def calibrate_compute(
    runs: Sequence[MeasuredRun],
    step_of: Callable[[ComputeTime, MeasuredRun], StepTime],
    *,
    fixed_s: float | None = None,
) -> ComputeTime:
    """The computing that explains the runs best.

    Args:
        step_of: what a step of such a run takes, of which all but computing is taken off.
        fixed_s: what a step takes whatever its batch, if it is known from elsewhere.

    Raises:
        UsageError: no run, or one with a number that is not positive.
    """
    if not runs:
        raise UsageError("a step is calibrated by runs")
    if any(not (one.ranks >= 1 and one.samples > 0 and one.images_s > 0) for one in runs):
        raise UsageError("a run has devices, samples and images/s above 0")
    least = min(one.seconds / one.samples for one in runs)
    found = ComputeTime(0.0, least)
    for _ in range(MAX_ROUNDS):
        left = []
        for one in runs:
            told = step_of(found, one)
            beside = told.slowest_s + told.exposed_s
            left.append(max(one.seconds - beside, 0.05 * one.seconds))
        before, found = found, _fit_compute([one.samples for one in runs], left, fixed_s)
        if math.isclose(before.sample_s, found.sample_s, rel_tol=1e-9):
            break
    return found


def _fit_compute(samples: Sequence[float], seconds: Sequence[float], fixed_s: float | None) -> ComputeTime:
    """t0 and c with the least sum of squares: of each run's ln(predicted / measured) over its error, and of
    ln(t0 / 8 ms) over ln 2.5, unless t0 is given."""
    b, t = np.asarray(samples, np.float64), np.asarray(seconds, np.float64)

    def best(fixed: float) -> tuple[float, float]:
        """(sum, c): c by Newton's method in its logarithm."""
        fixed = min(fixed, 0.95 * float(t.min()))
        log_c = math.log(float(np.median((t - fixed) / b)))
        for _ in range(30):
            part = math.exp(log_c) * b
            off, slope = np.log((fixed + part) / t), part / (fixed + part)
            move = float((off * slope).sum() / (slope**2).sum())
            log_c -= move
            if abs(move) < 1e-12:
                break
        off = np.log((fixed + math.exp(log_c) * b) / t) / RUN_ERROR
        likely = 0.0 if fixed_s is not None else (math.log(fixed / TYPICAL_FIXED_S) / math.log(FIXED_S_FACTOR)) ** 2
        return float((off**2).sum()) + likely, math.exp(log_c)

    if fixed_s is not None:
        return ComputeTime(min(fixed_s, 0.95 * float(t.min())), best(fixed_s)[1])
    most = math.log(0.95 * float(t.min()) / TYPICAL_FIXED_S)
    low, high = -6 * math.log(FIXED_S_FACTOR), 6 * math.log(FIXED_S_FACTOR)
    if most <= low:
        return ComputeTime(0.0, float(np.median(t / b)))
    high = min(high, most)
    for _ in range(5):  # each grid is ten times as fine
        grid = np.linspace(low, high, 41)
        at = int(np.argmin([best(TYPICAL_FIXED_S * math.exp(one))[0] for one in grid]))
        low, high = float(grid[max(0, at - 2)]), float(grid[min(len(grid) - 1, at + 2)])
    fixed = TYPICAL_FIXED_S * math.exp(float(grid[at]))
    return ComputeTime(fixed, best(fixed)[1])
