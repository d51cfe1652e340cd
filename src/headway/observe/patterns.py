"""Patterns in the times of a training loop: periods, drifts, and slow ranks. Pure functions of numbers.

Each test states how likely chance produces such a pattern, over all places that were searched. Ranks and medians are
compared instead of values: a single hiccup of a second is not a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A pattern that chance produces more often is ignored.
MAX_CHANCE = 0.01
# A pattern has to recur at least this many times.
MIN_CYCLES = 4
# Values are large if three quarters of them are at least this many times the median of the others.
LARGE_RATIO = 2.0
MAX_WORKERS = 64
# A drift is searched in medians of this many pieces: Mann-Kendall compares all pairs, and assumes independent values,
# which those of neighbouring steps are not.
DRIFT_PIECES = 64
# Below this many values the normal approximation of Mann-Kendall is off (Gilbert 1987, section 16.4).
MIN_DRIFT_VALUES = 10
# Share of a step. A slowest rank with a smaller delay is not a straggler: one rank is always the slowest.
MIN_DELAY_SHARE = 0.05

FloatArray = NDArray[np.float64]


@final
@dataclass(frozen=True)
class RecurringPattern:
    """Large values that recur every `period` positions.

    Attributes:
        period: Distance of two large values.
        phase: Position of the large values in the period.
        large: Median of these values.
        rest: Median of all others.
        p_value: Probability of the pattern if nothing recurs.
    """

    period: int
    phase: int
    large: float
    rest: float
    p_value: float


@final
@dataclass(frozen=True)
class Drift:
    """A trend of a series.

    Attributes:
        change: Change from start to end by the Theil-Sen slope, relative to the median.
        p_value: Two-sided p-value of the Mann-Kendall test.
    """

    change: float
    p_value: float


@final
@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for.

    Attributes:
        rank: Rank that is the slowest in most windows.
        share: Share of the windows in which it is the slowest.
        behind: Mean delay of each window's slowest rank against the median of the others, as a share of a step.
        always: True if it is the same rank in more windows than chance explains; None if there are too few windows.
    """

    rank: int
    share: float
    behind: float
    always: bool | None


def find_recurring(
    values: ArrayLike, period: int, positions: ArrayLike | None = None, *, num_tests: int = 1
) -> RecurringPattern | None:
    """Tests if every `period`-th value is large, by the rank sum at the phase with the largest values.

    Returns the pattern, or None if chance explains it or the large values are not large enough.

    Args:
        values: The series, [n].
        period: Period to test, at least 2.
        positions: Position of each value, [n]; default: 0, 1, 2, ...
        num_tests: Number of periods that are tested in all. The p-value is corrected for these and for all phases.
    """
    series = np.asarray(values, np.float64)
    phases = (np.arange(len(series)) if positions is None else np.asarray(positions, np.int64)) % max(period, 1)
    if period < 2 or len(series) < MIN_CYCLES * period:
        return None
    ranks = _rank_values(series)
    counts = np.bincount(phases, minlength=period)
    means = np.bincount(phases, ranks, minlength=period) / np.maximum(counts, 1)
    phase = int(np.argmax(means))
    is_large = phases == phase
    num_large = int(counts[phase])
    num_others = len(series) - num_large
    if num_large < MIN_CYCLES or not num_others:
        return None
    # Variance of a mean rank, drawn without replacement from these ranks; this includes ties.
    variance = float(ranks.var()) / num_large * num_others / (len(series) - 1)
    if variance <= 0:
        return None
    p_value = (
        _compute_normal_tail((float(means[phase]) - float(ranks.mean())) / math.sqrt(variance)) * period * num_tests
    )
    large_values = series[is_large]
    rest_median = float(np.median(series[~is_large]))
    quartile = float(np.percentile(large_values, 25))
    if p_value >= MAX_CHANCE or quartile <= 0 or quartile < LARGE_RATIO * rest_median:
        return None
    return RecurringPattern(period, phase, float(np.median(large_values)), rest_median, p_value)


