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
MIN_DELAY = 0.05

Numbers = NDArray[np.float64]


@final
@dataclass(frozen=True)
class RecurringPattern:
    """Large values that recur every `period` places."""

    period: int
    # Position of the large values in the period.
    phase: int
    # Median of these values.
    large: float
    # Median of all others.
    rest: float
    # Probability of the pattern if nothing recurs.
    p_value: float


@final
@dataclass(frozen=True)
class Drift:
    """A trend of a series."""

    # Change from start to end by the Theil-Sen slope, relative to the median.
    change: float
    # Two-sided p-value of the Mann-Kendall test.
    p_value: float


@final
@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for."""

    # Rank that is the slowest in most windows.
    rank: int
    # Share of the windows in which it is the slowest.
    share: float
    # Mean delay of each window's slowest rank against the median of the others, as a share of a step.
    behind: float
    # True if it is the same rank in more windows than chance explains; None if there are too few windows.
    always: bool | None


def find_recurring(
    values: ArrayLike, period: int, places: ArrayLike | None = None, *, tried: int = 1
) -> RecurringPattern | None:
    """Tests if every `period`-th value is large, by the rank sum at the phase with the largest values.

    Args:
        places: Position of each value; default: 0, 1, 2, ...
        tried: Number of periods that are tested in all; the p-value counts all of them, and all phases.
    """
    series = np.asarray(values, np.float64)
    at = (np.arange(len(series)) if places is None else np.asarray(places, np.int64)) % max(period, 1)
    if period < 2 or len(series) < MIN_CYCLES * period:
        return None
    ranks = _rank_values(series)
    counts = np.bincount(at, minlength=period)
    means = np.bincount(at, ranks, minlength=period) / np.maximum(counts, 1)
    phase = int(np.argmax(means))
    here = at == phase
    size, others = int(counts[phase]), len(series) - int(counts[phase])
    if size < MIN_CYCLES or not others:
        return None
    # Variance of a mean rank, drawn without replacement from these ranks; this includes ties.
    variance = float(ranks.var()) / size * others / (len(series) - 1)
    if variance <= 0:
        return None
    p_value = _compute_normal_tail((float(means[phase]) - float(ranks.mean())) / math.sqrt(variance)) * period * tried
    large, rest = series[here], float(np.median(series[~here]))
    quartile = float(np.percentile(large, 25))
    if p_value >= MAX_CHANCE or quartile <= 0 or quartile < LARGE_RATIO * rest:
        return None
    return RecurringPattern(period, phase, float(np.median(large)), rest, p_value)


def find_worker_period(waits: ArrayLike, places: ArrayLike, workers: int | None = None) -> RecurringPattern | None:
    """Finds waits that are long for every W-th batch, a sign that W loader workers together are too slow.

    W workers deliver a batch each at about the same time, and then the loop waits for the next W.

    Args:
        waits: Seconds of each wait.
        places: Position of each batch in its epoch.
        workers: Number of workers; None: the smallest number from 2 to 64 that fits.
    """
    if workers is not None:
        return find_recurring(waits, workers, places)
    periods = range(2, MAX_WORKERS + 1)
    found = (find_recurring(waits, period, places, tried=len(periods)) for period in periods)
    return next((one for one in found if one is not None), None)


def find_period(values: ArrayLike) -> RecurringPattern | None:
    """Finds the shortest period of large values, by autocorrelation.

    Values are clipped at ten median deviations above the median, so that two hiccups do not look like a period.
    """
    series = np.asarray(values, np.float64)
    n = len(series)
    longest = n // MIN_CYCLES
    if longest < 2:
        return None
    middle = float(np.median(series))
    spread = float(np.median(np.abs(series - middle)))
    cut = np.minimum(series, middle + 10 * spread) if spread > 0 else (series > middle).astype(np.float64)
    cut = cut - cut.mean()
    power = np.abs(np.fft.rfft(cut, 2 * n)) ** 2
    correlation = np.fft.irfft(power)[: longest + 2]
    if correlation[0] <= 0:
        return None
    correlation = correlation / correlation[0]
    # In white noise each correlation has the deviation 1 / sqrt(n); the bound holds for all lags together.
    bound = _find_normal_quantile(MAX_CHANCE / longest) / math.sqrt(n)
    tried = 0
    for lag in range(2, longest + 1):
        before, here, after = correlation[lag - 1 : lag + 2]
        if here > bound and here >= before and here >= after:
            tried += 1
            if found := find_recurring(series, lag, tried=tried):
                return found
    return None


def match_interval(period: int, known: Mapping[str, int]) -> str | None:
    """Returns the name of the known interval that matches a period to 2 % or one step; None if there is none."""
    near = {name: abs(steps - period) for name, steps in known.items() if abs(steps - period) <= max(1, 0.02 * steps)}
    return min(near, key=lambda name: near[name], default=None)


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
    rises = series[second] - series[first]
    score = float(np.sign(rises).sum())
    _, ties = np.unique(series, return_counts=True)
    # Tied values lower the variance of the score.
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    middle = float(np.median(series))
    if variance <= 0:
        return Drift(0.0, 1.0)
    p_value = min(1.0, 2 * _compute_normal_tail(max(0.0, abs(score) - 1) / math.sqrt(variance)))
    slope = float(np.median(rises / (second - first)))
    return Drift(slope * (n - 1) / middle if middle > 0 else 0.0, p_value)


def find_slow_rank(own: ArrayLike, step: float) -> SlowRank | None:
    """Finds the rank that the others wait for; None if no rank is behind by 5 % of a step.

    Args:
        own: [windows, ranks] seconds per step of each rank's own work, without waiting for others.
        step: Seconds of a step.
    """
    times = np.asarray(own, np.float64)
    if times.ndim != 2 or times.shape[1] < 2 or not len(times) or step <= 0:
        return None
    windows, ranks = times.shape
    slowest = times.argmax(1)
    others = np.array([np.median(np.delete(row, place)) for row, place in zip(times, slowest, strict=True)])
    behind = float((times.max(1) - others).mean()) / step
    if behind < MIN_DELAY:
        return None
    counts = np.bincount(slowest, minlength=ranks)
    rank = int(counts.argmax())
    often = int(counts[rank])
    # With very few windows even the same rank in all of them could be chance.
    if ranks * _compute_binomial_tail(windows, windows, 1 / ranks) >= MAX_CHANCE:
        always = None
    else:
        always = often > windows / 2 and ranks * _compute_binomial_tail(often, windows, 1 / ranks) < MAX_CHANCE
    return SlowRank(rank, often / windows, behind, always)


def estimate_share(part: Sequence[float] | Numbers, whole: Sequence[float] | Numbers) -> tuple[float, float, float]:
    """Estimates (share, low, high) of sum(part) / sum(whole), with two standard errors on either side.

    The errors are from a jackknife over ten pieces, because neighbouring steps are not independent. NaN bounds for
    fewer than ten values.
    """
    parts, wholes = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    total = float(wholes.sum())
    if total <= 0:
        return math.nan, math.nan, math.nan
    share, pieces = float(parts.sum()) / total, 10
    if len(parts) < pieces:
        return share, math.nan, math.nan
    without = [
        (parts.sum() - one.sum()) / max(total - float(other.sum()), 1e-12)
        for one, other in zip(np.array_split(parts, pieces), np.array_split(wholes, pieces), strict=True)
    ]
    error = math.sqrt((pieces - 1) / pieces * float(((np.array(without) - np.mean(without)) ** 2).sum()))
    return share, max(0.0, share - 2 * error), min(1.0, share + 2 * error)


def _rank_values(values: Numbers) -> Numbers:
    """Ranks values as 1, 2, 3, ...; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: Any = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse.reshape(-1)], np.float64)


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
    ways = [math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1) for k in range(hits, tries + 1)]
    yes, no = math.log(chance), math.log1p(-chance)
    return sum(math.exp(way + k * yes + (tries - k) * no) for k, way in enumerate(ways, hits))
