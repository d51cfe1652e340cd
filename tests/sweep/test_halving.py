from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.sweep.budget import METHODS, Method, Plan
from headway.sweep.halving import decide, is_over
from headway.sweep.records import Created, Forked, Promoted, Record, Result, Stopped
from headway.sweep.state import State, fold, list_tasks, rank_trials, select_best

from ._reference import Words, build_reference, spend
from ._sweeps import Scores, Source, go_on, make_plan

# Some 350 results each. The reference reads all of them for each decision: a thousand take eight times as long.
LONG: dict[Method, Plan] = {
    "random": make_plan("random", 350),
    "halving": make_plan("halving", 24, higher_is_better=False),
    "hyperband": make_plan("hyperband", 66),
    "asha": make_plan("asha", 30),
    "pbt": make_plan("pbt", 35, smallest=10, higher_is_better=False, seed=7),
}


def describe(record: Record) -> Words:
    if isinstance(record, Created):
        return ("new", record.trial)
    if isinstance(record, Forked):
        return ("fork", record.trial, record.parent, record.rung)
    assert isinstance(record, Promoted | Stopped)
    return ("up" if isinstance(record, Promoted) else "stop", record.trial, record.rung)


@pytest.mark.parametrize("method", METHODS)
def test_hundreds_of_results_give_the_decisions_of_the_reference(method: Method) -> None:
    plan, slots = LONG[method], 5
    records = go_on(plan, Scores(), slots=slots)
    reference = build_reference(plan, slots)
    expected: list[Words] = list(reference.begin())
    for record in records:
        if isinstance(record, Result):
            expected += reference.hear(record.trial, record.rung, record.score)
    results = [record for record in records if isinstance(record, Result)]
    assert 300 <= len(results) <= 450
    assert any(result.score is None for result in results)
    assert [describe(record) for record in records if not isinstance(record, Result)] == expected
    assert spend(plan, expected) <= plan.budget


plans = st.builds(
    make_plan,
    st.sampled_from(METHODS),
    st.fractions(1, 6, max_denominator=4),
    st.integers(2, 4),
    st.integers(1, 16),
    max_trials=st.none() | st.integers(1, 12),
    higher_is_better=st.booleans(),
    seed=st.integers(0, 9),
)


@given(plans, st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=60)
def test_a_restart_anywhere_goes_on_with_the_same_decisions(plan: Plan, slots: int, seed: int) -> None:
    scores = Scores(seed, failing=0.2)
    records = go_on(plan, scores, slots=slots, seed=seed)
    for length in range(len(records) + 1):
        assert go_on(plan, scores, records[:length], slots=slots, seed=seed) == records


@given(plans, st.integers(1, 4), st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=100)
def test_work_is_what_was_planned(plan: Plan, slots: int, seed: int, failing: float) -> None:
    work = Fraction(0)
    tasks = set[tuple[int, int]]()

    def add(state: State, decisions: Sequence[Record]) -> None:
        nonlocal work
        state = fold(state, decisions)
        assert is_over(state) == (not list_tasks(state))
        assert plan.method != "asha" or len(list_tasks(state)) <= slots
        for task in list_tasks(state):
            if (task.trial.number, task.rung) not in tasks:
                tasks.add((task.trial.number, task.rung))
                work += task.to - task.start

    records = go_on(plan, Scores(seed, failing), slots=slots, decided=add)
    assert work <= plan.work <= plan.budget
    levels = plan.brackets[0].levels
    if failing == 0 and plan.method != "asha":
        assert work == plan.work
    started = sum(isinstance(record, Created) for record in records)
    if plan.method == "asha" and started < plan.trials:
        # Whatever is left does not pay for one trial more.
        assert plan.budget - work < levels[0]