def find_worker_period(waits: ArrayLike, positions: ArrayLike, workers: int | None = None) -> RecurringPattern | None:
    """Returns a pattern if every W-th wait is long, a sign that W loader workers together are too slow.

    W workers deliver a batch each at about the same time, and then the loop waits for the next W.

    Args:
        waits: Seconds of each wait.
        positions: Position of each batch in its epoch.
        workers: Number of workers; None: the smallest number from 2 to 64 that fits.
    """
    if workers is not None:
        return find_recurring(waits, workers, positions)
    periods = range(2, MAX_WORKERS + 1)
    patterns = (find_recurring(waits, period, positions, num_tests=len(periods)) for period in periods)
    # The smallest period counts: its multiples fit too.
    return next((pattern for pattern in patterns if pattern is not None), None)


def find_period(values: ArrayLike) -> RecurringPattern | None:
    """Returns the pattern with the shortest period of large values, by autocorrelation; None if there is none.

    Values are clipped at ten median deviations above the median, so that two hiccups do not look like a period.
    """
    series = np.asarray(values, np.float64)
    n = len(series)
    max_period = n // MIN_CYCLES
    if max_period < 2:
        return None
    series_median = float(np.median(series))
    median_deviation = float(np.median(np.abs(series - series_median)))
    clipped = (
        np.minimum(series, series_median + 10 * median_deviation)
        if median_deviation > 0
        else (series > series_median).astype(np.float64)
    )
    clipped = clipped - clipped.mean()
    # Padded with zeros to 2 n, as the correlation would be circular otherwise.
    power = np.abs(np.fft.rfft(clipped, 2 * n)) ** 2
    correlation = np.fft.irfft(power)[: max_period + 2]
    if correlation[0] <= 0:
        return None
    correlation = correlation / correlation[0]
    # In white noise each correlation has the deviation 1 / sqrt(n); the bound holds for all lags together.
    bound = _find_normal_quantile(MAX_CHANCE / max_period) / math.sqrt(n)
    num_tests = 0
    for lag in range(2, max_period + 1):
        previous, current, following = correlation[lag - 1 : lag + 2]
        if current > bound and current >= previous and current >= following:
            num_tests += 1
            if pattern := find_recurring(series, lag, num_tests=num_tests):
                return pattern
    return None


def match_interval(period: int, intervals: Mapping[str, int]) -> str | None:
    """Returns the name of the interval that matches a period to 2 % or one step; None if there is none."""
    distances = {
        name: abs(steps - period) for name, steps in intervals.items() if abs(steps - period) <= max(1, 0.02 * steps)
    }
    return min(distances, key=lambda name: distances[name], default=None)


def find_drift(values: ArrayLike) -> Drift | None:
    """Tests for a trend by Mann-Kendall on the medians of pieces; None if there are too few values.

    Source: Kendall, Rank Correlation Methods, 1975; Sen 1968 for the slope.
    """
    series = np.asarray(values, np.float64)
    if len(series) < MIN_DRIFT_VALUES:
        return None
    if len(series) > DRIFT_PIECES:
        series = np.array([np.median(piece) for piece in np.array_split(series, DRIFT_PIECES)])
    n = len(series)
    first, second = np.triu_indices(n, 1)
    differences = series[second] - series[first]
    score = float(np.sign(differences).sum())
    _, tie_counts = np.unique(series, return_counts=True)
    # Tied values lower the variance of the score.
    variance = (n * (n - 1) * (2 * n + 5) - float((tie_counts * (tie_counts - 1) * (2 * tie_counts + 5)).sum())) / 18
    series_median = float(np.median(series))
    if variance <= 0:
        return Drift(0.0, 1.0)
    p_value = min(1.0, 2 * _compute_normal_tail(max(0.0, abs(score) - 1) / math.sqrt(variance)))
    slope = float(np.median(differences / (second - first)))
    return Drift(slope * (n - 1) / series_median if series_median > 0 else 0.0, p_value)


