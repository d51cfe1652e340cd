"""How evenly a device is used: numbers of its utilisation over time, and what they mean beside the waiting for data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

IDLE_SHARE = 0.05
"""Busy for a smaller share of a sample's time: idle."""
MIN_SAMPLES = 20
"""Samples, of which fewer tell nothing: ten seconds of readings."""
MIN_CORRELATION = 0.25
"""Autocorrelation that a period has at least; and four standard deviations of white noise, where these are more."""
MIN_REPEATS = 4
"""Times at least that a period has to have been there."""
INTERVAL_TOLERANCE = 0.1
"""Of an interval: a period that is no further from it is that interval's."""
BUSY_SHARE, LIGHT_POWER_SHARE = 0.9, 0.6
"""Busy for a larger share than that, at a smaller share of the power limit: busy but light."""
EVEN_SPIKINESS = 0.1
"""A spikiness below it is none to speak of."""

Numbers = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """How a device was used: u(t), 0 to 1, in samples of one length.

    Attributes:
        seconds: how long, in samples of `spacing_s`.
        mean, variance, p10, p50, p90: of the samples.
        idle_share: of the samples in which it was idle.
        variation: standard deviation over mean; None where it was never used.
        swings_s: sum of |u(t + 1) - u(t)| over the time: a swing is once from 0 to 1 or back.
        dips_min: times a minute that u fell below half of p90. dip_s: median length of these; None: there were none.
        spikiness: 1 - mean / p90: the share of what it does at its own plateau that dips cost; 0: flat.
        period_s: of the first peak of its autocorrelation; None: it has none.
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
    """The numbers of a utilisation; None of fewer than 20 samples.

    Args:
        values: [n], 0 to 1. spacing_s: seconds that each sample is of.
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
    """Seconds of the first peak of the autocorrelation, once that has been below zero; None where it has none that is
    there again at twice its lag."""
    u = np.asarray(values, np.float64)
    n = len(u)
    longest = n // MIN_REPEATS
    centred = u - u.mean()
    if longest < 3 or float(np.ptp(u)) < 1e-6:
        return None
    power = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    sums = np.fft.irfft(power)[: 2 * longest + 2]
    found = sums / (n - np.arange(len(sums))) / (sums[0] / n)
    below = np.flatnonzero(found < 0)
    bound = max(MIN_CORRELATION, 4 / math.sqrt(n))
    for lag in range(int(below[0]) + 1 if len(below) else n, longest + 1):
        if found[lag] > bound and found[lag - 1] <= found[lag] > found[lag + 1]:
            again = 2 * lag - 1 + int(np.argmax(found[2 * lag - 1 : 2 * lag + 2]))
            if found[again] > bound:
                return (_interpolate_peak(found, lag) + _interpolate_peak(found, again)) / 3 * spacing_s
    return None


def match_intervals(period_s: float, intervals: Mapping[str, float]) -> list[str]:
    """The names of the intervals, in seconds, that a period is near enough to be theirs."""
    return [name for name, seconds in intervals.items() if abs(period_s - seconds) <= INTERVAL_TOLERANCE * seconds]


def is_busy_but_light(busy: float, power_w: float, power_limit_w: float) -> bool:
    """Whether a GPU always has a kernel and yet draws little: its kernels are small, wait for memory, or are few at
    once. To be busy is then no sign that it is used well."""
    return busy > BUSY_SHARE and power_w < LIGHT_POWER_SHARE * power_limit_w


def resample(seconds: ArrayLike, values: ArrayLike) -> tuple[float, Numbers]:
    """(spacing in seconds, samples of one length) of readings that each hold for the time since the one before.

    Args:
        seconds: [n], at the end of each reading; what is not later than all before it was read again, and left out.
        values: [n]; readings that are NaN are left out.
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


def describe_load(found: LoadStatistics, wait_share: float) -> str:
    """What the spikiness says beside the share of the time in which the loop waited for data."""
    spiky = f"The spikiness is {found.spikiness:.0%}, the loop waits for data in {wait_share:.0%} of the time"
    if found.spikiness < EVEN_SPIKINESS and wait_share < EVEN_SPIKINESS:
        return f"{spiky}: the load is even."
    if found.spikiness < EVEN_SPIKINESS:
        return (
            f"{spiky}: the load is even over samples of {found.spacing_s:.2g} s, so what it waits for is shorter than "
            "that, or others work meanwhile; then the mean tells more."
        )
    if abs(found.spikiness - wait_share) <= max(EVEN_SPIKINESS / 2, found.spikiness / 3):
        return f"{spiky}, which is about as much: the dips are the input's. Data that come sooner would fill them."
    if wait_share < found.spikiness:
        return (
            f"{spiky}, which is less: most of the dips are not the input's, but those of evaluations, checkpoints, "
            "other programs, waits of the host for the device, or kernels that are launched too late."
        )
    return f"{spiky}, which is more: some of the waiting is shorter than a sample of {found.spacing_s:.2g} s."


def _measure_runs(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The lengths of the runs of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return edges[1::2] - edges[::2]


def _interpolate_peak(values: Numbers, place: int) -> float:
    """Where the parabola through a peak and its neighbours is highest."""
    before, here, after = (float(value) for value in values[place - 1 : place + 2])
    bend = before - 2 * here + after
    return place if bend >= 0 else place + min(0.5, max(-0.5, 0.5 * (before - after) / bend))
