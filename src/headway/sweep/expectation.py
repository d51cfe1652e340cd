"""The best score that random search can expect of a number of full trainings, from the trials of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headway.core.random_keys import draw_uniform, make_keys
from headway.sweep.state import State, list_scores


def compute_expected_best(scores: Sequence[float], most: int, *, higher_is_better: bool = True) -> list[float]:
    """Returns the expected best of 1, 2, ..., `most` scores drawn without replacement.

    Of n scores, the i-th one in ascending order is the largest of m draws with probability C(i-1, m-1) / C(n, m), so
    these are U-statistics: without bias for scores that are independent draws.

    Args:
        most: at most as many as there are scores.
    """
    sign = 1.0 if higher_is_better else -1.0
    # The best one first.
    ordered, count = -np.sort(-sign * np.asarray(scores, np.float64)), len(scores)
    expected = []
    for draws in range(1, most + 1):
        # The best is drawn with probability m / n, and each next one is the best of the draws with (i - m + 1) / i of
        # that of the one before, where i scores are below it.
        below = np.arange(count - 1, 0, -1)
        ratios = np.maximum(below - draws + 1, 0) / below
        chances = draws / count * np.concatenate([[1.0], np.cumprod(ratios)])
        expected.append(float(sign * (chances @ ordered)))
    return expected


def extrapolate_scores(state: State, seed: int = 0) -> list[float]:
    """Returns a plausible score after a full training for each trial of a sweep, in the order of their numbers.

    A trial that stopped at a rung goes on to the next one by the least-squares line through those that did, with the
    residual of one of them at random (stochastic regression imputation), or by their mean gain if fewer than three did.
    It gets there no better than the best of them, and no worse than it was. Failed trials have the worst score of all.

    Args:
        seed: draws the residuals. Without them all would lie on the line, and the best of many would be too low.
            Average over several seeds what you compute of the scores.
    """
    sign = 1.0 if state.plan.higher_is_better else -1.0
    # Floats, as the hash of a Fraction takes long.
    levels = sorted({float(level) for bracket in state.plan.brackets for level in bracket.levels})
    # By level, not by rung: the brackets of hyperband have different ones.
    reached = [{float(level): sign * score for level, score in list_scores(state, trial)} for trial in state.trials]
    known = [score for scores in reached for score in scores.values()]
    if not known:
        return []
    for place, (level, following) in enumerate(pairwise(levels)):
        pairs = [(scores[level], scores[following]) for scores in reached if level in scores and following in scores]
        if not pairs:
            continue
        chances = draw_uniform(make_keys(seed, place, np.arange(len(reached))), 0)
        slope, intercept, residuals = _fit_line(pairs)
        most = max(after for _, after in pairs)
        for scores, chance in zip(reached, chances.tolist(), strict=True):
            if level in scores and following not in scores:
                line = intercept + slope * scores[level] + residuals[int(chance * len(residuals))]
                scores[following] = max(scores[level], min(line, most))
    return [sign * (scores[max(scores)] if scores else min(known)) for scores in reached]


def _fit_line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, list[float]]:
    """Returns slope, intercept and residuals of a line that does not fall."""
    before, after = np.array(pairs).T
    if len(pairs) < 3 or np.ptp(before) == 0:
        return 1.0, float((after - before).mean()), [0.0]
    centred = before - before.mean()
    slope = max(0.0, float(centred @ after / (centred @ centred)))
    intercept = float(after.mean() - slope * before.mean())
    return slope, intercept, (after - intercept - slope * before).tolist()