def find_slow_rank(compute_s: ArrayLike, step_s: float) -> SlowRank | None:
    """Finds the rank that the others wait for; None if no rank is behind by 5 % of a step.

    Args:
        compute_s: [windows, ranks] seconds of a step of each rank without waiting for other ranks.
        step_s: Seconds of a step.
    """
    seconds = np.asarray(compute_s, np.float64)
    if seconds.ndim != 2 or seconds.shape[1] < 2 or not len(seconds) or step_s <= 0:
        return None
    windows, ranks = seconds.shape
    slowest_ranks = seconds.argmax(1)
    other_medians = np.array(
        [np.median(np.delete(row, rank)) for row, rank in zip(seconds, slowest_ranks, strict=True)]
    )
    delay_share = float((seconds.max(1) - other_medians).mean()) / step_s
    if delay_share < MIN_DELAY_SHARE:
        return None
    counts = np.bincount(slowest_ranks, minlength=ranks)
    rank = int(counts.argmax())
    num_slowest = int(counts[rank])
    # With very few windows even the same rank in all of them could be chance.
    if ranks * _compute_binomial_tail(windows, windows, 1 / ranks) >= MAX_CHANCE:
        is_steady = None
    else:
        is_steady = (
            num_slowest > windows / 2 and ranks * _compute_binomial_tail(num_slowest, windows, 1 / ranks) < MAX_CHANCE
        )
    return SlowRank(rank, num_slowest / windows, delay_share, is_steady)


def estimate_share(
    part: Sequence[float] | FloatArray, whole: Sequence[float] | FloatArray
) -> tuple[float, float, float]:
    """Estimates sum(part) / sum(whole), where `part` is a stage of each step and `whole` the step.

    Returns (share, low, high), with two standard errors on either side from a jackknife over ten pieces, because
    neighbouring steps are not independent. The bounds are NaN for fewer than ten values.
    """
    parts, wholes = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    total = float(wholes.sum())
    if total <= 0:
        return math.nan, math.nan, math.nan
    share = float(parts.sum()) / total
    num_pieces = 10
    if len(parts) < num_pieces:
        return share, math.nan, math.nan
    # Jackknife: the ratio without each piece in turn.
    leave_one_out = [
        (parts.sum() - part_piece.sum()) / max(total - float(whole_piece.sum()), 1e-12)
        for part_piece, whole_piece in zip(
            np.array_split(parts, num_pieces), np.array_split(wholes, num_pieces), strict=True
        )
    ]
    error = math.sqrt(
        (num_pieces - 1) / num_pieces * float(((np.array(leave_one_out) - np.mean(leave_one_out)) ** 2).sum())
    )
    return share, max(0.0, share - 2 * error), min(1.0, share + 2 * error)


def _rank_values(values: FloatArray) -> FloatArray:
    """Ranks values as 1, 2, 3, ...; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks: Any = np.cumsum(counts)
    return np.asarray((last_ranks - (counts - 1) / 2)[inverse.reshape(-1)], np.float64)


def _compute_normal_tail(z: float) -> float:
    """Computes the probability of a standard normal number above z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def _find_normal_quantile(chance: float) -> float:
    """Finds the z that a standard normal number exceeds with this probability, to 1e-9, by bisection."""
    low, high = 0.0, 40.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_normal_tail(middle) > chance else (low, middle)
    return low


def _compute_binomial_tail(hits: int, tries: int, chance: float) -> float:
    """Computes the binomial probability of at least this many hits; 0 < chance < 1."""
    # Logarithms, because the binomial coefficients overflow.
    log_ways = [
        math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1) for k in range(hits, tries + 1)
    ]
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    return sum(math.exp(log_way + k * log_hit + (tries - k) * log_miss) for k, log_way in enumerate(log_ways, hits))
