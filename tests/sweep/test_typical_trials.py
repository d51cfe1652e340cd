"""The trials that are measured before a sweep."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.space import Space
from headway.sweep.space_recipe import SpaceRecipe
from headway.sweep.typical_trials import MEASURED_TRIALS, choose_typical_trials

RATE: dict[str, Any] = {"optimizer.lr": {"log": [0.001, 1.0]}}
WIDTH: dict[str, Any] = {"model.args.width": {"choice": [8, 16, 32]}}


def build_space(parameters: dict[str, Any]) -> Space:
    return Space(SpaceRecipe.model_validate({"parameters": parameters}))


@given(seed=st.integers(0, 99), trials=st.integers(1, 60))
def test_one_trial_stands_for_all_if_they_cost_the_same(seed: int, trials: int) -> None:
    assert choose_typical_trials(build_space(RATE), seed, trials) == {0: trials}


@given(seed=st.integers(0, 99), trials=st.integers(1, 60))
def test_each_kind_is_measured_once_and_counts_as_often_as_it_occurs(seed: int, trials: int) -> None:
    space = build_space(RATE | WIDTH)
    widths = [space.suggest(seed, trial)["model.args.width"] for trial in range(trials)]
    chosen = choose_typical_trials(space, seed, trials)
    assert {widths[trial]: count for trial, count in chosen.items()} == {one: widths.count(one) for one in widths}


@given(seed=st.integers(0, 99), trials=st.integers(2 * MEASURED_TRIALS + 4, 60))
def test_the_first_trials_are_a_sample_of_many_kinds(seed: int, trials: int) -> None:
    """Two batches may be equal by chance, which is no reason to count them twice."""
    space = build_space({"batch": {"log_integer": [8, 2**20]}})
    assert choose_typical_trials(space, seed, trials) == dict.fromkeys(range(MEASURED_TRIALS), 1)
