"""Measurements end when they are known, or when the time is up; fits find what a line was made of."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.statistics import compute_median_interval
from headway.doctor.contention import compute_seconds_per_image
from headway.doctor.loader_measurement import fit_threads
from headway.doctor.loop_measurement import compute_intercept
from headway.doctor.rate_measurement import LEAST_WINDOWS, build_window, measure_rate


def test_a_steady_rate_is_known_at_once() -> None:
    rate = measure_rate(lambda: 100.0)
    assert (rate.value, rate.low, rate.high, rate.windows) == (100, 100, 100, LEAST_WINDOWS)


def test_a_noisy_rate_ends_with_its_time() -> None:
    values = itertools.cycle([50.0, 150.0])
    rate = measure_rate(lambda: next(values), limit_s=1e-6)
    assert rate.windows == 2
    assert rate.low == 50
    assert rate.high == 150


def test_noise_takes_more_windows_than_none() -> None:
    values = itertools.cycle([97.0, 100.0, 103.5, 100.0, 100.0, 100.0, 100.0])
    rate = measure_rate(lambda: next(values), limit_s=60)
    assert rate.windows > LEAST_WINDOWS
    assert rate.high - rate.low <= 0.06 * rate.value


def test_a_window_counts_what_was_done_in_it() -> None:
    calls = itertools.count()
    window = build_window(lambda: next(calls) * 0 + 7, least_s=0.0)
    assert window() > 0
    assert next(calls) == 1


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=40))
def test_the_median_lies_in_its_interval(values: list[float]) -> None:
    middle, low, high = compute_median_interval(values)
    assert min(values) <= low <= middle <= high <= max(values)


@given(st.floats(0, 1), st.floats(1e-3, 1), st.integers(2, 6))
def test_the_fit_finds_serial_and_parallel(serial: float, parallel: float, points: int) -> None:
    threads = [2**power for power in range(points)]
    found = fit_threads(threads, [serial + parallel / count for count in threads])
    assert found == pytest.approx((serial, parallel), abs=1e-9)


def test_the_fit_is_never_below_zero() -> None:
    assert fit_threads([1, 2], [1.0, 0.4]) == (0.0, pytest.approx(0.96))  # more than twice as fast with two
    assert fit_threads([1, 2], [1.0, 1.2]) == (pytest.approx(1.1), 0.0)  # slower with two
    assert fit_threads([4], [0.5]) == (0.0, 2.0)


@given(st.floats(0, 1e-2), st.floats(1e-6, 1e-3))
def test_what_a_pass_takes_whatever_its_batch_is_the_lines_beginning(fixed: float, each: float) -> None:
    passes = {count: fixed + each * count for count in (2, 32, 128)}
    assert compute_intercept(passes) == pytest.approx(fixed, abs=1e-9)


def test_one_batch_tells_no_intercept() -> None:
    assert compute_intercept({64: 1.0}) == 0
    assert compute_intercept({2: 1.0, 64: 0.9}) <= 1.0


@given(st.lists(st.integers(1, 64), min_size=3, max_size=9), st.floats(1e-4, 1), st.floats(0, 1e3))
def test_a_loader_is_timed_from_batch_to_batch(images: list[int], seconds: float, begun: float) -> None:
    """When the first of them was begun is not known: its images do not count."""
    at, arrived = begun, []
    for count in images:
        at += count * seconds
        arrived.append((at, count))
    assert compute_seconds_per_image(arrived) == pytest.approx(seconds, rel=1e-3)


def test_two_batches_say_nothing_of_a_loader() -> None:
    assert (
        compute_seconds_per_image([])
        == compute_seconds_per_image([(1.0, 8)])
        == compute_seconds_per_image([(1.0, 8), (2.0, 8)])
        == 0.0
    )
