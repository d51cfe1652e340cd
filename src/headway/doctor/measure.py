"""Rates that are measured until they are known: windows up to an interval of 3 %, or a limit of time."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headway.core.profile import Rate
from headway.core.statistics import median_interval

TOLERANCE = 0.03
"""Half the interval, over the median."""
LIMIT_S = 6.0
"""Of one measurement."""
LEAST_WINDOWS, LEAST_WINDOW_S = 5, 0.1
"""Of fewer windows the interval says nothing; a shorter one measures the machine's hiccups."""


def settled(window: Callable[[], float], *, limit_s: float = LIMIT_S) -> Rate:
    """Calls `window`, which gives images/s, until the median is known to 3 % or the time is up; three times at least,
    or twice, where one takes half of the time.

    Args:
        limit_s: no window begins after it.
    """
    found, begun = list[float](), perf_counter()
    while True:
        found.append(window())
        middle, low, high = median_interval(found)
        known = len(found) >= LEAST_WINDOWS and high - low <= 2 * TOLERANCE * middle
        spent = perf_counter() - begun
        least = 2 if spent >= len(found) * limit_s / 2 else 3
        if known or (len(found) >= least and spent >= limit_s):
            return Rate(value=middle, low=low, high=high, windows=len(found))


def timed(work: Callable[[], int], *, least_s: float = LEAST_WINDOW_S) -> Callable[[], float]:
    """A window over calls of `work`, which gives the images it dealt with: so many as take `least_s`."""

    def window() -> float:
        images, begun = 0, perf_counter()
        while True:
            images += work()
            if (seconds := perf_counter() - begun) >= least_s:
                return images / seconds

    return window
