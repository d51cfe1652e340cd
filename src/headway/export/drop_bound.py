"""Upper bounds of how much an export is worse than its run, from samples that both have answered."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.core.statistics import compute_student_t

CONFIDENCE = 0.95
# Each halving adds a binary digit. 60 of them are more than float64 resolves.
BISECTIONS = 60


def compute_share_bound(count: int, total: int, confidence: float) -> float:
    """Returns the upper bound of a share of which `count` in `total` were seen.

    It is the exact one of Clopper and Pearson (1934): the share at which so few would be seen with a probability of
    1 - confidence. It is above 0 even if none was seen.
    """
    if count >= total:
        return 1.0
    below = np.arange(1, count + 1, dtype=np.float64)
    # Logarithms of the binomial coefficients of 0, 1, ..., count.
    log_coefficients = np.concatenate([[0.0], np.cumsum(np.log((total - below + 1) / below))])
    seen = np.arange(count + 1)
    low, high = count / total, 1.0
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        # log1p(-1) is -inf, which `high` never reaches but in the last digit.
        if share >= 1:
            break
        terms = log_coefficients + seen * math.log(share) + (total - seen) * math.log1p(-share)
        is_likely = np.exp(terms).sum() > 1 - confidence
        low, high = (share, high) if is_likely else (low, share)
    return high


def compute_flip_bound(lost: int, won: int, total: int) -> float:
    """Returns the upper 95 % bound of the drop of accuracy, as a share of the samples.

    Both networks have answered the same samples, so only those count on which one of them is right. The share of lost
    ones and that of won ones are bounded with 97.5 % each; so both bounds hold with 95 % or more, whatever the two
    networks have in common (Bonferroni).

    Args:
        lost: samples on which only the run is right.
        won: samples on which only the export is right.
    """
    each = 1 - (1 - CONFIDENCE) / 2
    least_won = 1 - compute_share_bound(total - won, total, each)
    return compute_share_bound(lost, total, each) - least_won


def compute_mean_bound(drops: NDArray[np.float64]) -> float:
    """Returns the upper end of the 95 % interval of a mean by Student's t; infinite for a single sample.

    Args:
        drops: score of the run less that of the export, for each sample.
    """
    if len(drops) < 2:
        return math.inf
    # Sorted, because a sum of floats depends on its order, and samples have none.
    drops = np.sort(drops)
    return float(drops.mean() + compute_student_t(len(drops) - 1) * drops.std(ddof=1) / math.sqrt(len(drops)))
