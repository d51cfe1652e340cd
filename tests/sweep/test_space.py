from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sweep._spaces import OPTIMIZERS, build_space, conditional_choices

from headway.core.errors import UsageError
from headway.sweep.space import Space

SEEDS = st.integers(0, 2**63 - 1)


def list_draws(space: Space, count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [space.draw(seed, trial) for trial in range(count)]


# Purity


@pytest.mark.parametrize("method", ["random", "sobol", "tpe"])
@given(SEEDS, st.permutations(list(OPTIMIZERS)), st.permutations(range(6)))
def test_a_draw_depends_on_seed_and_trial_alone(method: str, seed: int, order: list[str], trials: list[int]) -> None:
    expected = list_draws(build_space(OPTIMIZERS, method), 6, seed)
    # Another order of the file, and other trials before.
    space = build_space({key: OPTIMIZERS[key] for key in order}, method)
    found = {trial: space.draw(seed, trial) for trial in trials}
    assert [json.dumps(found[trial]) for trial in range(6)] == [json.dumps(one) for one in expected]


@given(SEEDS)
def test_another_parameter_in_the_file_changes_no_value(seed: int) -> None:
    few = {key: OPTIMIZERS[key] for key in ("optimizer.lr", "model.args.width")}
    for one, other in zip(
        list_draws(build_space(few), 5, seed), list_draws(build_space(OPTIMIZERS), 5, seed), strict=True
    ):
        assert one.items() <= other.items()


def test_draws_are_the_same_on_every_machine() -> None:
    parameters = {"optimizer.lr": {"log": [0.001, 1]}, "batch": {"choice": [32, 64, 128]}}
    # A sweep that goes on elsewhere, or with a later version, would otherwise get other values.
    assert list_draws(build_space(parameters), 3, seed=7) == [
        {"batch": 128, "optimizer.lr": 0.05037},
        {"batch": 32, "optimizer.lr": 0.1667},
        {"batch": 64, "optimizer.lr": 0.0138},
    ]
    assert list_draws(build_space(parameters, "sobol"), 3, seed=7) == [
        {"batch": 64, "optimizer.lr": 0.1405},
        {"batch": 32, "optimizer.lr": 0.001846},
        {"batch": 32, "optimizer.lr": 0.7187},
    ]


PROGRAM = """
import json, sys
from tests.sweep._spaces import OPTIMIZERS, build_space
space = build_space(OPTIMIZERS, sys.argv[1])
print(json.dumps([space.draw(3, trial) for trial in range(20)]))
"""


@pytest.mark.fresh
@pytest.mark.parametrize("method", ["random", pytest.param("sobol", marks=pytest.mark.check)])
def test_draws_are_the_same_in_every_process(method: str) -> None:
    here = json.dumps(list_draws(build_space(OPTIMIZERS, method), 20, seed=3))
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", PROGRAM, method]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


# Distribution


@pytest.mark.parametrize("method", ["random", "sobol"])
def test_draws_have_the_quantiles_of_their_ranges(method: str) -> None:
    parameters = {"optimizer.lr": {"log": [1e-4, 1]}, "optimizer.weight_decay": {"linear": [0, 1]}}
    draws = list_draws(build_space(parameters, method), 1000)
    rates = np.array([draw["optimizer.lr"] for draw in draws])
    decays = np.array([draw["optimizer.weight_decay"] for draw in draws])
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        # Four standard deviations of a share of 1,000 independent draws.
        tolerance = 4 * math.sqrt(share * (1 - share) / 1000)
        assert np.mean(rates < 10 ** (-4 + 4 * share)) == pytest.approx(share, abs=tolerance)
        assert np.mean(decays < share) == pytest.approx(share, abs=tolerance)
    # Streams of different names are independent.
    assert abs(np.corrcoef(np.log(rates), decays)[0, 1]) < 4 / math.sqrt(1000)


@given(SEEDS)
def test_the_points_of_sobol_are_even_in_every_dimension(seed: int) -> None:
    """Each of 16 equal parts gets one of 16 points: identity of a (0, 4, 1)-net, which scrambling keeps."""
    space = build_space({f"model.args.{name}": {"choice": list(range(16))} for name in "abc"}, "sobol")
    draws = list_draws(space, 32, seed)
    for key in space.keys:
        assert sorted(draw[key] for draw in draws[:16]) == list(range(16))
        assert sorted(draw[key] for draw in draws[16:]) == list(range(16))


def measure_discrepancy(points: np.ndarray) -> float:
    """Returns the L2 star discrepancy, by Warnock's formula (1972)."""
    n, dimensions = points.shape
    pairs = np.prod(1 - np.maximum(points[:, None], points[None]), axis=2).sum() / n**2
    return math.sqrt(3.0**-dimensions - np.prod(1 - points**2, axis=1).sum() * 2 ** (1 - dimensions) / n + pairs)


def test_the_points_of_sobol_fill_the_space_better_than_random_ones() -> None:
    parameters = {f"model.args.{name}": {"linear": [0, 1]} for name in "abc"}
    found: dict[str, list[float]] = {"random": [], "sobol": []}
    for method, values in found.items():
        space = build_space(parameters, method)
        for seed in range(5):
            points = [[draw[key] for key in space.keys] for draw in list_draws(space, 64, seed)]
            values.append(measure_discrepancy(np.array(points)))
    assert np.mean(found["sobol"]) < 0.5 * np.mean(found["random"])
    assert len(set(found["sobol"])) == 5, "the seed scrambles"


def test_the_default_dtype_changes_no_point_of_sobol() -> None:
    space = build_space({"model.args.a": {"linear": [0, 1e9]}}, "sobol")
    before, here = torch.get_default_dtype(), list_draws(space, 2)
    try:
        torch.set_default_dtype(torch.float64)
        assert list_draws(space, 2) == here
        torch.set_default_dtype(torch.bfloat16)
        assert list_draws(space, 2) == here
    finally:
        torch.set_default_dtype(before)


# Conditions


@given(conditional_choices(), SEEDS, st.sampled_from(["random", "sobol"]))
def test_a_parameter_is_there_exactly_if_its_conditions_hold(
    parameters: dict[str, Any], seed: int, method: str
) -> None:
    for draw in list_draws(build_space(parameters, method), 4, seed):
        for key, parameter in parameters.items():
            holds = all(draw.get(name) in allowed for name, allowed in parameter["when"].items())
            assert (key in draw) == holds


def test_a_condition_tells_true_from_one_and_a_list_from_its_entries() -> None:
    parameters = {
        "model.args.a": {"choice": [True, 1]},
        "model.args.b": {"choice": [2, 3], "when": {"model.args.a": 1}},
        "optimizer.betas": {"choice": [[0.9, 0.99], [0.9, 0.999]], "when": {"optimizer.name": "adamw"}},
        "optimizer.name": {"choice": ["adamw"]},
        "model.args.c": {"choice": [2, 3], "when": {"optimizer.betas": [0.9, 0.99]}},
    }
    for draw in list_draws(build_space(parameters), 20):
        assert ("model.args.b" in draw) == (draw["model.args.a"] is not True)
        assert ("model.args.c" in draw) == (draw["optimizer.betas"] == [0.9, 0.99])


# Grid


@given(conditional_choices())
def test_a_grid_has_every_cell_once(parameters: dict[str, Any]) -> None:
    space = build_space(parameters, "grid")
    assert space.size is not None
    cells = [json.dumps(space.draw(0, trial), sort_keys=True) for trial in range(space.size)]
    expected = set()
    for product in itertools.product(*(parameters[key]["choice"] for key in parameters)):
        values: dict[str, Any] = {}
        for key, value in zip(parameters, product, strict=True):
            if all(values.get(name) in allowed for name, allowed in parameters[key]["when"].items()):
                values[key] = value
        expected.add(json.dumps(values, sort_keys=True))
    assert len(cells) == len(set(cells))
    assert set(cells) == expected


def test_a_grid_ends() -> None:
    space = build_space({"optimizer.lr": {"log": [0.01, 1], "points": 3}, "batch": {"choice": [8, 16]}}, "grid")
    assert space.size == 6
    assert Counter(draw["optimizer.lr"] for draw in list_draws(space, 6)) == {0.01: 2, 0.1: 2, 1: 2}
    assert space.draw(0, 5) == space.draw(1, 5), "the seed does not count"
    with pytest.raises(
        UsageError, match=r"^there is no trial 6: they count from 0 and this grid has 6 cells\. Ask for"
    ):
        space.draw(0, 6)
    with pytest.raises(UsageError, match=r"^there is no trial -1: they count from 0\. "):
        build_space({"batch": {"choice": [8]}}).draw(0, -1)
    assert build_space({"batch": {"choice": [8]}}).size is None


def test_a_large_grid_is_not_listed() -> None:
    space = build_space({f"model.args.{name}": {"integer": [1, 1_000_000]} for name in "abcd"}, "grid")
    assert space.size == 10**24
    assert space.draw(0, 10**24 - 1) == dict.fromkeys(space.keys, 1_000_000)
    assert list(space.draw(0, 1).values()) == [1, 1, 1, 2]
