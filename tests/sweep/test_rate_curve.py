"""Range tests, the pure part: what a curve proposes, and which curves propose nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RecipeError, TrainingError
from headway.sweep.rate_curve import (
    DIVERGED,
    FEWEST_STEPS,
    GRID,
    RateCurve,
    count_test_steps,
    list_rates,
    propose_rate,
)
from headway.sweep.rate_table import FACTORS

STEPS = 100


def curve(middle: float = 50, *, noise: float = 0.0, seed: int = 0, steps: int = STEPS) -> RateCurve:
    """A loss that falls from 2.3 to 0.8 around a step, stays there for 30 steps, and rises."""
    draws = random.Random(seed)
    losses = [
        2.3 - 1.5 / (1 + math.exp((middle - step) / 4)) + math.exp((step - middle - 30) / 3) + noise * draws.gauss(0, 1)
        for step in range(steps)
    ]
    return RateCurve(list_rates(1e-5, 10, steps), tuple(losses))


curves = st.builds(curve, st.floats(25, 55), noise=st.sampled_from([0.0, 0.02, 0.05]), seed=st.integers(0, 1000))


@given(curves, st.floats(1e-9, 1e9), st.booleans())
def test_the_scale_of_the_loss_does_not_count(one: RateCurve, scale: float, layers: bool) -> None:
    scaled = replace(one, losses=tuple(scale * loss for loss in one.losses))
    assert propose_rate(scaled, is_layer_wise=layers) == propose_rate(one, is_layer_wise=layers)
    assert scaled.has_diverged == one.has_diverged


@given(curves, st.floats(-1, 10))
def test_a_constant_beside_the_loss_does_not_count(one: RateCurve, more: float) -> None:
    assert propose_rate(replace(one, losses=tuple(loss + more for loss in one.losses))) == propose_rate(one)


@given(curves, st.floats(1e-6, 1e6))
def test_the_proposal_follows_the_rates(one: RateCurve, scale: float) -> None:
    before, after = propose_rate(one), propose_rate(replace(one, rates=tuple(scale * rate for rate in one.rates)))
    assert after.rate == pytest.approx(scale * before.rate)
    assert after.minimum == pytest.approx(scale * before.minimum)


@given(st.floats(25, 40), st.integers(1, 20))
def test_a_curve_that_falls_later_proposes_a_higher_rate(middle: float, later: int) -> None:
    before, after = propose_rate(curve(middle)), propose_rate(curve(middle + later))
    step = curve().rates[1] / curve().rates[0]
    # The average reaches less far back at the beginning, which moves it by a part of a step.
    assert after.rate == pytest.approx(before.rate * step**later, rel=0.2)


@given(st.floats(30, 55), st.integers(0, 10_000))
def test_noise_hardly_moves_the_proposal(middle: float, seed: int) -> None:
    true, noisy = propose_rate(curve(middle)), propose_rate(curve(middle, noise=0.15, seed=seed))
    assert true.rate / 2 < noisy.rate < true.rate * 2


@given(st.integers(60, 78))
def test_a_lucky_batch_moves_the_minimum_and_hardly_the_proposal(step: int) -> None:
    losses = list(curve().losses)
    losses[step] -= 1.0
    lucky, true = propose_rate(RateCurve(curve().rates, tuple(losses))), propose_rate(curve())
    assert true.rate / 1.5 < lucky.rate < true.rate * 1.5


@given(curves)
def test_the_proposal_lies_below_the_minimum(one: RateCurve) -> None:
    assert propose_rate(one).rate <= propose_rate(one).minimum
    layers = propose_rate(one, is_layer_wise=True)
    # The three rates that are tried reach from the minimum downwards.
    assert layers.rate * max(FACTORS) == pytest.approx(layers.minimum)


@given(st.floats(0.5, 0.65), st.integers(40, 100))
def test_the_proposal_does_not_depend_on_the_length_of_the_test(middle: float, steps: int) -> None:
    """A loss that depends on the distance that the weights have gone, the sum of the rates so far."""

    def propose(steps: int) -> float:
        rates, gone, losses = list_rates(1e-5, 10, steps), 0.0, list[float]()
        for rate in rates[: int(0.9 * steps)]:
            losses.append(0.8 + 1.5 / (1 + gone / 10 ** (6 * middle - 5)) + rate)
            gone += rate
        return propose_rate(RateCurve(rates, tuple(losses))).rate

    assert propose(steps) == pytest.approx(propose(100), rel=0.5)


def test_a_steep_curve_proposes_no_rate_beyond_its_minimum() -> None:
    losses = [2.3] * 50 + [0.1] * 2 + [5.0] * 13
    found = propose_rate(RateCurve(list_rates(1e-5, 1e-5 * 1.05**64, 65), tuple(losses)))
    assert found.rate == found.minimum


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "not finite"),
        ([math.nan], "not finite"),
        ([2.3], "falls at no learning rate"),
        ([2.3] * STEPS, "falls at no learning rate"),
        ([2.3 + 0.01 * step for step in range(STEPS)], "falls at no learning rate"),
        ([2.3, 5.0, 90.0], "falls at no learning rate"),
        ([2.3 - 0.02 * step for step in range(STEPS)], "still falls"),
    ],
    ids=["nothing", "nan", "one", "flat", "rising", "explodes", "falling"],
)
def test_a_curve_without_a_minimum_is_refused(losses: list[float], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        propose_rate(RateCurve(list_rates(1e-5, 10, STEPS), tuple(losses)))


@given(st.integers(20, 100))
def test_few_steps_are_named_before_labels(steps: int) -> None:
    with pytest.raises(TrainingError, match=f"in a range test of {steps} steps") as raised:
        propose_rate(RateCurve(list_rates(1e-5, 10, steps), (2.3,) * steps))
    assert raised.value.fix.startswith("Train for more epochs" if steps < 100 else "Check labels")


@given(st.integers(0, 10_000), st.floats(0.01, 1.0))
def test_noise_alone_is_no_fall(seed: int, noise: float) -> None:
    draws = random.Random(seed)
    losses = tuple(2.3 + noise * draws.gauss(0, 1) for _ in range(STEPS))
    with pytest.raises(TrainingError, match="falls at no"):
        propose_rate(RateCurve(list_rates(1e-5, 10, STEPS), losses))


def test_a_loss_that_is_not_finite_ends_the_test_and_is_left_out() -> None:
    whole = curve()
    cut = RateCurve(whole.rates, (*whole.losses[:85], math.inf))
    assert cut.has_diverged
    assert propose_rate(cut) == propose_rate(whole)


def test_the_test_ends_at_four_times_the_lowest_loss() -> None:
    rates = list_rates(1e-5, 10, STEPS)
    assert not RateCurve(rates, ()).has_diverged
    low = (1.0,) * 60
    # Of one step 1 - 0.9 counts, hardly changed by the correction after 60 steps.
    beyond = 1 + (DIVERGED - 1) / (1 - 0.9)
    assert not RateCurve(rates, (*low, 0.99 * beyond)).has_diverged
    assert RateCurve(rates, (*low, 1.01 * beyond)).has_diverged


@given(st.lists(st.floats(-5, -1), min_size=1, max_size=60))
def test_a_negative_loss_does_not_end_the_test_at_once(losses: list[float]) -> None:
    assert not RateCurve(list_rates(1e-5, 10, STEPS), tuple(losses)).has_diverged


@given(st.floats(-100, 100), st.integers(1, 60), st.integers(20, STEPS))
def test_the_average_of_a_constant_is_the_constant(value: float, count: int, steps: int) -> None:
    smoothed = RateCurve(list_rates(1e-5, 10, steps), (value,) * count).smoothed
    assert smoothed == pytest.approx([value] * count)


@given(st.integers(1, 10_000))
def test_a_range_test_and_three_trainings_cost_less_than_a_quarter_of_a_grid(steps: int) -> None:
    if steps <= FEWEST_STEPS:
        with pytest.raises(RecipeError, match="too short for a range test of 20"):
            count_test_steps(steps)
        return
    count = count_test_steps(steps)
    assert FEWEST_STEPS <= count <= 100
    # One more step measures the optimizer.
    assert 3 * steps + count + 1 <= GRID * steps / 4


@given(st.floats(1e-9, 1), st.floats(2, 1e9), st.integers(20, 100))
def test_rates_rise_by_one_factor(start: float, ratio: float, steps: int) -> None:
    rates = list_rates(start, start * ratio, steps)
    assert (rates[0], rates[-1]) == pytest.approx((start, start * ratio))
    factors = [after / before for before, after in pairwise(rates)]
    assert factors == pytest.approx([factors[0]] * len(factors))
