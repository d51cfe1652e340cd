"""Epochs to the target by batch: E(B) = E_min (1 + B / B_crit), equivalent to S(B) = S_min (1 + B_crit / B) for steps.

McCandlish et al. 2018 (arXiv 1812.06162, equation 2.11): steps and samples to a target trade off along a hyperbola
whose corner is the critical batch. Below it a larger batch costs few more epochs, above it hardly saves steps. Shallue
et al. 2018 (arXiv 1811.03600) name the three regimes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal, final

import numpy as np

from headway.core.errors import UsageError
from headway.plan.catalogs import read_catalog

Regime = Literal["perfect scaling", "diminishing returns", "no gain"]

# Batches over the critical one: up to the first, steps fall by at most 10 % less than the batch grows; from the second
# on, at most a tenth of the steps can still be saved.
PERFECT_SCALING, NO_GAIN = 0.1, 10.0

# Root mean square below which two batches count as lying on the hyperbola. It passes through any two batches whose
# epochs rise by less than the batch, so that such a fit tells nothing about its error.
EXACT_FIT = 0.005


@final
@dataclass(frozen=True)
class ConvergencePoint:
    """A batch that reached the target, and the settings with which it did."""

    batch: float
    epochs: float
    lr: float | None = None
    # Warm-up in epochs. None: unknown, as for the other settings.
    warmup: float | None = None
    momentum: float | None = None


@final
@dataclass(frozen=True)
class EpochsLaw:
    """Epochs to the target as a function of the batch."""

    # Epochs of a small batch (E_min).
    least: float
    # Batch that needs twice as many (B_crit).
    critical: float
    # Range of the fitted batches; equal: the law is a guess from the noise scale.
    low: float
    high: float
    # Root mean square of predicted over measured epochs, less 1; None: unknown, from one batch or two.
    error: float | None
    # (batch, measured epochs over those of the hyperbola), ascending: between them the prediction follows the
    # measurements. Empty: it is the hyperbola.
    corrections: tuple[tuple[float, float], ...] = ()

    def predict_epochs(self, batch: float) -> float:
        """Predicts the epochs to the target."""
        epochs = self.least * (1 + batch / self.critical)
        if not self.corrections:
            return epochs
        batches, ratios = zip(*self.corrections, strict=True)
        return epochs * float(np.interp(math.log(batch), np.log(batches), ratios))

    def predict_steps(self, batch: float, samples: int) -> float:
        """Predicts the steps to the target on a set of this many samples."""
        return self.predict_epochs(batch) * samples / batch

    def classify_batch(self, batch: float) -> Regime:
        """Returns the regime of a batch: the gain that a larger one would bring."""
        ratio = batch / self.critical
        return (
            "perfect scaling" if ratio <= PERFECT_SCALING else "diminishing returns" if ratio < NO_GAIN else "no gain"
        )

    def describe_extrapolation(self, batch: float) -> str:
        """Says why the epochs of this batch are uncertain; empty inside the measured range."""
        if self.low <= batch <= self.high:
            return ""
        if self.low == self.high:
            return "epochs are guessed, since only one batch was measured"
        side, edge = ("below", self.low) if batch < self.low else ("above", self.high)
        return f"a batch of {batch:,.0f} is {side} the measured {edge:,.0f}, and its epochs are extrapolated"


def fit_epochs(points: Sequence[ConvergencePoint]) -> EpochsLaw:
    """Fits the law by least squares in logarithms.

    Raises UsageError if there are fewer than two different batches, or a number is not positive.
    """
    if any(not (one.batch > 0 and one.epochs > 0) for one in points):
        raise UsageError("batches and epochs must be above 0", where="points")
    batch = np.array([one.batch for one in points], np.float64)
    if len(set(batch.tolist())) < 2:
        raise UsageError(f"a fit of epochs needs 2 batches or more, not {len(set(batch.tolist()))}")
    log_epochs = np.log(np.array([one.epochs for one in points], np.float64))

    def fit_least(log_critical: float) -> tuple[float, float]:
        """Returns (sum of squares, ln E_min) for a critical batch: the best E_min is a mean."""
        offsets = log_epochs - np.log1p(batch / math.exp(log_critical))
        return float(((offsets - offsets.mean()) ** 2).sum()), float(offsets.mean())

    # The critical batch is sought between a hundredth of the smallest batch and a thousand times the largest: by a
    # grid, then by ternary search between its best points.
    low, high = math.log(batch.min() / 100), math.log(batch.max() * 1000)
    grid = np.linspace(low, high, 400)
    at = int(np.argmin([fit_least(one)[0] for one in grid]))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    for _ in range(60):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if fit_least(first)[0] < fit_least(second)[0] else (first, high)
    squares, log_least = fit_least((low + high) / 2)
    error = math.sqrt(squares / len(points))
    critical = math.exp((low + high) / 2)
    known = len(set(batch.tolist())) > 2 or error > EXACT_FIT
    return EpochsLaw(math.exp(log_least), critical, float(batch.min()), float(batch.max()), error if known else None)


def interpolate_epochs(points: Sequence[ConvergencePoint]) -> EpochsLaw:
    """Fits the law, and follows the points between them: for measurements of one kind that cover a range.

    Its error is that of predictions of each inner batch without its points.

    Raises UsageError as `fit_epochs` does.
    """
    law = _follow_points(fit_epochs(points), points)
    inner = [one for one in points if law.low < one.batch < law.high]
    off = []
    for one in inner:
        others = [other for other in points if other.batch != one.batch]
        off.append(math.log(_follow_points(fit_epochs(others), others).predict_epochs(one.batch) / one.epochs))
    return replace(law, error=math.sqrt(sum(one**2 for one in off) / len(off)) if off else law.error)


def _follow_points(law: EpochsLaw, points: Sequence[ConvergencePoint]) -> EpochsLaw:
    """Corrects the law at each measured batch, by the mean of its points."""
    epochs: dict[float, list[float]] = {}
    for one in points:
        epochs.setdefault(one.batch, []).append(one.epochs)
    ratios = [(batch, sum(all_) / len(all_) / law.predict_epochs(batch)) for batch, all_ in sorted(epochs.items())]
    return replace(law, corrections=tuple(ratios))


def derive_epochs_law(noise_scale: float, batch: float, epochs: float) -> EpochsLaw:
    """Derives the law from the gradient noise scale, taken as critical batch, and one known batch.

    McCandlish 2018, section 2.3. Raises UsageError if a number is not positive.
    """
    if not (noise_scale > 0 and batch > 0 and epochs > 0):
        raise UsageError("the noise scale, the batch and its epochs must be above 0", where="--noise-scale")
    return EpochsLaw(epochs / (1 + batch / noise_scale), noise_scale, batch, batch, None)


@final
@dataclass(frozen=True)
class LearningRateSuggestion:
    """Learning rate and warm-up for a batch."""

    lr: float
    # Warm-up in epochs.
    warmup: float
    momentum: float
    # Batches of the two points around it.
    between: tuple[float, float]
    # False if the batch is beyond all points.
    inside: bool


def suggest_learning_rate(batch: float, points: Sequence[ConvergencePoint]) -> LearningRateSuggestion | None:
    """Suggests learning rate and warm-up: interpolates between the nearest points, in logarithms.

    Beyond the range of the points, those of the nearest one are returned. None: no point has a learning rate.
    """
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
        )  # fmt: skip
    below, above = next((a, b) for a, b in pairwise(known) if a.batch <= batch <= b.batch)
    # Interpolation in logarithms: of 1 - momentum, since the effective learning rate is lr / (1 - momentum).
    share = math.log(batch / below.batch) / math.log(above.batch / below.batch)

    def interpolate(a: float | None, b: float | None) -> float:
        assert a
        assert b
        return math.exp((1 - share) * math.log(a) + share * math.log(b))

    return LearningRateSuggestion(
        interpolate(below.lr, above.lr),
        interpolate(below.warmup, above.warmup),
        1 - interpolate(1 - (below.momentum or 0.0), 1 - (above.momentum or 0.0)),
        (below.batch, above.batch),
        True,
    )


@cache
def load_official_points() -> tuple[ConvergencePoint, ...]:
    """Loads the official MLPerf runs of ResNet-50 on ImageNet with LARS."""
    return tuple(ConvergencePoint(**one) for one in read_catalog("epochs")["points"])
