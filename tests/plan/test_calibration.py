"""Calibration of a step's parameters: what runs tell is found, what they do not tell stays likely."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.calibration import (
    PARAMETERS,
    RUN_ERROR,
    MeasuredRun,
    StepParameters,
    calibrate,
    compute_root,
)
from headway.plan.cluster import load_clusters
from headway.plan.losses import LossPriors, StepLosses, load_priors
from headway.plan.step import ComputeTime, predict_step

PRIORS = load_priors("field")
LIKELY_S = 5e-3
"""Fixed time of a step."""
THIN = load_clusters()["p40-100gbe"]
BUCKETS = make_even_buckets(440e6)
MOVES = st.lists(st.floats(-2, 2), min_size=len(PARAMETERS), max_size=len(PARAMETERS))


def predict(parameters: StepParameters, run: MeasuredRun) -> float:
    network = THIN.build_network(max(1, run.ranks // THIN.devices))
    network = replace(network, ranks_per_host=min(run.ranks, THIN.devices))
    return predict_step(parameters.compute, run.samples_per_rank, BUCKETS, network, losses=parameters.losses).seconds


def measure(truth: StepParameters, *scales: tuple[int, float]) -> list[MeasuredRun]:
    return [
        MeasuredRun(ranks, each, ranks * each / predict(truth, MeasuredRun(ranks, each, 1.0))) for ranks, each in scales
    ]


def find(runs: list[MeasuredRun], priors: LossPriors = PRIORS) -> StepParameters:
    return calibrate(runs, predict, priors, LIKELY_S).parameters


def off(found: StepParameters, truth: StepParameters, ranks: int, each: float = 64) -> float:
    run = MeasuredRun(ranks, each, 1.0)
    return abs(predict(found, run) / predict(truth, run) - 1)


@given(st.floats(1e-3, 2e-2), st.floats(1e-3, 1e-2), st.floats(0, 0.05), st.floats(0.05, 0.95))
@settings(deadline=None, max_examples=15)
def test_measured_runs_are_explained(fixed: float, sample: float, contention: float, hidden: float) -> None:
    truth = StepParameters(ComputeTime(fixed, sample), replace(PRIORS.losses, contention=contention, hidden=hidden))
    found = find(measure(truth, (1, 64), (8, 64), (16, 64)))
    assert max(off(found, truth, ranks) for ranks in (1, 8, 16)) < 2 * RUN_ERROR


def test_one_run_moves_the_compute_time_alone() -> None:
    (run,) = runs = [MeasuredRun(1, 64, 800)]
    found = find(runs)
    assert predict(found, run) == pytest.approx(run.seconds, rel=1e-3)
    assert found.losses == PRIORS.losses
    assert found.compute.fixed_s == pytest.approx(PRIORS.fixed * LIKELY_S, rel=0.02)


def test_a_run_on_a_whole_node_tells_what_its_devices_lose_together() -> None:
    truth = StepParameters(ComputeTime(5e-3, 3e-3), replace(PRIORS.losses, contention=0.06))
    alone, node = find(measure(truth, (1, 64))), find(measure(truth, (1, 64), (8, 64)))
    assert off(node, truth, 32) < 0.03 < off(alone, truth, 32)


def test_two_batches_tell_the_fixed_time() -> None:
    truth = StepParameters(ComputeTime(0.03, 1e-3), PRIORS.losses)
    assert find(measure(truth, (1, 8), (1, 256))).compute.fixed_s == pytest.approx(0.03, rel=0.15)


def test_more_runs_leave_less_open() -> None:
    truth = StepParameters(ComputeTime(5e-3, 3e-3), PRIORS.losses)
    scales = ((1, 64.0), (8, 64.0), (16, 64.0), (16, 16.0))
    variances = [
        np.diag(calibrate(measure(truth, *scales[:count]), predict, PRIORS, LIKELY_S).covariance) for count in (1, 2, 4)
    ]
    assert (variances[0][1:] <= np.square(PRIORS.spreads) * (1 + 1e-9)).all()
    for fewer, more in pairwise(variances):
        assert (more <= fewer * (1 + 1e-6)).all()


def test_a_spread_of_0_fixes_a_loss() -> None:
    fixed = replace(PRIORS, losses=replace(PRIORS.losses, hidden=0.5), spreads=(*PRIORS.spreads[:-1], 0.0))
    truth = StepParameters(ComputeTime(5e-3, 3e-3), replace(PRIORS.losses, hidden=0.1))
    assert find(measure(truth, (1, 64), (16, 64)), fixed).losses.hidden == pytest.approx(0.5, abs=1e-3)


@given(MOVES)
@settings(deadline=None)
def test_a_move_and_its_opposite_are_none(by: list[float]) -> None:
    start = StepParameters(ComputeTime(5e-3, 3e-3), StepLosses(0.01, 0.005, 1.0, 0.8, 0.4))
    there = start.move(by)
    assert 0 < there.losses.hidden < 1
    back = there.move([-one for one in by])
    assert back.compute.sample_s == pytest.approx(start.compute.sample_s)
    assert back.compute.fixed_s == pytest.approx(start.compute.fixed_s)
    for name in ("contention", "jitter", "inside", "between", "hidden"):
        assert getattr(back.losses, name) == pytest.approx(getattr(start.losses, name))


@given(MOVES)
@settings(deadline=None)
def test_all_or_nothing_hidden_stays(by: list[float]) -> None:
    for hidden in (0.0, 1.0):
        start = StepParameters(ComputeTime(5e-3, 3e-3), StepLosses(hidden=hidden))
        assert start.move(by).losses.hidden == hidden


@given(st.lists(st.floats(-3, 3), min_size=12, max_size=12))
@settings(deadline=None)
def test_the_root_of_a_covariance_gives_it(values: list[float]) -> None:
    """Also of one that is not of full rank."""
    factor = np.array(values).reshape(4, 3)
    covariance = factor @ factor.T
    root = compute_root(covariance)
    assert np.allclose(root @ root.T, covariance, atol=1e-9)


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(UsageError, match="at least one measured run"):
        find([])
    with pytest.raises(UsageError, match="above 0"):
        find([MeasuredRun(1, 64, 0)])
