from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.sweep.budget import METHODS, Method
from headway.sweep.expectation import compute_expected_best, extrapolate_scores
from headway.sweep.state import State, fold, list_scores

from ._sweeps import Scores, go_on, make_plan

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


@given(SCORES, st.booleans())
@settings(max_examples=50)
def test_the_expectation_is_the_mean_over_all_draws(scores: list[float], higher: bool) -> None:
    found = compute_expected_best(scores, len(scores), higher_is_better=higher)
    choose = max if higher else min
    for draws, expected in enumerate(found, 1):
        assert expected == pytest.approx(fmean(choose(drawn) for drawn in combinations(scores, draws)), abs=1e-5)


def test_a_thousand_scores_lose_no_chance() -> None:
    assert compute_expected_best([7.5] * 1000, 1000) == pytest.approx([7.5] * 1000)
    assert compute_expected_best(range(1000), 1000)[-1] == 999


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("higher", [True, False])
def test_scores_at_the_end_stay_and_others_lie_between_their_own_and_the_best(method: Method, higher: bool) -> None:
    plan = make_plan(method, 6, 3, 9, higher_is_better=higher)
    state = fold(State(plan), go_on(plan, Scores()))
    own = [dict(list_scores(state, trial)) for trial in state.trials]
    choose = max if higher else min
    best = choose(score for scores in own for score in scores.values())
    worst = (min if higher else max)(score for scores in own for score in scores.values())
    for seed in range(3):
        for scores, full in zip(own, extrapolate_scores(state, seed), strict=True):
            if Fraction(1) in scores:
                assert full == scores[Fraction(1)]
            elif scores:
                last = scores[max(scores)]
                assert choose(full, last) == full
                assert choose(full, best) == best
            else:
                assert full == worst


def test_a_sweep_without_scores_extrapolates_none() -> None:
    assert extrapolate_scores(State(make_plan("halving", 4))) == []
