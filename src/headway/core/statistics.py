"""Statistics that several rooms need; too few to depend on SciPy for them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def compute_student_t(freedom: int) -> float:
    """Returns the 97.5 % point of Student's t: a table to 30, then Cornish-Fisher (error below 1e-4)."""
    table = (
        12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
        2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
        2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
    )  # fmt: skip
    if freedom <= len(table):
        return table[freedom - 1]
    # The 97.5 % point of the normal distribution, and the first two terms of the expansion in 1 / freedom.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def compute_median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (median, low, high) with the 95 % interval of the median by order statistics (binomial, p = 1/2)."""
    # Fewer than six values have no 95 % interval: their smallest and largest come instead.
    ordered, n = sorted(values), len(values)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach) - 1)
    return statistics.median(ordered), ordered[low], ordered[max(low, high)]


def compute_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the half width of its 95 % interval by Student's t; for one value the half width is NaN."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, compute_student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def compute_share_difference(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float, float]:
    """Returns (difference, low, high) of two shares with its 95 % interval, from independent samples of any size.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10, from
    the intervals of Wilson 1927.

    Args:
        a, b: (count, total), a total of 1 or more; the difference is that of `a` less that of `b`.
    """
    (p, p_low, p_high), (q, q_low, q_high) = _compute_wilson_interval(*a), _compute_wilson_interval(*b)
    low = p - q - math.hypot(p - p_low, q_high - q)
    high = p - q + math.hypot(p_high - p, q - q_low)
    return p - q, low, high


def _compute_wilson_interval(count: int, total: int) -> tuple[float, float, float]:
    """Returns (share, low, high) with the 95 % interval of the share."""
    z, share = 1.959964, count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # Rounding may leave the ends a little outside of what is possible, or inside of the share.
    return share, min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def compute_rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation of pairs, from -1 to 1; equal values share the mean of their ranks.

    None: there are fewer than two pairs, or all values of one side are equal.
    """
    ranks = [_rank(values) for values in (x, y)]
    if len(x) < 2 or any(len(set(one)) == 1 for one in ranks):
        return None
    return statistics.correlation(*ranks)


def _rank(values: Sequence[float]) -> list[float]:
    # With n smaller and m equal values, itself among them, the mean of the ranks n + 1, ..., n + m is n + (m + 1) / 2.
    return [sum(one < value for one in values) + (values.count(value) + 1) / 2 for value in values]
