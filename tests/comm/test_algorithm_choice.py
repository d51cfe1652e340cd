"""Choice: the cheapest algorithm by the model and the trials, the same on every rank."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks

from headway.comm.algorithm_choice import (
    OUTLIER_RATIO,
    AlgorithmChooser,
    AlgorithmTrial,
    compute_corrections,
    get_wire_ratio,
    list_candidates,
    run_trials,
)
from headway.comm.buckets import LAST_BUCKET_DIVISOR
from headway.comm.comm_recipe import Algorithm
from headway.comm.communicator import ALGORITHMS, Communicator
from headway.core.collectives import Link, Network, predict_phases, predict_seconds
from headway.core.world import World

MB = 1_000_000
patient = settings(deadline=None)  # a busy machine is no failure
SLOW = Network(2, 2, Link(2e-4, 1e9), Link(3e-4, 25e6), 5e9)
"""Two hosts of two ranks, 200 Mbit/s between them."""

networks = st.builds(
    Network,
    st.integers(1, 8),
    st.integers(1, 8),
    st.builds(Link, st.floats(1e-6, 1e-3), st.floats(1e8, 1e11)),
    st.builds(Link, st.floats(1e-5, 1e-2), st.floats(1e6, 1e10)),
    st.floats(1e9, 1e11),
)


def trials(
    network: Network, among: tuple[Algorithm, ...] = ALGORITHMS, factor: float = 1.0
) -> dict[Any, AlgorithmTrial]:
    """As the model would have it."""
    return {name: AlgorithmTrial(predict_seconds(name, 0, network), factor) for name in among}


@patient
@given(networks, st.integers(1, 100 * MB))
def test_where_the_model_is_right_the_cheapest_is_taken(network: Network, nbytes: int) -> None:
    chooser = AlgorithmChooser(network, trials(network), 0, phased=False)
    expected = {name: predict_seconds(name, nbytes, network) for name in ALGORITHMS}
    found = chooser.predict_seconds(nbytes)
    for name in ALGORITHMS:
        assert found[name] == pytest.approx(expected[name])
    assert expected[chooser(nbytes)] == pytest.approx(min(expected.values()))


@patient
@given(networks, st.integers(1, 50 * MB), st.sampled_from(["fp32", "fp16", "bf16"]))
def test_the_choice_depends_on_nothing_but_the_numbers(network: Network, nbytes: int, wire: Any) -> None:
    one, other = (AlgorithmChooser(network, trials(network), 44 * MB, wire=wire) for _ in range(2))
    assert one(nbytes) == other(nbytes)
    assert one.bucket_bytes == other.bucket_bytes


def test_slices_take_a_third_less_than_the_ring_over_two_hosts_of_two() -> None:
    chooser = AlgorithmChooser(SLOW, trials(SLOW), 44 * MB)
    assert chooser(4 * MB) == "two_dimensional"
    found = chooser.predict_seconds(32 * MB)
    assert found["ring"] / found["two_dimensional"] == pytest.approx(1.5, rel=0.02)


def test_half_of_the_bytes_take_half_of_the_time_between_hosts() -> None:
    assert [get_wire_ratio(wire) for wire in ("fp32", "fp16", "bf16")] == [1.0, 0.5, 0.5]
    whole, half = (
        AlgorithmChooser(SLOW, trials(SLOW), 44 * MB, wire=wire).predict_seconds(32 * MB) for wire in ("fp32", "fp16")
    )
    for name in ALGORITHMS:
        assert whole[name] / half[name] == pytest.approx(2, rel=0.02)


@patient
@given(networks, st.integers(2, 64))
def test_in_a_train_a_bucket_costs_its_slowest_phase(network: Network, buckets: int) -> None:
    """Besides its latency; the train as a whole, its first and last bucket included, costs no less."""
    chooser = AlgorithmChooser(network, trials(network), 0, bucket_bytes=4 * MB)
    found = chooser.predict_seconds(4 * MB)
    for name in ALGORITHMS:
        first, second, third = predict_phases(name, 4 * MB, network)
        train = first + second + third + (buckets - 1) * max(second, first + third)
        latencies = buckets * predict_seconds(name, 0, network)
        assert buckets * found[name] <= train + latencies + 1e-12
        assert found[name] <= predict_seconds(name, 4 * MB, network) * (1 + 1e-9)


def test_the_last_bucket_costs_all_of_its_phases() -> None:
    network = Network(2, 4, Link(1e-4, 40e6), Link(1e-4, 100e6), 5e9)
    chooser = AlgorithmChooser(network, trials(network), 0, bucket_bytes=4 * MB)
    last = 4 * MB // LAST_BUCKET_DIVISOR
    assert chooser.predict_seconds(last)["two_dimensional"] == pytest.approx(
        predict_seconds("two_dimensional", last, network)
    )
    assert chooser.predict_seconds(last + 1)["two_dimensional"] < chooser.predict_seconds(last)["two_dimensional"]
    one_after_another = AlgorithmChooser(network, trials(network), 0, bucket_bytes=4 * MB, phased=False)
    assert one_after_another.predict_seconds(4 * MB)["two_dimensional"] == pytest.approx(
        predict_seconds("two_dimensional", 4 * MB, network)
    )


def test_what_a_trial_found_counts() -> None:
    tried = trials(SLOW)
    assert AlgorithmChooser(SLOW, tried, 44 * MB)(4 * MB) == "two_dimensional"
    tried["two_dimensional"] = AlgorithmTrial(tried["two_dimensional"].latency_s, 2.0)
    tried["leader"] = AlgorithmTrial(tried["leader"].latency_s, 3.0)
    assert AlgorithmChooser(SLOW, tried, 44 * MB)(4 * MB) == "ring"
    tried["ring"] = AlgorithmTrial(1.0, 1.0)
    assert AlgorithmChooser(SLOW, tried, 44 * MB)(4 * MB) == "two_dimensional"
    assert AlgorithmChooser(SLOW, trials(SLOW, ("ring", "tree")), 44 * MB)(4 * MB) == "ring"


def test_a_fixed_algorithm_is_taken_for_every_bucket() -> None:
    for name in ALGORITHMS:
        chooser = AlgorithmChooser(SLOW, trials(SLOW), 44 * MB, algorithm=name)
        assert {chooser(nbytes) for nbytes in (100, 10_000, MB, 100 * MB)} == {name}
    untried = AlgorithmChooser(SLOW, {}, 44 * MB, algorithm="leader")
    assert untried(MB) == "leader"
    assert untried.predict_seconds(MB)["leader"] == pytest.approx(predict_seconds("leader", MB, SLOW), rel=0.2)


def test_a_world_of_one_has_a_choice_too() -> None:
    alone = Network(1, 1, Link(0, math.inf), Link(0, math.inf), 1e10)
    chooser = AlgorithmChooser(alone, {}, 44 * MB)
    assert chooser(MB) == "ring"
    assert chooser.predict_seconds(MB) == {"ring": 0}
    assert "1 bucket (1 by ring)" in chooser.describe([MB])


def test_buckets_are_as_large_as_given_or_as_the_costs_say() -> None:
    assert AlgorithmChooser(SLOW, trials(SLOW), 44 * MB, bucket_bytes=3 * MB).bucket_bytes == 3 * MB
    cheap, dear = (
        AlgorithmChooser(SLOW, {"ring": AlgorithmTrial(latency, 1.0)}, 44 * MB, algorithm="ring").bucket_bytes
        for latency in (1e-3, 4e-3)
    )
    assert dear == pytest.approx(2 * cheap, rel=1e-3)
    assert cheap == pytest.approx(math.sqrt(44e6 * 1e-3 / (1.5 / 25e6)), rel=0.02)


def test_the_sentence_says_what_was_chosen_and_what_else_would_cost() -> None:
    tried = trials(SLOW)
    tried["tree"] = AlgorithmTrial(1e-4, 1.0)
    text = AlgorithmChooser(SLOW, tried, 44 * MB, bucket_bytes=4 * MB).describe([4 * MB, 4 * MB, 4 * MB, 1000])
    assert text.startswith(
        "Gradients are summed in 4 buckets (3 by two_dimensional, 1 by tree). Predicted for the largest, 4 MB: "
    )
    costs = text[text.index("Predicted") :]
    assert (
        costs.index("two_dim") < costs.index("leader") < costs.index("ring") < costs.index("tree")
    )  # the cheapest first
    assert AlgorithmChooser(SLOW, tried, 44 * MB).describe([]) == "There are no gradients to sum."


def test_the_table_marks_what_is_chosen() -> None:
    chooser = AlgorithmChooser(SLOW, trials(SLOW), 0, phased=False)
    heading, *rows = chooser.build_rows()
    assert heading == ("predicted ms", *ALGORITHMS)
    for size, row in zip((1 << 16, 1 << 20, 16 << 20), rows, strict=True):
        marked = [name for name, cell in zip(heading[1:], row[1:], strict=True) if "*" in cell]
        assert marked == [chooser(size)]


def test_algorithms_share_a_factor_unless_one_is_clearly_slower() -> None:
    modelled: dict[Algorithm, float] = dict.fromkeys(ALGORITHMS, 1.0)
    tiny: dict[Algorithm, float] = dict.fromkeys(ALGORITHMS, 0.001)
    whole: dict[Algorithm, float] = {"ring": 1.05, "tree": 1.4, "leader": 1.06, "two_dimensional": 1.1}
    found = compute_corrections(tiny, whole, modelled)
    common = found["ring"].factor
    assert common == pytest.approx(1.06, rel=0.02)
    assert found["leader"].factor == found["two_dimensional"].factor == common
    assert found["tree"].factor == pytest.approx(1.399)
    assert all(trial.latency_s == 0.001 for trial in found.values())


@patient
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(1e-6, 1)), min_size=4, max_size=4))
def test_whatever_was_timed_the_factors_are_numbers_to_work_with(times: list[tuple[float, float, float]]) -> None:
    tiny, whole, modelled = (dict(zip(ALGORITHMS, column, strict=True)) for column in zip(*times, strict=True))
    found = compute_corrections(tiny, whole, modelled)
    least = min(trial.factor for trial in found.values())
    assert least >= 0.25
    for name, trial in found.items():
        assert trial.factor == least or trial.factor > least * OUTLIER_RATIO
        assert trial.latency_s == tiny[name]


def tried_out(rank: Rank) -> tuple[Any, ...]:
    communicator = Communicator(rank.world)
    network = Network(len(rank.world.hosts), 2, Link(1e-4, 1e9), Link(1e-4, 1e9), 1e9)
    names = list_candidates(communicator)
    found = [run_trials(communicator, network, wire=wire, budget_s=0.02) for wire in ("fp32", "fp16")]
    digest = communicator.digest
    communicator.close()
    return names, found, digest


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ((0, 0), ("ring", "tree")),
        ((0, 1), ("ring", "tree")),
        ((0, 1, 1), ("ring", "tree", "leader")),
        ((0, 0, 1, 1), ALGORITHMS),
    ],
)
def test_every_rank_gets_the_same_trials_of_all_that_differ(hosts: tuple[int, ...], names: tuple[str, ...]) -> None:
    results = run_ranks(len(hosts), tried_out, hosts=hosts)
    assert all(result == results[0] for result in results)
    found_names, found, _ = results[0]
    assert found_names == names
    for tried in found:
        assert tuple(tried) == names
        assert all(trial.latency_s > 0 and trial.factor >= 0.25 for trial in tried.values())


def test_nothing_is_tried_alone() -> None:
    communicator = Communicator(World.create_single(torch.device("cpu")))
    assert run_trials(communicator, Network(1, 1, Link(0, 1), Link(0, 1), 1)) == {}
    communicator.close()
