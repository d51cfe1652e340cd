"""The time of a sweep, predicted from costs of a trial that are given."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.budget import Method, Plan, plan_brackets
from headway.sweep.costs import TrialCosts
from headway.sweep.prediction import SweepPrediction, TrialShape, predict_sweep

NOTHING = TrialCosts(open_s=0, build_s=0, step_s=0, decode_s=0, evaluate_s=0, checkpoint_s=0, end_s=0)
STEPS = 270


def shape(**costs: float) -> TrialShape:
    return TrialShape(costs=replace(NOTHING, **costs), steps=STEPS, evaluations=9, checkpoints=9)


def plan(budget: int, method: Method = "random") -> Plan:
    return plan_brackets(budget, 3, Fraction(1, 27), method)


def predict(plan: Plan, *shapes: TrialShape, slots: int = 1, together: int = 64, seeds: int = 0) -> SweepPrediction:
    return predict_sweep(plan, shapes, slots=slots, together=together, seeds=seeds, start_s=0.0)


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


@given(slots=st.integers(1, 4), together=st.integers(1, 9), seeds=st.integers(0, 5))
def test_more_slots_take_less_time_and_no_fewer_seconds_of_cores(slots: int, together: int, seeds: int) -> None:
    trial = shape(step_s=0.01, decode_s=0.02, build_s=1, evaluate_s=0.5, checkpoint_s=0.1, end_s=0.2)
    fewer, more = (
        predict(plan(8, "halving"), trial, slots=n, together=together, seeds=seeds) for n in (slots, 2 * slots)
    )
    assert more.wall_s <= fewer.wall_s * 1.0001
    assert more.core_s >= fewer.core_s * 0.9999
    assert fewer.wall_s >= fewer.core_s / slots * 0.9999


def test_trials_that_differ_cost_their_mean() -> None:
    one, other = shape(step_s=1), shape(step_s=3)
    assert predict(plan(4), one, other).core_s == pytest.approx(predict(plan(4), shape(step_s=2)).core_s)


def test_seeds_are_full_trainings_without_company() -> None:
    trial = shape(step_s=1, decode_s=1, build_s=7, end_s=5, evaluate_s=2, checkpoint_s=3)
    more = predict(plan(2), trial, seeds=3).core_s - predict(plan(2), trial).core_s
    assert more == pytest.approx(3 * (STEPS * 2 + 7 + 5 + 9 * (2 + 3)))
