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
# "Busy but light": busy for more than the first share, at less than the second share of the power limit.
BUSY_SHARE, LIGHT_POWER_SHARE = 0.9, 0.6
# Spikiness below which a load counts as even.
EVEN_SPIKINESS = 0.1

Numbers = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """Statistics of a utilisation u(t), 0 to 1, in samples of equal length."""

    # Length of the series, in samples of `spacing_s`.
    seconds: float
    spacing_s: float
    mean: float
    variance: float
    # Share of the samples in which the device was idle.
    idle_share: float
    p10: float
    p50: float
    p90: float
    # Standard deviation over mean; None if the device was never used.
    variation: float | None
    # Sum of |u(t + 1) - u(t)| per second: one swing is from 0 to 1 or back.
    swings_s: float
    # Dips below half of p90 per minute.
    dips_min: float
    # Median length of these dips; None if there are none.
    dip_s: float | None
    # 1 - mean / p90: share of its own plateau that the device loses to dips; 0 for a flat load.
    spikiness: float
    # Lag of the first peak of the autocorrelation; None if there is none.
    period_s: float | None


def summarise_load(values: ArrayLike, spacing_s: float) -> LoadStatistics | None:
    """Summarises a utilisation; None for fewer than 20 samples.

    Args:
        values: [n], 0 to 1.
        spacing_s: Length of each sample in seconds.
    """
    u = np.asarray(values, np.float64)
    if len(u) < MIN_SAMPLES:
        return None
    p10, p50, p90 = (float(value) for value in np.percentile(u, (10, 50, 90)))
    mean, variance, seconds = float(u.mean()), float(u.var()), len(u) * spacing_s
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
    """Finds the period of a series in seconds: the first peak of its autocorrelation after that was below zero.

    None if there is no peak, or none at twice its lag.
    """
    u = np.asarray(values, np.float64)
    n = len(u)
    longest = n // MIN_REPEATS
    centred = u - u.mean()
    if longest < 3 or float(np.ptp(u)) < 1e-6:
        return None
    power = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    sums = np.fft.irfft(power)[: 2 * longest + 2]
    # Each lag is normalised by its number of pairs, so that long lags are not damped.
    correlation = sums / (n - np.arange(len(sums))) / (sums[0] / n)
    below = np.flatnonzero(correlation < 0)
    bound = max(MIN_CORRELATION, 4 / math.sqrt(n))
    for lag in range(int(below[0]) + 1 if len(below) else n, longest + 1):
        if correlation[lag] > bound and correlation[lag - 1] <= correlation[lag] > correlation[lag + 1]:
            # A true period has a second peak at twice the lag; both together give its length.
            again = 2 * lag - 1 + int(np.argmax(correlation[2 * lag - 1 : 2 * lag + 2]))
            if correlation[again] > bound:
                return (_interpolate_peak(correlation, lag) + _interpolate_peak(correlation, again)) / 3 * spacing_s
    return None


def match_intervals(period_s: float, intervals: Mapping[str, float]) -> list[str]:
    """Returns the names of the intervals, in seconds, that a period matches."""
    return [name for name, seconds in intervals.items() if abs(period_s - seconds) <= INTERVAL_TOLERANCE * seconds]


def is_busy_but_light(busy: float, power_w: float, power_limit_w: float) -> bool:
    """Returns True if a GPU always runs a kernel but draws little power: its kernels are small or wait for memory.

    High utilisation is then no sign of good use.
    """
    return busy > BUSY_SHARE and power_w < LIGHT_POWER_SHARE * power_limit_w


def resample(seconds: ArrayLike, values: ArrayLike) -> tuple[float, Numbers]:
    """Resamples readings to (spacing in seconds, samples of equal length); each reading holds since the one before.

    Args:
        seconds: [n] end of each reading. One that is not later than all before it is a repetition, and left out.
        values: [n] readings; NaN is left out.
    """
    at, read = np.asarray(seconds, np.float64), np.asarray(values, np.float64)
    known = np.isfinite(read)
    at, read = at[known], read[known]
    later = np.concatenate([[True], at[1:] > np.maximum.accumulate(at)[:-1]]) if len(at) else np.zeros(0, bool)
    at, read = at[later], read[later]
    if len(at) < 2:
        return 0.0, read
    whole_s = float(at[-1] - at[0])
    count = max(1, round(whole_s / float(np.median(np.diff(at)))))
    middles = at[0] + (np.arange(count) + 0.5) * whole_s / count
    return whole_s / count, read[np.searchsorted(at, middles)]


def describe_load(load: LoadStatistics, wait_share: float) -> str:
    """Explains the spikiness, given the share of time in which the loop waited for data."""
    spiky = f"The spikiness is {load.spikiness:.0%}, and the loop waits for data {wait_share:.0%} of the time"
    if load.spikiness < EVEN_SPIKINESS and wait_share < EVEN_SPIKINESS:
        return f"{spiky}: the load is even."
    if load.spikiness < EVEN_SPIKINESS:
        return (
            f"{spiky}: the load is even over samples of {load.spacing_s:.2g} s, so the waits are shorter than that, "
            "or other work fills them; the mean then says more."
        )
    # About as much: within a third, or five points.
    if abs(load.spikiness - wait_share) <= max(EVEN_SPIKINESS / 2, load.spikiness / 3):
        return f"{spiky}, which is about as much: the dips come from the input. Faster input would fill them."
    if wait_share < load.spikiness:
        return (
            f"{spiky}, which is less: most dips do not come from the input, but from evaluations, checkpoints, other "
            "programs, host-device syncs, or kernels that are launched too late."
        )
    return f"{spiky}, which is more: some waits are shorter than a sample of {load.spacing_s:.2g} s."


def _measure_runs(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Measures the lengths of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return edges[1::2] - edges[::2]


def _interpolate_peak(values: Numbers, place: int) -> float:
    """Interpolates a peak: the place of the maximum of the parabola through it and its neighbours."""
    before, here, after = (float(value) for value in values[place - 1 : place + 2])
    bend = before - 2 * here + after
    return place if bend >= 0 else place + min(0.5, max(-0.5, 0.5 * (before - after) / bend))
