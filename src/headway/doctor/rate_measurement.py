"""Measures rates in windows until the interval of the median is within 3 %, or the time is up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from time import perf_counter

from headway.core.cgroups import find_cgroups, read_quota_cores
from headway.core.cpu_count import list_usable_cpus
from headway.core.profile import Throughput
from headway.core.statistics import compute_median_interval

# Half the interval divided by the median.
TOLERANCE = 0.03
# Of one measurement.
LIMIT_S = 6.0
# Fewer windows give no useful interval; shorter windows mostly measure the machine's noise.
LEAST_WINDOWS, LEAST_WINDOW_S = 5, 0.1
# A CPU quota throttles all threads once per 0.1 s: a window must contain several such periods.
LEAST_WITH_QUOTA_S = 0.5


def measure_rate(window: Callable[[], float], *, limit_s: float = LIMIT_S) -> Throughput:
    """Calls `window`, which returns images/s, until the median is known to 3 % or the time is up.

    It is called at least three times, or twice if one call takes half of the time.

    Args:
        limit_s: no window begins after it.
    """
    rates, begun = list[float](), perf_counter()
    while True:
        rates.append(window())
        spent = perf_counter() - begun
        least = 2 if spent >= len(rates) * limit_s / 2 else 3
        if is_settled(rates) or (len(rates) >= least and spent >= limit_s):
            middle, low, high = compute_median_interval(rates)
            return Throughput(value=middle, low=low, high=high, windows=len(rates))


def is_settled(rates: Sequence[float]) -> bool:
    """Returns True if the median is known to 3 %."""
    middle, low, high = compute_median_interval(rates)
    return len(rates) >= LEAST_WINDOWS and high - low <= 2 * TOLERANCE * middle


@functools.cache
def choose_window_s() -> float:
    """Returns the shortest useful window on this machine."""
    quotas = [read_quota_cores(folder) for folder in find_cgroups("cpu")]
    limited = any(quota is not None and quota < len(list_usable_cpus()) for quota in quotas)
    return LEAST_WITH_QUOTA_S if limited else LEAST_WINDOW_S


def build_window(work: Callable[[], int], *, least_s: float | None = None) -> Callable[[], float]:
    """Builds a window that calls `work` (which returns its images) for `least_s`; None: the shortest useful time
    here."""
    least = choose_window_s() if least_s is None else least_s

    def run_window() -> float:
        images, begun = 0, perf_counter()
        while True:
            images += work()
            if (seconds := perf_counter() - begun) >= least:
                return images / seconds

    return run_window
