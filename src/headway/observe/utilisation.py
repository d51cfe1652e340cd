"""Statistics of a device's utilisation over time, and their meaning next to the waiting for data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A sample counts as idle if it is busy for a smaller share than this.
IDLE_SHARE = 0.05
# Fewer samples say nothing; 20 are ten seconds of readings.
MIN_SAMPLES = 20
# Lowest autocorrelation of a period, or four standard deviations of white noise if these are more.
MIN_CORRELATION = 0.25
# Times that a period has to fit into the series.
MIN_REPEATS = 4
# A period matches an interval if it differs by at most this share of it.
INTERVAL_TOLERANCE = 0.1
# A GPU is "busy but light" if it is busy for more than this share of the time,
BUSY_SHARE = 0.9
# and draws less than this share of its power limit.
LIGHT_POWER_SHARE = 0.6
# Spikiness below which a load counts as even.
EVEN_SPIKINESS = 0.1

FloatArray = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """Statistics of a utilisation u(t), 0 to 1, in samples of equal length.

    Attributes:
        seconds: Length of the series in seconds.
        spacing_s: Length of a sample in seconds.
        mean: Mean of u.
        variance: Variance of u.
        idle_share: Share of the samples in which the device was idle.
        p10: 10th percentile of u.
        p50: Median of u.
        p90: 90th percentile of u.
        variation: Standard deviation over mean; None if the device was never used.
        swings_s: Sum of |u(t + 1) - u(t)| per second: one swing is from 0 to 1 or back.
        dips_min: Dips below half of p90 per minute.
        dip_s: Median length of these dips in seconds; None if there are none.
        spikiness: 1 - mean / p90: share of its own plateau that the device loses to dips; 0 for a flat load.
        period_s: Lag of the first peak of the autocorrelation in seconds; None if there is none.
    """

    seconds: float
    spacing_s: float
    mean: float
    variance: float
    idle_share: float
    p10: float
    p50: float
    p90: float
    variation: float | None
    swings_s: float
    dips_min: float
    dip_s: float | None
    spikiness: float
    period_s: float | None


def summarise_load(values: ArrayLike, spacing_s: float) -> LoadStatistics | None:
    """Returns the statistics of a utilisation; None for fewer than 20 samples.

    Args:
        values: [n], 0 to 1.
        spacing_s: Length of each sample in seconds.
    """
    u = np.asarray(values, np.float64)
    if len(u) < MIN_SAMPLES:
        return None
    p10, p50, p90 = (float(value) for value in np.percentile(u, (10, 50, 90)))
    mean, variance = float(u.mean()), float(u.var())
    seconds = len(u) * spacing_s
    dips = _measure_runs(u < p90 / 2)
    return LoadStatistics(
        seconds=seconds,
        spacing_s=spacing_s,
        mean=mean,
        variance=variance,
        idle_share=float((u < IDLE_SHARE).mean()),
        p10=p10,
        p50=p50,
        p90=p90,
        variation=math.sqrt(variance) / mean if mean > 0 else None,
        swings_s=float(np.abs(np.diff(u)).sum()) / (seconds - spacing_s),
        dips_min=60 * len(dips) / seconds,
        dip_s=float(np.median(dips)) * spacing_s if len(dips) else None,
        spikiness=max(0.0, 1 - mean / p90) if p90 > 0 else 0.0,
        period_s=find_period(u, spacing_s),
    )


def find_period(values: ArrayLike, spacing_s: float) -> float | None:
    """Returns the period of a series in seconds: the first peak of its autocorrelation after that was below zero.

    None if there is no peak, or none at twice its lag.

    Args:
        values: [n], 0 to 1.
        spacing_s: Length of each sample in seconds.
    """
    u = np.asarray(values, np.float64)
    n = len(u)
    max_lag = n // MIN_REPEATS
    centred = u - u.mean()
    if max_lag < 3 or float(np.ptp(u)) < 1e-6:
        return None
    # Padded with zeros to 2 n, as the correlation would be circular otherwise.
    power = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    sums = np.fft.irfft(power)[: 2 * max_lag + 2]
    # Each lag is normalised by its number of pairs, so that long lags are not damped.
    correlation = sums / (n - np.arange(len(sums))) / (sums[0] / n)
    negative_lags = np.flatnonzero(correlation < 0)
    bound = max(MIN_CORRELATION, 4 / math.sqrt(n))
    for lag in range(int(negative_lags[0]) + 1 if len(negative_lags) else n, max_lag + 1):
        if correlation[lag] > bound and correlation[lag - 1] <= correlation[lag] > correlation[lag + 1]:
            # A true period has a second peak at twice the lag; both together give its length.
            second_lag = 2 * lag - 1 + int(np.argmax(correlation[2 * lag - 1 : 2 * lag + 2]))
            if correlation[second_lag] > bound:
                return (
                    (_interpolate_peak(correlation, lag) + _interpolate_peak(correlation, second_lag)) / 3 * spacing_s
                )
    return None


def match_intervals(period_s: float, intervals: Mapping[str, float]) -> list[str]:
    """Returns the names of the intervals, in seconds, that a period matches."""
    return [name for name, seconds in intervals.items() if abs(period_s - seconds) <= INTERVAL_TOLERANCE * seconds]


def is_busy_but_light(busy: float, power_w: float, power_limit_w: float) -> bool:
    """Returns True if a GPU always runs a kernel but draws little power: its kernels are small or wait for memory.

    High utilisation is then no sign of good use.
    """
    return busy > BUSY_SHARE and power_w < LIGHT_POWER_SHARE * power_limit_w


def resample(seconds: ArrayLike, values: ArrayLike) -> tuple[float, FloatArray]:
    """Resamples readings to samples of equal length; each reading holds since the previous one.

    Args:
        seconds: [n] end of each reading. One that is not later than all before it is a repetition, and left out.
        values: [n] readings; NaN is left out.

    Returns:
        The length of a sample in seconds, and the samples. With fewer than two readings the length is 0.
    """
    end_s, readings = np.asarray(seconds, np.float64), np.asarray(values, np.float64)
    is_finite = np.isfinite(readings)
    end_s, readings = end_s[is_finite], readings[is_finite]
    is_later = (
        np.concatenate([[True], end_s[1:] > np.maximum.accumulate(end_s)[:-1]]) if len(end_s) else np.zeros(0, bool)
    )
    end_s, readings = end_s[is_later], readings[is_later]
    if len(end_s) < 2:
        return 0.0, readings
    total_s = float(end_s[-1] - end_s[0])
    count = max(1, round(total_s / float(np.median(np.diff(end_s)))))
    middles = end_s[0] + (np.arange(count) + 0.5) * total_s / count
    return total_s / count, readings[np.searchsorted(end_s, middles)]


def describe_load(statistics: LoadStatistics, wait_share: float) -> str:
    """Returns a sentence on the spikiness, given the share of time in which the loop waited for data."""
    comparison = (
        f"The spikiness is {statistics.spikiness:.0%}, and the loop waits for data {wait_share:.0%} of the time"
    )
    if statistics.spikiness < EVEN_SPIKINESS and wait_share < EVEN_SPIKINESS:
        return f"{comparison}: the load is even."
    if statistics.spikiness < EVEN_SPIKINESS:
        return (
            f"{comparison}: the load is even over samples of {statistics.spacing_s:.2g} s, so the waits are shorter "
            "than that, or other work fills them; the mean then says more."
        )
    # About as much: within a third, or five points.
    if abs(statistics.spikiness - wait_share) <= max(EVEN_SPIKINESS / 2, statistics.spikiness / 3):
        return f"{comparison}, which is about as much: the dips come from the input. Faster input would fill them."
    if wait_share < statistics.spikiness:
        return (
            f"{comparison}, which is less: most dips do not come from the input, but from evaluations, checkpoints, "
            "other programs, host-device syncs, or kernels that are launched too late."
        )
    return f"{comparison}, which is more: some waits are shorter than a sample of {statistics.spacing_s:.2g} s."


def _measure_runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the lengths of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges[1::2] - edges[::2]


def _interpolate_peak(values: FloatArray, index: int) -> float:
    """Returns the fractional index of a peak: the maximum of the parabola through it and its neighbours."""
    left, center, right = (float(value) for value in values[index - 1 : index + 2])
    curvature = left - 2 * center + right
    return index if curvature >= 0 else index + min(0.5, max(-0.5, 0.5 * (left - right) / curvature))
