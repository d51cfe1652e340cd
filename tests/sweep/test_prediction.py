"""The time of a sweep, predicted from costs of a trial that are given."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.budget import Method, Plan, plan_brackets
from headway.sweep.costs import TrialCosts
from headway.sweep.prediction import FEED_S, SweepPrediction, TrialShape, choose_feeding, predict_sweep

NOTHING = TrialCosts(open_s=0, build_s=0, step_s=0, decode_s=0, evaluate_s=0, checkpoint_s=0, end_s=0)
STEPS = 270


def shape(**costs: float) -> TrialShape:
    return TrialShape(costs=replace(NOTHING, **costs), steps=STEPS, evaluations=9, checkpoints=9)


def plan(budget: int, method: Method = "random") -> Plan:
    return plan_brackets(budget, 3, Fraction(1, 27), method)


def predict(
    plan: Plan, *shapes: TrialShape, slots: int = 1, together: int = 64, seeds: int = 0, feeds: bool = False
) -> SweepPrediction:
    return predict_sweep(plan, shapes, slots=slots, together=together, seeds=seeds, start_s=0.0, feeds=feeds)


@given(trials=st.integers(1, 40), decode_s=st.floats(0.01, 1), step_s=st.floats(0.01, 1))
def test_the_gain_of_one_loader_is_that_of_the_formula(trials: int, decode_s: float, step_s: float) -> None:
    found = predict(plan(trials), shape(decode_s=decode_s, step_s=step_s))
    assert found.core_s == pytest.approx(STEPS * (decode_s + trials * step_s))
    assert found.share_gain == pytest.approx(trials * (decode_s + step_s) / (decode_s + trials * step_s))


@pytest.mark.parametrize("method", ["random", "halving", "hyperband", "asha"])
def test_steps_alone_cost_the_work_of_the_plan(method: Method) -> None:
    planned = plan(8, method)
    found = predict(planned, shape(step_s=1))
    # The work of ASHA depends on the scores: the prediction has as many trials as halving.
    assert found.core_s <= 8 * STEPS
    assert found.core_s >= (0.8 if method == "asha" else 0.999) * float(planned.work) * STEPS


@given(slots=st.integers(1, 4), seeds=st.integers(0, 5))
def test_more_slots_take_less_time_and_no_fewer_seconds_of_cores(slots: int, seeds: int) -> None:
    """As long as all trials of a slot take turns; in several cohorts the last one may be nearly empty."""
    trial = shape(step_s=0.01, decode_s=0.02, build_s=1, evaluate_s=0.5, checkpoint_s=0.1, end_s=0.2)
    fewer, more = (predict(plan(8, "halving"), trial, slots=n, seeds=seeds) for n in (slots, 2 * slots))
    assert more.wall_s <= fewer.wall_s * 1.0001
    assert more.core_s >= fewer.core_s * 0.9999
    assert fewer.wall_s >= fewer.core_s / slots * 0.9999


def test_trials_that_differ_cost_their_mean() -> None:
    one, other = shape(step_s=1), shape(step_s=3)
    assert predict(plan(4), one, other).core_s == pytest.approx(predict(plan(4), shape(step_s=2)).core_s)


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_a_trial_that_stands_for_several_counts_as_often(weights: list[int]) -> None:
    trials = [shape(step_s=1 + number, open_s=number) for number in range(len(weights))]
    weighted = predict(plan(4), *(replace(one, weight=weight) for one, weight in zip(trials, weights, strict=True)))
    repeated = [one for one, weight in zip(trials, weights, strict=True) for _ in range(weight)]
    assert weighted.core_s == pytest.approx(predict(plan(4), *repeated).core_s)


def test_seeds_are_full_trainings_without_company() -> None:
    trial = shape(step_s=1, decode_s=1, open_s=4, build_s=7, end_s=5, evaluate_s=2, checkpoint_s=3)
    more = predict(plan(2), trial, seeds=3).core_s - predict(plan(2), trial).core_s
    assert more == pytest.approx(3 * (STEPS * 2 + 4 + 7 + 5 + 9 * (2 + 3)))


@given(trials=st.integers(1, 40), slots=st.integers(2, 5), decode_s=st.floats(0.01, 1), step_s=st.floats(0.01, 1))
def test_with_a_feeder_slots_decode_as_one(trials: int, slots: int, decode_s: float, step_s: float) -> None:
    """A sweep costs what it does in one slot, besides what passing batches on takes."""
    trial = shape(decode_s=decode_s, step_s=step_s)
    alone, fed = predict(plan(trials), trial), predict(plan(trials), trial, slots=slots, feeds=True)
    readers = -(-trials // -(-trials // slots))
    assert fed.core_s == pytest.approx(alone.core_s + (STEPS * readers * FEED_S if readers > 1 else 0.0))
    # Work and decoding are spread over the slots, and the last one may have less of it.
    assert fed.core_s / slots <= fed.wall_s * 1.0001
    assert fed.wall_s <= predict(plan(trials), trial, slots=slots).wall_s + STEPS * FEED_S


@pytest.mark.parametrize("method", ["halving", "hyperband", "asha"])
@given(slots=st.integers(1, 4), decode_s=st.floats(0, 0.1), start_s=st.floats(0, 20))
def test_a_feeder_is_used_where_it_pays(method: Method, slots: int, decode_s: float, start_s: float) -> None:
    arguments = (plan(4, method), [shape(step_s=0.01, decode_s=decode_s, open_s=1)])
    options = {"slots": slots, "together": 16, "seeds": 0, "start_s": start_s}
    chosen = choose_feeding(*arguments, **options)
    both = [predict_sweep(*arguments, **options, feeds=feeds) for feeds in (False, True)]  # type: ignore[arg-type]
    assert chosen in both
    assert chosen.core_s <= min(one.core_s for one in both) / 0.97
    # Another process never pays for one slot, or if there is nothing to decode.
    assert not (chosen.feeds and (slots == 1 or decode_s == 0))
