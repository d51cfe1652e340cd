"""Patterns: found where they were put, in the right place, and not found in noise."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from numpy.typing import NDArray

from headway.observe import patterns
from headway.observe.patterns import (
    MAX_CHANCE,
    estimate_share,
    find_drift,
    find_period,
    find_recurring,
    find_slow_rank,
    find_worker_period,
    match_interval,
)

Numbers = NDArray[np.float64]
SERIES = 200


def noise(kind: str, seed: int, steps: int = 300) -> Numbers:
    """Waits of a loader that nothing is wrong with."""
    draw = np.random.default_rng(seed)
    if kind == "normal":
        return 10 + draw.normal(size=steps)
    if kind == "exponential":
        return draw.exponential(size=steps)
    if kind == "heavy":  # now and then a hundred times as long
        return draw.lognormal(0, 2, steps)
    slow = np.zeros(steps)  # what neighbours on a machine make: each value close to the one before
    for step in range(1, steps):
        slow[step] = 0.9 * slow[step - 1] + draw.normal()
    return np.exp(slow)


NOISES = ("normal", "exponential", "heavy", "slow")


@pytest.mark.thin(1)
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.check
def test_noise_has_no_pattern(kind: str) -> None:
    """Of 200 series at most 3 % show one that is found with p < 1 %: 3 standard deviations over the nominal share."""
    steps = np.arange(300)
    found = {"workers known": 0, "workers": 0, "period": 0}
    for seed in range(SERIES):
        series = noise(kind, seed)
        found["workers known"] += find_worker_period(series, steps, 4) is not None
        found["workers"] += find_worker_period(series, steps) is not None
        found["period"] += find_period(series) is not None
    assert max(found.values()) <= 0.03 * SERIES, found


@pytest.mark.thin(1)
@pytest.mark.parametrize("kind", ["normal", "exponential", "heavy"])
def test_noise_does_not_drift(kind: str) -> None:
    found = [find_drift(noise(kind, seed)) for seed in range(SERIES)]
    assert sum(one is not None and one.p_value < MAX_CHANCE for one in found) <= 0.03 * SERIES


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 16])
def test_workers_that_are_too_slow_together(workers: int) -> None:
    draw = np.random.default_rng(workers)
    places = np.concatenate([np.arange(1, 160), np.arange(1, 160)])  # two epochs without their first batches
    waits = draw.exponential(0.2, len(places)) + np.where(places % workers == 0, draw.normal(20, 2, len(places)), 0)
    for known in (workers, None):
        found = find_worker_period(waits, places, known)
        assert found is not None
        assert (found.period, found.phase) == (workers, 0)
        assert found.large == pytest.approx(20, rel=0.1)
        assert found.rest < 1
        assert found.p_value < MAX_CHANCE


def test_the_phase_is_of_the_place_in_the_epoch() -> None:
    places = np.concatenate([np.arange(1, 50), np.arange(1, 50)])  # 49 is no multiple of four
    waits = np.where(places % 4 == 0, 5.0, 0.1)
    assert find_worker_period(waits, places, 4) is not None
    assert find_worker_period(waits, np.arange(len(places)), 4) is None, "as if the workers went on where they were"


def test_what_comes_every_ten_steps_is_no_pattern_of_two_or_five_workers() -> None:
    steps = np.arange(300)
    waits = np.where(steps % 10 == 3, 50.0, 1.0) + np.random.default_rng(0).exponential(0.1, 300)
    assert find_worker_period(waits, steps, 2) is None
    assert find_worker_period(waits, steps, 5) is None
    found = find_worker_period(waits, steps)
    assert found is not None
    assert (found.period, found.phase) == (10, 3)


def test_one_worker_or_none_makes_no_pattern() -> None:
    waits = np.tile([0.0, 9.0], 50)
    assert find_worker_period(waits, np.arange(100), 0) is None
    assert find_worker_period(waits, np.arange(100), 1) is None


@pytest.mark.thin(1)
@pytest.mark.parametrize("ties", [False, True])
def test_the_chance_is_that_of_the_rank_sum(ties: bool) -> None:
    draw = np.random.default_rng(5)
    values = draw.exponential(size=60) + np.where(np.arange(60) % 4 == 1, 4.0, 0.0)
    values = np.round(values) if ties else values
    found = find_recurring(values, 4)
    assert found is not None
    here, others = values[1::4], np.delete(values, np.s_[1::4])
    known = scipy.stats.mannwhitneyu(
        here, others, alternative="greater", method="asymptotic", use_continuity=False
    ).pvalue
    assert found.p_value == pytest.approx(4 * known), "of four phases"
    assert find_recurring(values, 4, num_tests=10**9) is None, "chance over all that was tried"


def test_a_period_is_found_and_matched() -> None:
    steps = np.arange(400)
    own = np.random.default_rng(1).normal(10, 1, 400) + np.where(steps % 50 == 49, 80, 0)
    found = find_period(own)
    assert found is not None
    assert (found.period, found.phase) == (50, 49)
    known = {"checkpoint": 100, "logging": 50, "the epoch": 390}
    assert match_interval(found.period, known) == "logging"
    assert match_interval(51, known) == "logging"
    assert match_interval(54, known) is None
    assert match_interval(394, known) == "the epoch"
    own[123] = 1e5
    again = find_period(own)
    assert again is not None, "one hiccup hides no period"
    assert (again.period, again.phase) == (50, 49)


def test_two_hiccups_are_no_period() -> None:
    own = np.random.default_rng(2).normal(10, 1, 200)
    own[[60, 85]] = 1000
    assert find_period(own) is None
    own[[110, 135, 160]] = 1000  # five of them, at one distance: then chance is over
    assert find_period(own) is None, "in the rest of the 25-step places there is nothing"


def test_series_without_any_difference() -> None:
    still = np.full(100, 3.0)
    assert find_period(still) is None
    assert find_recurring(still, 4) is None
    found = find_drift(still)
    assert found is not None
    assert (found.change, found.p_value) == (0.0, 1.0)
    assert find_period(np.zeros(3)) is None
    assert find_drift(np.zeros(9)) is None


def test_drift_is_mann_and_kendalls() -> None:
    values = np.arange(10.0) + 1
    found = find_drift(values)
    assert found is not None
    # All 45 pairs rise; the variance of ten values is 10 * 9 * 25 / 18 = 125.
    assert found.p_value == pytest.approx(2 * scipy.stats.norm.sf(44 / np.sqrt(125)))
    assert found.change == pytest.approx(9 / 5.5)
    down = find_drift(values[::-1])
    assert down is not None
    assert down.change == pytest.approx(-9 / 5.5)
    assert down.p_value == found.p_value
    noisy = np.linspace(10, 13, 500) + np.random.default_rng(3).normal(size=500)
    seen = find_drift(noisy)
    assert seen is not None
    assert seen.p_value < 1e-4
    assert seen.change == pytest.approx(3 / 11.5, rel=0.25)


def test_drift_counts_ties_and_takes_sens_slope() -> None:
    values = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], np.float64)
    found = find_drift(values)
    assert found is not None
    slope = scipy.stats.theilslopes(values).slope
    assert found.change == pytest.approx(slope * 14 / np.median(values))
    n, ties = 15, np.unique(values, return_counts=True)[1]
    score = sum(np.sign(values[j] - values[i]) for i in range(n) for j in range(i + 1, n))
    variance = (n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    assert found.p_value == pytest.approx(2 * scipy.stats.norm.sf((score - 1) / np.sqrt(variance)))


def test_a_rank_that_is_always_behind() -> None:
    draw = np.random.default_rng(4)
    own = draw.normal(10, 0.1, (12, 4))
    own[:, 2] += 3
    found = find_slow_rank(own, 20)
    assert found is not None
    assert (found.rank, found.share, found.always) == (2, 1.0, True)
    assert found.behind == pytest.approx(0.15, rel=0.1)


def test_a_slow_rank_that_moves() -> None:
    own = np.full((12, 4), 10.0)
    own[np.arange(12), np.arange(12) % 4] += 3
    found = find_slow_rank(own, 20)
    assert found is not None
    assert found.always is False
    assert found.share == 0.25


def test_too_few_windows_tell_nothing_and_small_differences_are_none() -> None:
    own = np.array([[10.0, 13.0]] * 3)
    found = find_slow_rank(own, 20)
    assert found is not None
    assert found.always is None, "two ranks and three windows: chance makes it in one of four"
    assert find_slow_rank(np.random.default_rng(6).normal(10, 0.2, (50, 8)), 20) is None
    assert find_slow_rank(np.ones((4, 1)), 20) is None
    assert find_slow_rank(np.ones((0, 3)), 20) is None


def test_share_and_its_interval() -> None:
    whole = np.random.default_rng(7).uniform(1, 2, 200)
    assert estimate_share(0.3 * whole, whole) == pytest.approx((0.3, 0.3, 0.3))
    assert np.isnan(estimate_share([1.0], [2.0])[1])
    assert np.isnan(estimate_share([], [])[0])
    held = 0
    for seed in range(SERIES):
        draw = np.random.default_rng(seed)
        part = draw.exponential(3, 100)
        _, low, high = estimate_share(part, part + 7)
        held += low <= 0.3 <= high  # 3 / (3 + 7)
    assert held >= 0.88 * SERIES, "of a 95 % interval, over ten pieces of a skewed series"


def test_the_tails_are_those_of_the_distributions() -> None:
    for z in (0.0, 1.0, 3.0, 8.0):
        assert patterns._compute_normal_tail(z) == pytest.approx(scipy.stats.norm.sf(z))
        assert patterns._find_normal_quantile(scipy.stats.norm.sf(z)) == pytest.approx(z, abs=1e-6)
    for hits, tries, chance in ((3, 4, 0.5), (0, 5, 0.2), (700, 2000, 1 / 3)):
        assert patterns._compute_binomial_tail(hits, tries, chance) == pytest.approx(
            scipy.stats.binom.sf(hits - 1, tries, chance)
        )