@given(plans, st.integers(0, 99))
def test_decisions_do_not_change_once_they_are_made(plan: Plan, seed: int) -> None:
    def repeat(state: State, decisions: Sequence[Record]) -> None:
        for length in range(len(decisions) + 1):
            again = decide(fold(state, decisions[:length]), Source(plan.seed), 3)
            assert again == list(decisions[length:])

    go_on(plan, Scores(seed), slots=3, seed=seed, decided=repeat)


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_go_on_and_the_lower_number_among_equals(higher: bool) -> None:
    plan = make_plan("halving", Fraction(5, 3), 3, 3, higher_is_better=higher)
    assert plan.brackets[0].sizes == (3, 1)
    plan = replace(plan, brackets=(replace(plan.brackets[0], sizes=(7, 2)),))
    state = fold(State(plan), [Created(number, {}) for number in range(7)])
    scores = [0.5, 0.9, math.nan, 0.9, 0.1, 0.1, 0.9]
    for number, score in reversed(list(enumerate(scores))):
        assert decide(state, Source()) == []
        state = fold(state, [Result(number, 0, None if math.isnan(score) else score)])
    decisions = decide(state, Source())
    assert {one.trial for one in decisions if isinstance(one, Promoted)} == ({1, 3} if higher else {4, 5})
    assert {one.trial for one in decisions} == {0, 1, 3, 4, 5, 6}
    assert rank_trials(state) == ([1, 3, 6, 0, 4, 5] if higher else [4, 5, 0, 1, 3, 6])


def test_fewer_go_on_if_fewer_succeed_and_none_if_none_does() -> None:
    plan = make_plan("halving", 4)
    for whole, expected in ((13, 13), (5, 5), (0, 0)):
        state = fold(State(plan), [Created(number, {}) for number in range(40)])
        state = fold(state, [Result(number, 0, 1.0 if number < whole else None) for number in range(40)])
        decisions = decide(state, Source())
        assert sum(isinstance(one, Promoted) for one in decisions) == expected
        assert is_over(state) == (whole == 0)


def test_brackets_of_hyperband_do_not_wait_for_each_other() -> None:
    plan = make_plan("hyperband", 30, 3, 9)
    state = fold(State(plan), decide(State(plan), Source()))
    last = plan.brackets[1]
    numbers = range(last.first_trial, last.first_trial + last.sizes[0])
    state = fold(state, [Result(number, 0, float(number)) for number in numbers])
    decisions = decide(state, Source())
    assert {one.trial for one in decisions} == set(numbers)
    best = {one.trial for one in decisions if isinstance(one, Promoted)}
    assert best == set(numbers[-last.sizes[1] :])


def test_asha_prefers_the_highest_promotion_and_a_cheaper_one_near_the_end_of_the_budget() -> None:
    plan = make_plan("asha", Fraction(26, 9), 3, 9)
    state = fold(State(plan), [Created(number, {}) for number in range(9)])
    state = fold(state, [Result(number, 0, number / 10) for number in range(9)])
    # A free worker each; of nine, three may go on.
    expected = [Promoted(8, 1), Promoted(7, 1), Promoted(6, 1), Created(9, Source().draw(9))]
    assert decide(state, Source(), 4) == expected
    state = fold(state, expected)
    state = fold(state, [*(Result(number, 1, number / 10) for number in (6, 7, 8)), Result(9, 0, 0.95)])
    # Rung 0 has ten results, and its best three include a new one; rung 1 has three, and its best goes first.
    # After it, 2/9 of the budget of 26/9 are left: one promotion of rung 0, and nothing else.
    assert plan.budget - Fraction(9 + 3 * 2 + 1 + 6 + 2, 9) == Fraction(2, 9)
    decisions = decide(state, Source(), 9)
    assert decisions == [Promoted(8, 2), Promoted(9, 1), *(Created(n, Source().draw(n)) for n in (10, 11))]
    state = fold(state, decisions)
    assert [(task.trial.number, task.start, task.to) for task in list_tasks(state)] == [
        (8, Fraction(1, 3), 1),
        (9, Fraction(1, 9), Fraction(1, 3)),
        (10, 0, Fraction(1, 9)),
        (11, 0, Fraction(1, 9)),
    ]
    assert not is_over(state)


def test_failed_trials_are_never_the_best() -> None:
    plan = make_plan("halving", 4)
    state = fold(State(plan), [Created(0, {}), Created(1, {}), Result(0, 0, None, "it diverged")])
    state = fold(state, [Result(1, 0, -1e300)])
    assert [trial.number for trial in select_best(state.trials, 0, 2, plan)] == [1]
    assert rank_trials(state) == [1]
    assert state.trials[0].has_failed
    assert state.trials[0].reason == "it diverged"
