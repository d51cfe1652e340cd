"""How many epochs a batch costs: E(B) = E_min (1 + B / B_crit), which is the same as S(B) = S_min (1 + B_crit / B).

McCandlish et al. 2018 (arXiv 1812.06162, equation 2.11): steps and samples to a target trade off along a hyperbola
whose corner is the critical batch. Below it a larger batch costs few more epochs, above it hardly saves steps; Shallue
et al. 2018 (arXiv 1811.03600) name the three regimes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, final

import numpy as np

from headway.core.errors import UsageError
from headway.plan.catalogs import read_catalog

Regime = Literal["perfect scaling", "diminishing returns", "no gain"]

PERFECT_SCALING, NO_GAIN = 0.1, 10.0
"""Batches over the critical one: up to the first, steps fall by 10 % less than the batch grows; from the second on, at
most a tenth of the steps are left to be saved."""

EXACT_FIT = 0.005
"""Root mean square up to which two batches are on a hyperbola: it goes through any two whose epochs rise, but less than
the batch."""


@final
@dataclass(frozen=True)
class ConvergencePoint:
    """A batch with which the target was reached. Attributes: lr, warmup: with which, in epochs; None: unknown."""

    batch: float
    epochs: float
    lr: float | None = None
    warmup: float | None = None
    momentum: float | None = None


@final
@dataclass(frozen=True)
class EpochsLaw:
    """Attributes:
    least: epochs of a small batch.
    critical: batch that takes twice as many.
    low, high: batches between which it was fitted; equal: it was not, and is a guess from the noise scale.
    error: root mean square of predicted over measured, less 1; None: of two batches that are on it, or one, it is not
        known.
    """

    least: float
    critical: float
    low: float
    high: float
    error: float | None

    def predict_epochs(self, batch: float) -> float:
        """To the target."""
        return self.least * (1 + batch / self.critical)

    def predict_steps(self, batch: float, samples: int) -> float:
        """To the target, on a set of so many samples."""
        return self.predict_epochs(batch) * samples / batch

    def classify_batch(self, batch: float) -> Regime:
        """What a larger batch gives here."""
        ratio = batch / self.critical
        return (
            "perfect scaling" if ratio <= PERFECT_SCALING else "diminishing returns" if ratio < NO_GAIN else "no gain"
        )

    def describe_extrapolation(self, batch: float) -> str:
        """Where it is not known by what was measured; empty: it is."""
        if self.low <= batch <= self.high:
            return ""
        if self.low == self.high:
            return "epochs are guessed: no batch beside one was measured"
        side, edge = ("below", self.low) if batch < self.low else ("above", self.high)
        return f"a batch of {batch:,.0f} lies {side} the {edge:,.0f} that were measured: epochs are extrapolated"


def fit_epochs(points: Sequence[ConvergencePoint]) -> EpochsLaw:
    """Least squares of the logarithms.

    For each critical batch the best `least` is a mean; of critical batches the best is sought, between a hundredth of
    the smallest batch and a thousand times the largest.

    Raises:
        UsageError: fewer than two batches, or a number that is not positive.
    """
    if any(not (one.batch > 0 and one.epochs > 0) for one in points):
        raise UsageError("batches and epochs are above 0", where="points")
    batch = np.array([one.batch for one in points], np.float64)
    if len(set(batch.tolist())) < 2:
        raise UsageError(f"epochs by batch are fitted to 2 batches or more, not {len(set(batch.tolist()))}")
    log_epochs = np.log(np.array([one.epochs for one in points], np.float64))

    def left(log_critical: float) -> tuple[float, float]:
        """(sum of squares, logarithm of least)"""
        found = log_epochs - np.log1p(batch / math.exp(log_critical))
        return float(((found - found.mean()) ** 2).sum()), float(found.mean())

    low, high = math.log(batch.min() / 100), math.log(batch.max() * 1000)
    grid = np.linspace(low, high, 400)
    at = int(np.argmin([left(one)[0] for one in grid]))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    for _ in range(60):  # thirds of an interval with one minimum
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if left(first)[0] < left(second)[0] else (first, high)
    squares, log_least = left((low + high) / 2)
    error = math.sqrt(squares / len(points))
    critical = math.exp((low + high) / 2)
    known = len(set(batch.tolist())) > 2 or error > EXACT_FIT
    return EpochsLaw(math.exp(log_least), critical, float(batch.min()), float(batch.max()), error if known else None)


def derive_epochs_law(noise_scale: float, batch: float, epochs: float) -> EpochsLaw:
    """With the gradient's noise scale for a critical batch (McCandlish 2018, section 2.3), and one batch whose epochs
    are known or set.

    Raises UsageError: a number is not positive.
    """
    if not (noise_scale > 0 and batch > 0 and epochs > 0):
        raise UsageError("the noise scale, the batch and its epochs are above 0", where="--noise-scale")
    return EpochsLaw(epochs / (1 + batch / noise_scale), noise_scale, batch, batch, None)


def leave_one_out(points: Sequence[ConvergencePoint]) -> list[tuple[ConvergencePoint, float]]:
    """(point, predicted over measured epochs less 1, by a fit without it), of points between others in batch."""
    ordered = sorted(points, key=lambda one: one.batch)
    found = []
    for at in range(1, len(ordered) - 1):
        one = ordered[at]
        found.append((one, fit_epochs([*ordered[:at], *ordered[at + 1 :]]).predict_epochs(one.batch) / one.epochs - 1))
    return found


@final
@dataclass(frozen=True)
class LearningRateSuggestion:
    """Attributes: lr: base learning rate of LARS. warmup: epochs. between: batches of the points it is between."""

    lr: float
    warmup: float
    momentum: float
    between: tuple[float, float]
    inside: bool


def suggest_learning_rate(batch: float, points: Sequence[ConvergencePoint]) -> LearningRateSuggestion | None:
    """Learning rate and warm-up for a batch, between the nearest points that have them, on logarithms; beyond their
    range those of the nearest. None: no point has them."""
    known = sorted((one for one in points if one.lr and one.warmup and one.momentum), key=lambda one: one.batch)
    if not known:
        return None
    if batch <= known[0].batch or batch >= known[-1].batch or len(known) == 1:
        nearest = known[0] if batch <= known[0].batch else known[-1]
        assert nearest.lr
        assert nearest.warmup
        assert nearest.momentum
        inside = batch == nearest.batch
        return LearningRateSuggestion(
            nearest.lr, nearest.warmup, nearest.momentum, (nearest.batch, nearest.batch), inside
        )
    below, above = next((a, b) for a, b in pairwise(known) if a.batch <= batch <= b.batch)
    share = math.log(batch / below.batch) / math.log(above.batch / below.batch)

    def mean(a: float | None, b: float | None) -> float:
        assert a
        assert b
        return math.exp((1 - share) * math.log(a) + share * math.log(b))

    return LearningRateSuggestion(
        mean(below.lr, above.lr),
        mean(below.warmup, above.warmup),
        1 - mean(1 - (below.momentum or 0.0), 1 - (above.momentum or 0.0)),
        (below.batch, above.batch),
        True,
    )


@cache
def load_official_points() -> tuple[ConvergencePoint, ...]:
    """Of ResNet-50 on ImageNet by LARS."""
    return tuple(ConvergencePoint(**one) for one in read_catalog("epochs")["points"])
