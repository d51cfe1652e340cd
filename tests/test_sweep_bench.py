"""bench.sweep: predictions and claims from measured seconds, and from kept sweeps."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench._accuracy.results import Results
from bench._sweep import halving
from bench._sweep.halving import BUDGETS, SEEDS, SETTINGS
from bench._sweep.sharing import ARMS, FULL, Found, build_claims
from hypothesis import given
from hypothesis import strategies as st

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
