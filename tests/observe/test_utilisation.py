"""Numbers of a utilisation against closed forms, and periods against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.observe.utilisation import (
    LoadStatistics,
    describe_load,
    find_period,
    is_busy_but_light,
    match_intervals,
    resample,
    summarise_load,
)

SERIES = st.lists(st.integers(0, 1000).map(lambda number: number / 1000), min_size=20, max_size=200)


def wave(length: int, low: int, times: int) -> np.ndarray:
    """Busy, then idle for `low` samples of each `length`."""
    return np.tile([1.0] * (length - low) + [0.0] * low, times)


def of(values: object, spacing_s: float = 0.5) -> LoadStatistics:
    found = summarise_load(values, spacing_s)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(("length", "low"), [(10, 2), (10, 5), (8, 6), (25, 3), (4, 2)])
@pytest.mark.parametrize("spacing_s", [0.1, 0.5])
def test_a_square_wave(length: int, low: int, spacing_s: float) -> None:
    times, duty = 20, 1 - low / length
    found = of(wave(length, low, times), spacing_s)
    n = times * length
    assert found.seconds == pytest.approx(n * spacing_s)
    assert found.mean == pytest.approx(duty)
    assert found.variance == pytest.approx(duty * (1 - duty))
    assert found.variation == pytest.approx(math.sqrt((1 - duty) / duty))
    assert found.idle_share == pytest.approx(1 - duty)
    assert (found.p10, found.p90) == (0, 1)
    assert found.spikiness == pytest.approx(1 - duty)
    assert found.swings_s == pytest.approx((2 * times - 1) / ((n - 1) * spacing_s))
    assert found.dips_min == pytest.approx(60 / (length * spacing_s))
    assert found.dip_s == pytest.approx(low * spacing_s)
    assert found.period_s == pytest.approx(length * spacing_s, rel=0.02)


def test_an_even_load_has_nothing_to_tell() -> None:
    found = of(np.full(50, 0.7))
    assert (found.mean, found.p10, found.p50, found.p90) == pytest.approx((0.7, 0.7, 0.7, 0.7))
    assert (found.variance, found.variation, found.swings_s, found.spikiness) == pytest.approx((0, 0, 0, 0), abs=1e-12)
    assert (found.idle_share, found.dips_min, found.dip_s, found.period_s) == (0, 0, None, None)


def test_a_device_that_is_never_used() -> None:
    found = of(np.zeros(50))
    assert (found.mean, found.idle_share, found.spikiness) == (0, 1, 0)
    assert found.variation is found.dip_s is found.period_s is None


def test_too_few_samples_tell_nothing() -> None:
    assert summarise_load(np.ones(19), 0.5) is None
    assert summarise_load([], 0.5) is None


@settings(deadline=None)
@given(SERIES, st.floats(0.05, 1))
def test_what_holds_for_any_series(values: list[float], factor: float) -> None:
    found, u = of(values), np.array(values)
    assert found.mean**2 + found.variance == pytest.approx((u**2).mean(), abs=1e-12)
    assert 0 <= found.spikiness <= 1
    assert found.p10 <= found.p50 <= found.p90
    assert found.dips_min * found.seconds / 60 <= len(u) / 2 + 1
    backwards, less = of(u[::-1]), of(u * factor)
    assert (backwards.swings_s, backwards.dips_min) == pytest.approx((found.swings_s, found.dips_min))
    assert less.spikiness == pytest.approx(found.spikiness, abs=1e-9)
    assert less.swings_s == pytest.approx(factor * found.swings_s, abs=1e-12)


@pytest.mark.parametrize("length", [3.0, 7.3, 12.5, 31.8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_period_that_is_no_whole_number_of_samples(length: float, noise: float) -> None:
    chance = np.random.default_rng(1)
    t = np.arange(300)
    u = 0.5 + 0.3 * np.sin(2 * np.pi * t / length) + noise * chance.standard_normal(300)
    assert find_period(u, 0.5) == pytest.approx(0.5 * length, rel=0.02)


def test_dips_that_come_back_among_noise_have_a_period() -> None:
    chance = np.random.default_rng(2)
    u = np.where(np.arange(400) % 20 < 3, 0.1, 0.9) + 0.05 * chance.standard_normal(400)
    assert find_period(u, 0.5) == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("n", [24, 100, 1000])
@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_chance_has_no_period(n: int, memory: float) -> None:
    """White noise, and noise that remembers, whose autocorrelation has hills, too: at most one series of a hundred."""
    found = 0
    for seed in range(200):
        steps = np.random.default_rng(seed).standard_normal(n)
        u = np.empty(n)
        u[0] = steps[0]
        for place in range(1, n):
            u[place] = memory * u[place - 1] + steps[place]
        found += find_period(u, 0.5) is not None
    assert found <= 2


def test_what_was_there_only_twice_is_no_period() -> None:
    u = np.ones(100)
    u[[20, 21, 44, 45]] = 0
    assert find_period(u, 0.5) is None


def test_periods_are_matched_to_what_is_as_long() -> None:
    intervals = {"steps": 0.1, "epochs": 10.0, "evaluations": 10.0, "checkpoints": 50.0}
    assert match_intervals(10.4, intervals) == ["epochs", "evaluations"]
    assert match_intervals(49, intervals) == ["checkpoints"]
    assert match_intervals(20, intervals) == []


def test_readings_of_unequal_lengths_become_samples_of_one() -> None:
    """Each holds for the time since the one before: the mean over time stays."""
    seconds = [1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0]
    values = [0.5, 1.0, 0.0, 1.0, 0.25, 1.0, 0.0]
    spacing_s, u = resample(seconds, values)
    assert spacing_s == 1.0
    assert u.tolist() == [1.0, 0.0, 1.0, 0.25, 0.25, 0.25, 0.25, 1.0, 0.0]


def test_readings_that_a_resumed_run_made_again_are_left_out() -> None:
    seconds = [1.0, 2.0, 3.0, 2.5, 3.0, 4.0, 5.0]
    spacing_s, u = resample(seconds, [0.1, 0.2, 0.3, 9, 9, 0.4, math.nan])
    assert (spacing_s, u.tolist()) == (1.0, [0.2, 0.3, 0.4])
    assert resample([], [])[1].tolist() == []
    assert resample([1.0], [0.5])[1].tolist() == [0.5]


@pytest.mark.parametrize(
    ("length", "low", "wait", "says"),
    [
        (10, 0, 0.01, "the load is even."),
        (10, 0, 0.6, "shorter than that, or other work fills them"),
        (10, 3, 0.31, "the dips come from the input"),
        (10, 3, 0.0, "do not come from the input"),
        (10, 3, 0.7, "some waits are shorter than a sample"),
    ],
)
def test_spikiness_is_read_beside_the_waiting(length: int, low: int, wait: float, says: str) -> None:
    sentence = describe_load(of(wave(length, low, 10)), wait)
    assert says in sentence
    assert f"{wait:.0%}" in sentence


@pytest.mark.parametrize(
    ("busy", "power", "light"), [(0.95, 300, True), (0.95, 500, False), (0.85, 300, False), (0.95, math.nan, False)]
)
def test_busy_but_light(busy: float, power: float, light: bool) -> None:
    assert is_busy_but_light(busy, power, 700) is light
