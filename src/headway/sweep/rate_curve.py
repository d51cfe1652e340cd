"""The curve of a learning-rate range test, and the rate that it proposes. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from headway.core.errors import RecipeError, TrainingError
from headway.core.text_format import pluralise

SMOOTHED_PARTS = 10
"""The loss is averaged over the newest tenth of the steps of a range test."""
DIVERGED = 4.0
"""The test ends when the smoothed loss is so many times the lowest one."""
FALL = 0.4
"""For optimizers that are not layer-wise the proposal follows from the rate at which the smoothed loss has made this
part of its way to the minimum.

The minimum itself is where the loss begins to jump, so chance decides it: between seeds, a tenth of the rate there
varies by a factor of 1.07 to 2.6 (standard deviation), and this rate by 1.05 to 1.4: digits, five optimizers, two
networks.
"""
DISTANCE_SHARE = 0.26
"""The proposal as a share of the sum of all rates up to there, the distance that the weights have gone. The rate itself
is the lower, the more steps a test has: 7.7 of LARS with 36 steps, 3.3 with 100. Fitted to grids on digits."""
LAYER_WISE_SHARE = 1 / 3
"""The proposal as a share of the rate at the minimum, for LARS, LAMB, Muon and other layer-wise optimizers.

Their steps are as long as the rate says, however small the gradients are, so the distance tells little about the rate
of a whole training. The best rates lay between the minimum and a tenth of it (digits without batch norm; Fashion-MNIST
with batch norm, batches of 128 and 1,024, tests of 36 to 100 steps). So three trainings, with the rate at the minimum,
a third and a ninth of it, come near all of them.
"""
CLEAR_FALL = 8.0
"""A fall of the loss counts if it is so many times the noise of the smoothed loss. Noise alone falls by more once in a
thousand tests."""
ROUNDING = 1e-6
"""A smaller fall, as a share of the loss, is one of rounding."""
GRID = 16
"""Rates of the grid to which the cost is compared."""
MOST_STEPS, FEWEST_STEPS = 100, 20
"""Steps of the longest and the shortest range test."""
TESTED_SHARE = 2 / 3
"""Most steps of a range test, as a share of a training's: with three trainings it stays below a quarter of a grid of 16
rates."""


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

    @property
    def smoothed(self) -> list[float]:
        """The exponential moving average of the losses with bias correction: the first value is the first loss.

        Without the correction the average would begin at 0 (Kingma and Ba 2014, arXiv 1412.6980, section 3).
        """
        average, smoothed, keep = 0.0, list[float](), self._keep
        for count, loss in enumerate(self.losses, 1):
            average = keep * average + (1 - keep) * loss
            smoothed.append(average / (1 - keep**count))
        return smoothed

    @property
    def has_diverged(self) -> bool:
        """True if the smoothed loss has risen so far that higher rates tell nothing more."""
        smoothed = self.smoothed
        if not smoothed or not math.isfinite(smoothed[-1]):
            return bool(smoothed)
        lowest = min(smoothed)
        # A loss of the user's own may be negative: the rise is then compared with its size, or with the fall before it.
        unit = lowest if lowest > 0 else max(-lowest, smoothed[0] - lowest)
        return smoothed[-1] > lowest + (DIVERGED - 1) * unit

    @property
    def noise(self) -> float:
        """The standard deviation of the smoothed loss that comes from the choice of the batches, up to its minimum."""
        smoothed = self.smoothed
        changes = [abs(after - before) for before, after in pairwise(self.losses[: smoothed.index(min(smoothed)) + 1])]
        if not changes:
            return 0.0
        # Of normal noise the median distance of neighbours is 0.954 standard deviations; a trend hardly moves it.
        return statistics.median(changes) / 0.954 * math.sqrt((1 - self._keep) / (1 + self._keep))

    @property
    def _keep(self) -> float:
        """The share of the average that each step keeps."""
        # The newest tenth has 1 - 1/e of the weight of the average.
        return max(0.0, 1 - SMOOTHED_PARTS / len(self.rates))


@final
@dataclass(frozen=True)
class Proposal:
    """The result of a range test.

    Attributes:
        minimum: the rate at which the smoothed loss is lowest.
        rate: the rate that it proposes for the peak of the schedule.
    """

    minimum: float
    rate: float


def count_test_steps(training_steps: int) -> int:
    """Returns the steps of a range test: 100, or two thirds of those of a short training, but at least 20.

    Raises:
        RecipeError: the training is shorter than that.
    """
    if training_steps <= FEWEST_STEPS:
        what = f"a training of {pluralise(training_steps, 'step')} is too short for a range test of {FEWEST_STEPS}"
        raise RecipeError(what, fix="Train for more epochs, or take a smaller batch.")
    return max(FEWEST_STEPS, min(MOST_STEPS, int(TESTED_SHARE * training_steps)))


def list_rates(start: float, end: float, steps: int) -> tuple[float, ...]:
    """Returns rates from start to end, each larger than the one before it by the same factor."""
    return tuple(start * (end / start) ** (step / (steps - 1)) for step in range(steps))


def propose_rate(curve: RateCurve, *, is_layer_wise: bool = False) -> Proposal:
    """Returns the rate that a range test proposes.

    Multiplying all losses, or all rates, by a number leaves the place on the curve as it is.

    Args:
        is_layer_wise: the optimizer scales the step of each layer separately.

    Raises:
        TrainingError: the loss is not finite at the first step, falls at no rate, or still falls at the last one.
    """
    rates = curve.rates
    # A loss that is not finite ends the test, so only the last one can be.
    if curve.losses and not math.isfinite(curve.losses[-1]):
        curve = replace(curve, losses=curve.losses[:-1])
    losses, smoothed = curve.losses, curve.smoothed
    if not losses:
        what = f"the loss of the first step is not finite, at a learning rate of {rates[0]:.3g}"
        raise TrainingError(what, fix="Check images, labels and network: headway doctor RECIPE.")
    place = smoothed.index(min(smoothed))
    # The first rates change the weights by next to nothing, so their losses are those of the untrained network.
    early = losses[: max(1, len(rates) // 10)]
    untrained = statistics.fmean(early)
    fall = untrained - smoothed[place]
    if place < len(early) or not fall > max(CLEAR_FALL * curve.noise, ROUNDING * abs(untrained)):
        steps = f"in a range test of {pluralise(len(rates), 'step')}"
        what = f"the loss falls at no learning rate from {rates[0]:.3g} to {rates[len(losses) - 1]:.3g}, {steps}"
        check = "check labels, loss and network: headway doctor RECIPE."
        if len(rates) >= MOST_STEPS:
            raise TrainingError(what, fix=f"C{check[1:]}")
        # Few steps are the likelier reason.
        longer = f"from {math.ceil(MOST_STEPS / TESTED_SHARE)} steps on, the test has {MOST_STEPS}"
        raise TrainingError(what, fix=f"Train for more epochs: {longer}. If that does not help, {check}")
    if place == len(rates) - 1:
        what = f"the loss still falls at the last learning rate of the range test, {rates[-1]:.3g}"
        fix = "The optimizer may step few of the weights: look at optimizer.groups and at frozen layers."
        raise TrainingError(what, fix=fix)
    if is_layer_wise:
        return Proposal(rates[place], LAYER_WISE_SHARE * rates[place])
    slope = next(step for step, loss in enumerate(smoothed) if loss <= untrained - FALL * fall)
    # On a steep curve this would lie where the loss rises.
    return Proposal(rates[place], min(rates[place], DISTANCE_SHARE * math.fsum(rates[: slope + 1])))
