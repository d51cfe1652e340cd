"""bench.sweep: predictions and claims from measured seconds, and from kept sweeps."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench._accuracy.results import Results
from bench._sweep import halving, makespan, optuna_race
from bench._sweep.halving import BUDGETS, SEEDS, SETTINGS
from bench._sweep.sharing import ARMS, FULL, Found, build_claims
from hypothesis import given
from hypothesis import strategies as st
from tests.sweep._sweeps import Scores, make_plan, run_sweep

SECONDS = st.floats(1e-4, 1.0)


def find(decode_s: float, step_s: float, beyond: float = 1.0) -> Found:
    """Seconds as they are if nothing but decoding and steps takes time; trials together take `beyond` times as long."""
    trials = ARMS[0].trials
    own_s = {k: [k * (decode_s + step_s)] * FULL.rounds for k in trials}
    shared_s = {k: [beyond * (decode_s + k * step_s)] * FULL.rounds for k in trials}
    return Found(arm=ARMS[0], decode_s=decode_s, step_s=step_s, own_s=own_s, shared_s=shared_s)


@given(SECONDS, SECONDS, st.floats(0.5, 2.0))
def test_the_prediction_is_the_gain_if_only_decoding_and_steps_take_time(
    decode_s: float, step_s: float, beyond: float
) -> None:
    claims = {claim.name: claim.value for claim in build_claims(find(decode_s, step_s), FULL)}
    assert claims["share_predicted"] == pytest.approx(1)
    # The gain rises with the number of trials up to 1 + d/s.
    assert 1 <= claims["share_gain_k4"] <= claims["share_gain_k8"] <= 1 + decode_s / step_s + 1e-9
    slower = {claim.name: claim.value for claim in build_claims(find(decode_s, step_s, beyond), FULL)}
    assert slower["share_predicted"] == pytest.approx(beyond)
    assert slower["share_gain_k4"] == pytest.approx(claims["share_gain_k4"] / beyond)


def keep(method: str, seed: int, error: float) -> dict[str, Any]:
    """A kept sweep."""
    errors = [error - 0.01, error, error + 0.01]
    return {"method": method, "seed": seed, "trials": 9, "own_error": error / 2, "errors": errors, "trials_s": 40.0}


def test_methods_are_compared_by_new_seeds_and_over_the_same_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed that has one of the two sweeps does not count; the winner's own score does not either."""
    results, done = Results(tmp_path / "kept.jsonl"), []
    errors = {"halving": 0.03, "random": 0.04}

    def run(folder: Path, packed: str, method: str, seed: int, **options: Any) -> dict[str, Any]:
        done.append((method, seed))
        return keep(method, seed, errors[method] + 0.001 * seed)

    monkeypatch.setattr(halving, "pack_digits", lambda folder, split: folder / "packed")
    monkeypatch.setattr(halving, "run_one", run)
    options = argparse.Namespace(quick=False, minutes=0)
    assert halving.compare_halving(tmp_path, options, results) == []
    assert done == [], "no time"
    results.add({**keep("halving", 0, 0.5), "settings": "other"})
    results.add({**keep("random", 99, 0.5), "settings": SETTINGS, "commit": "a"})
    options.minutes = None
    claims = {claim.name: claim.value for claim in halving.compare_halving(tmp_path, options, results)}
    assert sorted(done) == sorted((method, seed) for method in BUDGETS for seed in SEEDS)
    means = [statistics.fmean(errors[method] + 0.001 * seed for seed in SEEDS) for method in ("halving", "random")]
    assert claims["halving_vs_random"] == pytest.approx(means[0] / means[1])
    done.clear()
    halving.compare_halving(tmp_path, options, results)
    assert done == [], "all are kept"


def test_each_pair_of_data_method_and_network_occurs_in_one_square() -> None:
    cases = [case for square in makespan.SQUARES for case in makespan.list_cases(square)]
    for names in (("data", "method"), ("data", "network"), ("method", "network"), ("square", "data")):
        assert len({tuple(getattr(case, name) for name in names) for case in cases}) == len(cases) == 9
    for case in cases:
        assert {"photos": "photos:", "digits": "digits:", "cifar": "cifar:"}[case.data] in (makespan.__doc__ or "")


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=3))
def test_the_error_of_a_makespan_is_a_share_of_what_was_measured(seconds: list[tuple[float, float]]) -> None:
    """Errors of both signs do not cancel out."""
    judged = [
        {"name": "a", "predicted_s": one, "measured_s": other, "predicted_wall_s": 1.0, "wall_s": 1.0}
        for one, other in seconds
    ]
    (claim,) = makespan.build_claims(judged)
    assert claim.value == pytest.approx(statistics.fmean(abs(one - other) / other for one, other in seconds))


def test_only_the_judged_sweeps_count_and_each_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, done = Results(tmp_path / "kept.jsonl"), []

    def run(folder: Path, packed: Path, case: makespan.Case) -> dict[str, Any]:
        done.append(case)
        seconds = {"predicted_s": 9.0, "measured_s": 10.0, "predicted_wall_s": 5.0, "wall_s": 5.0, "load": 1.0}
        return {"square": case.square, "name": case.name, "trials": 9, **seconds}

    def pack(folder: Path, data: str) -> Path:
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(makespan, "pack_data", pack)
    monkeypatch.setattr(makespan, "measure", run)
    other = run(tmp_path, tmp_path, makespan.list_cases(0)[0])
    results.add({**other, "predicted_s": 99.0, "commit": "a"})
    done.clear()
    options = argparse.Namespace(quick=False, minutes=None)
    for _ in range(2):
        (claim,) = makespan.compare_predictions(tmp_path / "work", options, results)
        assert claim.value == pytest.approx(0.1)
    assert done == makespan.list_cases(makespan.JUDGED)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=5))
def test_an_arm_as_fast_and_as_good_as_the_other_gives_one_and_zero(
    pairs: list[tuple[float, float, float, float]],
) -> None:
    def build(epochs: float, core_s: float, test: float) -> dict[str, float]:
        return {"epochs": epochs, "core_s": core_s, "test": test}

    same = [{name: build(one, other, test) for name in ("headway", "optuna")} for one, other, test, _ in pairs]
    assert [claim.value for claim in optuna_race.build_claims(same)] == pytest.approx([1, 0])
    # Twice the epochs in half the seconds.
    better = [
        {"headway": build(2 * one, other / 2, test), "optuna": build(one, other, worse)}
        for one, other, test, worse in pairs
    ]
    ratio, points = (claim.value for claim in optuna_race.build_claims(better))
    assert ratio == pytest.approx(4)
    assert points == pytest.approx(100 * statistics.fmean(test - worse for _, _, test, worse in pairs))


def test_epochs_count_up_to_the_last_score(tmp_path: Path) -> None:
    plan = make_plan("halving", 4)
    run_sweep(tmp_path, plan, Scores(failing=0.0))
    assert optuna_race.count_epochs(tmp_path, 10) == pytest.approx(10 * float(plan.work))
    failing = tmp_path / "failing"
    failing.mkdir()
    run_sweep(failing, plan, lambda task: math.nan if task.rung else 1.0)
    first = plan.brackets[0]
    assert optuna_race.count_epochs(failing, 10) == pytest.approx(10 * float(first.sizes[0] * first.levels[0]))
