"""What a sweep says of its plan."""

from __future__ import annotations

import re
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from tests.sweep._sweeps import make_plan

from headway.sweep.budget import METHODS, Method
from headway.sweep.plan_text import describe_plan, describe_raised_smallest
from headway.sweep.rungs import count_divisions


@given(st.sampled_from(METHODS), st.integers(1, 40), st.integers(2, 5), st.integers(1, 100))
def test_the_sentence_names_the_rungs_and_the_work(method: Method, budget: int, eta: int, divisor: int) -> None:
    plan = make_plan(method, budget, eta, divisor)
    said = describe_plan(plan)
    for bracket in plan.brackets:
        for size, level in zip(bracket.sizes[:-1], bracket.levels, strict=False):
            assert f"{size} to {level}" in said
        assert f"{bracket.sizes[-1]} to {'its' if bracket.sizes[-1] == 1 else 'their'} end" in said
    # Only of asha it is not known.
    assert said.count("at most") == (2 if method == "asha" else 0)
    assert "to 1 of" not in said
    assert not re.search(r"\b1 trials", said)


@given(
    st.sampled_from(METHODS),
    st.fractions(1, 30, max_denominator=20),
    st.integers(2, 5),
    st.integers(1, 100),
    st.none() | st.integers(1, 200),
)
def test_with_the_budget_that_is_named_trials_are_compared_as_early_as_was_asked(
    method: Method, budget: Fraction, eta: int, divisor: int, most: int | None
) -> None:
    smallest = Fraction(1, divisor)
    plan = make_plan(method, budget, eta, divisor, max_trials=most)
    asked = Fraction(1, eta ** count_divisions(divisor, eta))
    said = describe_raised_smallest(plan, smallest, most)
    holds = min(bracket.levels[0] for bracket in plan.brackets) == asked
    assert (said is None) == (holds or method in ("random", "pbt"))
    if said is None:
        return
    named, trials = re.search(r"--budget ([\d.]+)", said), re.search(r"(\d+) trials", said)
    assert named or trials
    enough = Fraction(named[1]) if named else budget
    most = int(trials[1]) if trials else most
    first = make_plan(method, enough, eta, divisor, max_trials=most).brackets[0].levels[0]
    assert first == asked
    if named:
        # A tenth less does not pay for it.
        less = enough - Fraction(1, 10)
        if less >= 1:
            assert make_plan(method, less, eta, divisor, max_trials=most).brackets[0].levels[0] > asked
