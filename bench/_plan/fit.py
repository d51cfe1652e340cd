"""Likely losses of a step, by published runs: medians over series of runs, and how much the series differ.

Expectation and maximisation in turns (Dempster, Laird and Rubin 1977): the losses of each series are calibrated by all
of its runs, with the medians and spreads of the round before as priors; then these follow the series, each as much as
its runs tell about that loss. Before any run counts, what data sheets promise weighs as much as `WEIGHT` series.

`python -m bench._plan.fit` fits all series and prints what src/headway/plan/catalog/losses.yaml has of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench._plan.scaling import Row, calibrate_rows, predicted, rows
from headway.plan.calibration import Calibration
from headway.plan.losses import LossPriors, build_priors
from headway.plan.sensitivity import Z_90

WEIGHT = 16
"""Series that the first guess weighs as much as. From 5 to 16, the median error of the later rows goes from 0.036 to
0.051, and that of the first ones from 0.08 to 0.057."""
GUESS: dict[str, Any] = {
    "fixed": [1.0, 0.5], "contention": [0.005, 0.8], "jitter": [0.005, 0.7], "inside": [1.0, 0.4],
    "between": [1.0, 0.3], "hidden": [0.5, 1.5], "band": 1.0,
}  # fmt: skip
"""Rates of the data sheets, half of the exchange hidden: [median, spread]."""
LOSSES = ("fixed", "contention", "jitter", "inside", "between", "hidden")
ROUNDS = 12
FAR, FARTHEST = 1.5, 2.5
"""Spreads from the median beyond which a series counts less, and beyond which its distance does not grow."""


def folds(found: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Two halves, no publication's machine in both: of either set, the groups in the order of the file by turns."""
    halves: tuple[list[Row], list[Row]] = ([], [])
    for name in ("first", "second"):
        groups = list(dict.fromkeys(one.group for one in found if one.set == name))
        for one in found:
            if one.set == name:
                halves[groups.index(one.group) % 2].append(one)
    return halves


def fit_losses(found: Sequence[Row]) -> dict[str, Any]:
    """The entries of the catalog, by the series with several runs among these rows."""
    by_series: dict[str, list[Row]] = {}
    for one in found:
        if one.images_s is not None:
            by_series.setdefault(one.series, []).append(one)
    several = [series for series in by_series.values() if len(series) > 1]
    entries = dict(GUESS)
    for _ in range(ROUNDS):
        priors = build_priors(entries)
        entries |= _maximise(priors, [calibrate_rows(series, priors) for series in several])
    priors = build_priors(entries)
    guesses = [predicted(one, priors) for one in found if one.role == "predict"]
    surprises = [one.surprise for one in guesses if one.scored]
    return entries | {"band": float(np.percentile(surprises, 90)) / Z_90}


def _maximise(priors: LossPriors, found: Sequence[Calibration]) -> dict[str, list[float]]:
    """Medians and spreads of the next round."""
    entries = {}
    medians = (priors.fixed, *(getattr(priors.losses, name) for name in LOSSES[1:]))
    for at, (name, median, spread) in enumerate(zip(LOSSES, medians, priors.spreads, strict=True)):
        to, back = (_logit, _share) if name == "hidden" else (math.log, math.exp)
        guess, guess_spread = GUESS[name]
        moved = np.array([one.moved[1 + at] for one in found])
        variance = np.array([one.covariance[1 + at, 1 + at] for one in found])
        # A series tells as much as its runs narrow the loss down; one that is far away tells less.
        told = np.maximum(0.0, 1 - variance / spread**2)
        near = told * np.minimum(1.0, FAR * spread / np.maximum(np.abs(moved), 1e-9))
        here = to(median)
        center = (WEIGHT * to(guess) + (near * (here + moved)).sum()) / (WEIGHT + near.sum())
        squares = np.minimum((here + moved - center) ** 2, (FARTHEST * spread) ** 2) + variance
        wide = (WEIGHT * guess_spread**2 + (told * squares).sum()) / (WEIGHT + told.sum())
        entries[name] = [back(center), math.sqrt(wide)]
    return entries


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _share(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


if __name__ == "__main__":
    for key, value in fit_losses(rows()).items():
        print(f"  {key}: {[float(f'{one:.3g}') for one in value] if key != 'band' else float(f'{value:.3g}')}")
