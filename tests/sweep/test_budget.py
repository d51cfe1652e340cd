from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.sweep.budget import METHODS, Method, plan_brackets
from headway.sweep.rungs import build_bracket, build_hyperband, count_divisions

from ._sweeps import make_plan

budgets = st.fractions(1, 200, max_denominator=60)
etas = st.integers(2, 5)
divisors = st.integers(1, 200)
limits = st.none() | st.integers(1, 300)


@given(st.sampled_from(METHODS), budgets, etas, divisors, limits)
def test_a_plan_never_exceeds_its_budget(
    method: Method, budget: Fraction, eta: int, divisor: int, most: int | None
) -> None:
    plan = make_plan(method, budget, eta, divisor, max_trials=most)
    assert 0 < plan.work <= budget
    assert 1 <= plan.trials <= (most or plan.trials)
    first = 0
    for bracket in plan.brackets:
        assert bracket.first_trial == first
        first += bracket.sizes[0]
        assert Fraction(1, divisor) <= bracket.levels[0] <= bracket.levels[-1] == 1
        # One trial at least is trained to its end, else nothing could be concluded.
        assert bracket.sizes[-1] >= 1
        assert plan.find_bracket(bracket.first_trial) == plan.find_bracket(first - 1) == bracket
    if most is None and method != "asha":
        # One trial more at the top rung alone costs 1 at most.
        assert budget - plan.work < 1


@given(st.sampled_from(["halving", "hyperband"]), budgets, etas, divisors, limits)
def test_no_bracket_could_take_one_trial_more(
    method: Method, budget: Fraction, eta: int, divisor: int, most: int | None
) -> None:
    plan = make_plan(method, budget, eta, divisor, max_trials=most)
    if plan.trials == most:
        return
    for number, bracket in enumerate(plan.brackets):
        larger = build_bracket(bracket.sizes[0] + 1, len(bracket.levels) - 1, eta)
        rest = [other.work for place, other in enumerate(plan.brackets) if place != number]
        assert sum(rest, larger.work) > budget


@pytest.mark.parametrize("most", [None, 50])
def test_rounds_of_hyperband_share_what_is_left(most: int | None) -> None:
    for ninths in range(9, 400):
        plan = make_plan("hyperband", Fraction(ninths, 9), 3, 9, max_trials=most)
        assert plan.work <= plan.budget
        assert plan.trials <= (most or plan.trials)


@given(budgets, etas, divisors, limits)
def test_halving_begins_as_low_as_the_budget_reaches(
    budget: Fraction, eta: int, divisor: int, most: int | None
) -> None:
    depth = len(make_plan("halving", budget, eta, divisor, max_trials=most).brackets[0].levels) - 1
    # eta^d trials, of which one goes to the end, cost 1 in the first rung and 1 - 1/eta in each other.
    possible = [
        lower
        for lower in range(count_divisions(divisor, eta) + 1)
        if 1 + lower * (1 - Fraction(1, eta)) <= budget and eta**lower <= (most or eta**lower)
    ]
    assert depth == max(possible)
    asha = make_plan("asha", budget, eta, divisor, max_trials=most)
    assert asha.brackets[0].levels == build_bracket(1, depth, eta).levels


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("full", [9, 27, 81])
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_budget_of_whole_rounds_gives_the_tables_of_hyperband(full: int, eta: int, rounds: int) -> None:
    table = build_hyperband(full, eta)
    work = rounds * sum(bracket.work for bracket in table)
    plan = plan_brackets(Fraction(work), eta, Fraction(1, full), "hyperband")
    assert [bracket.sizes for bracket in plan.brackets] == [bracket.sizes for bracket in table] * rounds
    assert plan.work == plan.budget


def test_plans_at_a_budget_of_four() -> None:
    plans = {method: make_plan(method, 4) for method in METHODS}
    assert {method: plan.trials for method, plan in plans.items()} == {
        "random": 4,
        "halving": 40,
        "hyperband": 6,
        "asha": 108,
        "pbt": 4,
    }
    assert [plan.work for plan in plans.values()] == [4] * 5
    assert [bracket.sizes for bracket in plans["halving"].brackets] == [(40, 13, 4, 1)]
    assert [bracket.sizes for bracket in plans["hyperband"].brackets] == [(4, 1), (2,)]
    assert plans["pbt"].brackets[0].levels == tuple(Fraction(number, 27) for number in range(1, 28))
    assert make_plan("halving", 4, max_trials=20).brackets[0].sizes == (17, 5, 1)
    assert make_plan("halving", 4, max_trials=20).work == Fraction(17 + 5 * 2 + 1 * 6, 9)


def test_large_budgets_are_planned_at_once() -> None:
    plan = make_plan("halving", 100_000, 2, 1 << 12)
    assert plan.trials > 10**6
    assert 0 <= 100_000 - plan.work < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": Fraction(1, 2)}, "a budget of 0.5 full trainings trains no trial to its end. Set the budget to at"),
        ({"eta": 1}, "eta is 1, so every trial would go on. Set eta to 2 or more"),
        ({"smallest": Fraction(0)}, "compared first after 0 of a full training. Set a fraction above 0 and at most 1"),
        ({"smallest": Fraction(2)}, "compared first after 2 of a full training"),
        ({"max_trials": 0}, "at most 0 trials may start. Allow at least 1"),
    ],
)
def test_impossible_plans_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"budget": 4, "eta": 3, "smallest": Fraction(1, 9), "method": "asha"}
    with pytest.raises(UsageError) as refused:
        plan_brackets(**arguments | change)
    assert message in str(refused.value)


def test_equal_plans_are_equal() -> None:
    plan = make_plan("hyperband", 30, seed=3)
    assert plan == make_plan("hyperband", 30, seed=3)
    assert plan != replace(plan, seed=4)
