"""The curve of a learning-rate range test, and the rate that it proposes. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from headway.core.errors import TrainingError

SMOOTHING = 0.9
"""Share of the moving average that each step keeps."""
DIVERGED = 4.0
"""The test ends when the smoothed loss is so many times the lowest one."""
MARGIN = 10.0
"""The proposal is the rate at the minimum over this number: at the minimum, the loss is about to rise."""
CLEAR_FALL = 5.0
"""A fall of the loss counts if it is so many times the noise of the smoothed loss."""
GRID = 16
"""Rates of the grid to which the cost is compared."""
MOST_STEPS, FEWEST_STEPS = 100, 20
"""Steps of the longest and the shortest range test."""


@final
@dataclass(frozen=True)
class RateCurve:
    """The losses of a range test by learning rate.

    Attributes:
        rates: learning rate of each step, rising.
        losses: mean loss of each step's batch. Fewer than the rates if the test ended early.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]


@final
@dataclass(frozen=True)
class Proposal:
    """What a range test has found.

    Attributes:
        minimum: the rate at which the smoothed loss is lowest.
        rate: the rate that it proposes for the peak of the schedule.
    """

    minimum: float
    rate: float


def count_test_steps(training_steps: int) -> int:
    """Returns the steps of a range test: 100, or a tenth of those of a grid of 16 trainings if that is less."""
    return max(FEWEST_STEPS, min(MOST_STEPS, GRID * training_steps // 10))


def list_rates(start: float, end: float, steps: int) -> tuple[float, ...]:
    """Returns rates from start to end, each larger than the one before it by the same factor."""
    return tuple(start * (end / start) ** (step / (steps - 1)) for step in range(steps))


def smooth_losses(losses: Sequence[float]) -> list[float]:
    """Returns the exponential moving average with bias correction, so that the first value is the first loss.

    Without the correction the average would begin at 0 (Kingma and Ba 2014, arXiv 1412.6980, section 3).
    """
    average, smoothed = 0.0, list[float]()
    for count, loss in enumerate(losses, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**count))
    return smoothed


def has_diverged(losses: Sequence[float]) -> bool:
    """Returns True if the smoothed loss has risen so far that higher rates tell nothing more."""
    smoothed = smooth_losses(losses)
    if not smoothed or not math.isfinite(smoothed[-1]):
        return bool(smoothed)
    lowest = min(smoothed)
    # A loss of the user's own may be negative: the rise is then compared with the fall before it.
    limit = DIVERGED * lowest if lowest > 0 else lowest + (DIVERGED - 1) * (smoothed[0] - lowest)
    return smoothed[-1] > limit


def propose_rate(curve: RateCurve) -> Proposal:
    """Returns the rate that a range test proposes.

    Raises:
        TrainingError: the loss is not finite at the first step, falls at no rate, or still falls at the last one.
    """
    rates = curve.rates
    losses = [loss for loss in curve.losses if math.isfinite(loss)]
    if not losses:
        what = f"the loss of the first step is not finite, at a learning rate of {rates[0]:.3g}"
        raise TrainingError(what, fix="Check images, labels and network: headway doctor RECIPE.")
    smoothed = smooth_losses(losses)
    place = min(range(len(smoothed)), key=smoothed.__getitem__)
    # The first rates change the weights by next to nothing, so their losses are those of the untrained network.
    untrained = statistics.fmean(losses[: max(1, len(losses) // 10)])
    if not untrained - smoothed[place] > CLEAR_FALL * measure_noise(losses[: place + 1]):
        what = f"the loss falls at no learning rate from {rates[0]:.3g} to {rates[len(losses) - 1]:.3g}"
        raise TrainingError(what, fix="Check labels, loss and network: headway doctor RECIPE.")
    if place == len(rates) - 1:
        what = f"the loss still falls at the last learning rate of the range test, {rates[-1]:.3g}"
        fix = "The optimizer may step few of the weights: look at optimizer.groups and at frozen layers."
        raise TrainingError(what, fix=fix)
    return Proposal(minimum=rates[place], rate=rates[place] / MARGIN)


def measure_noise(losses: Sequence[float]) -> float:
    """Returns the standard deviation of the smoothed loss that comes from the choice of the batches."""
    changes = [abs(after - before) for before, after in pairwise(losses)]
    if not changes:
        return 0.0
    # Of normal noise the median distance of neighbours is 0.954 standard deviations; a trend hardly moves it.
    return statistics.median(changes) / 0.954 * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))
