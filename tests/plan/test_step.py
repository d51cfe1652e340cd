"""Time of a step: limits that are known by hand, and properties of all steps."""

from __future__ import annotations

import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan._workload import workload

from headway.core.collectives import Link, Network
from headway.core.errors import UsageError
from headway.plan.losses import StepLosses
from headway.plan.step import (
    BUCKET_SIZES,
    GPU_ALGORITHMS,
    ComputeTime,
    PlannedBucket,
    build_cost_function,
    choose_buckets,
    compute_expected_maximum,
    list_gradients,
    overlap_exchange,
    pack_buckets,
    predict_step,
)


def network(hosts: int, per_host: int = 8, gb_s: float = 10.0) -> Network:
    return Network(hosts, per_host, Link(3e-6, 100e9), Link(14e-6, gb_s * 1e9), 300e9)


def test_alone_a_step_is_its_computing() -> None:
    found = predict_step(
        ComputeTime(0.01, 0.001), 64, make_even_buckets(1e8), network(1, 1), losses=StepLosses(jitter=0.1)
    )
    assert found.seconds == pytest.approx(0.074)
    assert (found.exposed_s, found.slowest_s) == (0.0, 0.0)


def test_an_exchange_is_exposed_by_what_is_left_after_the_backward_pass() -> None:
    """Three buckets of a second each, ready at 1, 2 and 3 s: the last one alone is seen. Of 2 s each, 4 s are."""
    three = [PlannedBucket(1.0, share / 3) for share in (1, 2, 3)]
    for each, exposed in ((1.0, 1.0), (2.0, 4.0), (0.1, 0.1)):
        found = overlap_exchange(three, 3.0, lambda nbytes, each=each: (each, "ring"))  # type: ignore[misc]
        assert found.exposed_s == pytest.approx(exposed)
        assert found.seconds == pytest.approx(3 * each)


@given(st.floats(1e3, 1e9), st.floats(1e6, 1e8), st.integers(1, 64))
def test_no_more_is_exposed_than_there_is_and_never_less_than_the_last_bucket(
    nbytes: float, each: float, hosts: int
) -> None:
    parts = make_even_buckets(nbytes, each=each)
    assert sum(one.nbytes for one in parts) == pytest.approx(nbytes)
    assert [one.ready for one in parts] == sorted(one.ready for one in parts)
    assert parts[-1].ready == pytest.approx(1.0)
    found = predict_step(ComputeTime(0.001, 0.001), 10, parts, network(hosts))
    assert 0 <= found.exposed_s <= found.exchange_s * (1 + 1e-9)


@given(st.integers(1, 200), st.integers(1, 200))
def test_more_nodes_never_make_a_step_shorter(one: int, other: int) -> None:
    small, large = sorted((one, other))
    seconds = [
        predict_step(
            ComputeTime(0.01, 1e-3), 32, make_even_buckets(1e8), network(n), losses=StepLosses(jitter=0.02)
        ).seconds
        for n in (small, large)
    ]
    assert seconds[1] >= seconds[0] * 0.999  # algorithms change, and their counts of rounds


def test_gradients_of_several_micro_batches_are_exchanged_once() -> None:
    one, four = (
        predict_step(ComputeTime(0.01, 1e-3), 32, make_even_buckets(1e9), network(16), accumulate=k) for k in (1, 4)
    )
    assert four.exposed_s == one.exposed_s
    assert four.sample_s == pytest.approx(4 * one.sample_s)
    assert four.communication_ratio == pytest.approx(one.communication_ratio / 4)


def test_gradients_come_in_the_order_in_which_they_are_made() -> None:
    found = list_gradients(workload())
    assert sum(one.nbytes for one in found) == workload().step.exchange.gradient_bytes
    assert found[0].nbytes == 4e6  # the head's
    assert [one.ready for one in found] == sorted(one.ready for one in found)
    assert found[-1].ready == pytest.approx(1)


@given(st.floats(1, 1e8))
def test_buckets_hold_at_least_so_much_and_all_of_it(nbytes: float) -> None:
    found = pack_buckets(list_gradients(workload()), nbytes)
    assert sum(one.nbytes for one in found) == workload().step.exchange.gradient_bytes
    assert all(one.nbytes >= nbytes for one in found[:-1])
    assert found[-1].ready == pytest.approx(1)
    assert len(pack_buckets(list_gradients(workload()), 1e9)) == 1


def test_buckets_are_as_large_as_suits_the_links() -> None:
    """Slow to begin with: few large ones."""
    far = Network(16, 1, Link(0.0, 1e12), Link(5e-3, 1e9), 1e12)
    near = Network(16, 1, Link(0.0, 1e12), Link(1e-6, 1e9), 1e12)
    counts = [
        len(choose_buckets(list_gradients(workload()), one, backward_s=0.02, among=("ring",))) for one in (far, near)
    ]
    assert counts[0] < counts[1]
    assert len(choose_buckets(list_gradients(workload()), near, nbytes=10**9)) == 1


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e11), st.floats(0, 0.1))
@settings(deadline=None, max_examples=30)
def test_no_size_of_buckets_leaves_less(latency: float, bandwidth: float, backward_s: float) -> None:
    net = Network(16, 8, Link(1e-6, 1e11), Link(latency, bandwidth), 1e12)
    cost = build_cost_function(net, GPU_ALGORITHMS, 1.0)
    layers = list_gradients(workload())
    best = overlap_exchange(choose_buckets(layers, net, backward_s=backward_s), backward_s, cost).exposed_s
    assert best <= min(
        overlap_exchange(pack_buckets(layers, size), backward_s, cost).exposed_s for size in BUCKET_SIZES
    )


def test_without_overlap_all_of_the_exchange_is_seen() -> None:
    found = predict_step(ComputeTime(0.01, 1e-3), 32, make_even_buckets(1e8), network(8), losses=StepLosses(hidden=0.0))
    assert found.exposed_s == pytest.approx(found.exchange_s)
    assert found.exposed_s > predict_step(ComputeTime(0.01, 1e-3), 32, make_even_buckets(1e8), network(8)).exposed_s


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (8, 1.4236), (100, 2.5076), (1000, 3.2414)]
)
def test_the_expected_maximum_of_normals(count: int, expected: float) -> None:
    """Values of order statistics (Harter 1961)."""
    assert compute_expected_maximum(count) == pytest.approx(expected, abs=2e-4)


def test_what_is_no_step_is_said() -> None:
    with pytest.raises(UsageError, match="samples above 0 and 1 micro-batch or more, not 0"):
        predict_step(ComputeTime(0.0, 1e-3), 0, [], network(1))
    with pytest.raises(UsageError, match="1 number or more, not 0"):
        compute_expected_maximum(0)
