"""Ranks and buckets: what closed forms say where they apply, and what they leave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.workload import WorkloadWindow
from headway.plan.cluster import load_clusters
from headway.plan.job import TrainingJob
from headway.plan.losses import StepLosses
from headway.plan.scaling import predict_scaling
from headway.plan.step import ComputeTime, predict_step
from headway.plan.step_simulation import TRACED_RANKS, StepScenario, simulate_prediction, simulate_steps
from headway.plan.strips import SplitNetwork, SplitWindow

# Four ranks that share an image exchange rows of 100 MB twice.
WINDOW = WorkloadWindow(rows=8, row_bytes=10**8, kernel=3, padding=1)
SPLIT = SplitNetwork((SplitWindow(WINDOW), SplitWindow(WINDOW)))
COMPUTE, BUCKETS = ComputeTime(0.015, 6e-4), tuple(make_even_buckets(51e6))


def scenario(nodes: int = 4, **changes: Any) -> StepScenario:
    network = load_clusters()["dgx-1"].build_network(nodes)
    return StepScenario(**{"network": network, "compute": COMPUTE, "samples": 52, "buckets": BUCKETS, **changes})


@given(st.integers(1, 40), st.floats(1, 300), st.floats(1e5, 1e9))
@settings(deadline=None)
def test_where_all_ranks_are_alike_it_is_the_closed_form(nodes: int, samples: float, nbytes: float) -> None:
    buckets = make_even_buckets(nbytes)
    found = simulate_steps(scenario(nodes, samples=samples, buckets=buckets, steps=3))
    expected = predict_step(COMPUTE, samples, buckets, load_clusters()["dgx-1"].build_network(nodes))
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.exposed_s == pytest.approx(expected.exposed_s, abs=1e-9)
    assert found.slowest_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("nodes", [1, 16, 128])
def test_by_chance_the_slowest_is_as_slow_as_expected(nodes: int) -> None:
    found = simulate_steps(scenario(nodes, jitter=0.02, steps=400))
    expected = predict_step(
        COMPUTE, 52, BUCKETS, load_clusters()["dgx-1"].build_network(nodes), losses=StepLosses(jitter=0.02)
    )
    assert found.slowest_s.mean() == pytest.approx(expected.slowest_s, rel=0.1)
    assert found.step_s == pytest.approx(expected.seconds, rel=0.02)


def test_the_parts_of_a_step_are_all_of_it() -> None:
    found = simulate_steps(scenario(jitter=0.05, input_s=0.05, input_jitter=0.2, hiccup=(0.01, 0.1)))
    parts = found.input_wait_s + found.computing_s + found.slowest_s + found.exposed_s
    assert found.seconds == pytest.approx(parts)
    assert sum(found.slowest_counts.values()) == len(found.seconds)


def test_a_slow_loader_sets_the_pace_and_a_fast_one_nothing() -> None:
    alone = simulate_steps(scenario()).step_s
    assert simulate_steps(scenario(input_s=2 * alone)).step_s == pytest.approx(2 * alone)
    assert simulate_steps(scenario(input_s=0.5 * alone)).step_s == pytest.approx(alone)


def test_batches_made_ahead_absorb_what_a_loader_varies() -> None:
    base = scenario(1, steps=400, input_jitter=0.6)
    base = replace(base, input_s=0.8 * simulate_steps(scenario(1)).step_s)
    waits = [simulate_steps(replace(base, prefetch_batches=ahead)).input_wait_s.mean() for ahead in (1, 2, 8, 32)]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < waits[0] / 4


def test_one_slow_rank_is_who_all_wait_for() -> None:
    found = simulate_steps(scenario(slow={5: 0.2}, jitter=0.01))
    assert found.slowest_counts == {5: 50}
    assert found.step_s > simulate_steps(scenario(jitter=0.01)).step_s + 0.15 * COMPUTE.sample_s * 52
    assert {one["pid"] for one in found.events if one["ph"] == "M"} >= {5}


def test_a_hiccup_of_one_holds_all() -> None:
    found = simulate_steps(scenario(16, hiccup=(1 / 128, 1.0), steps=400))
    expected = 1 - (1 - 1 / 128) ** 128
    assert np.mean(found.seconds > 1) == pytest.approx(expected, abs=0.07)


def test_the_trace_shows_the_slowest_ranks_in_order(tmp_path: Path) -> None:
    found = simulate_steps(scenario(slow={3: 0.3, 17: 0.2}, jitter=0.01, input_s=0.06))
    found.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranks = [one["pid"] for one in events if one["ph"] == "M"]
    assert ranks[:2] == [3, 17]
    assert len(ranks) == TRACED_RANKS
    for rank in ranks:
        computing = [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (rank, "compute")]
        ends = 0.0
        for one in computing:  # nothing overlaps on a row
            assert one["ts"] >= ends - 0.01
            ends = one["ts"] + one["dur"]
    names = {one["name"] for one in events}
    assert {"forward", "backward", "wait for a batch", "bucket 0"} <= names


def test_the_same_seed_gives_the_same_steps() -> None:
    first, again, other = (simulate_steps(scenario(jitter=0.05, seed=seed)).seconds for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_a_plan_is_simulated_as_it_is_planned() -> None:
    cluster = load_clusters()["dgx-1"]
    for changes in (
        {},
        {"accumulate": 4},
        {"wire_ratio": 0.5, "backward": 0.4},
        {"per_device": None, "batch": 8192.0},
        {"per_device": None, "batch": 1000.0, "gradients": BUCKETS},  # some devices have three samples, others two
        {"per_device": None, "batch": 120.0, "split": SPLIT},  # four devices share an image
    ):
        values: dict[str, Any] = {"per_device": 52.0, "gradients": tuple(make_even_buckets(4e9)), **changes}
        job = TrainingJob(
            samples=10**6,
            encoded_bytes=None,
            compute=COMPUTE,
            epochs=90.0,
            **values,
        )
        answer = predict_scaling(job, cluster, [60])[0]
        assert simulate_prediction(job, cluster, answer).step_s == pytest.approx(answer.step.seconds, rel=0.01), changes


def test_a_trace_is_of_so_many_ranks_at_most() -> None:
    job = TrainingJob(samples=10**6, encoded_bytes=None, compute=COMPUTE, gradients=BUCKETS, epochs=90.0, per_device=52)
    answer = predict_scaling(job, load_clusters()["dgx-1"], [20_000])[0]
    with pytest.raises(UsageError, match="up to 131,072 ranks, not 160,000"):
        simulate_prediction(job, load_clusters()["dgx-1"], answer)


def test_thousands_of_ranks_are_simulated_by_bucket() -> None:
    found = simulate_steps(scenario(512, buckets=make_even_buckets(400e6, each=4e6), jitter=0.01, steps=20))
    assert len(found.seconds) == 20
    assert len({one["pid"] for one in found.events}) == TRACED_RANKS


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"samples": 0}, "samples"),
        ({"steps": 0}, "steps"),
        ({"prefetch_batches": 0}, "prefetch_batches"),
        ({"jitter": 1.0}, "jitter"),
        ({"jitter": float("nan")}, "jitter"),
        ({"hiccup": (1.5, 0.1)}, "hiccup"),
        ({"input_s": -1.0}, "input_s"),
        ({"slow": {99: 0.1}}, "slow"),
    ],
)
def test_what_is_out_of_range_is_said(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError, match=f"^{where}: .* is out of range"):
        simulate_steps(scenario(**changes))
