"""Message by message, and closed form: the same where both apply."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan._message_simulation import schedule_messages, simulate_all_reduce, simulate_exchange, simulate_messages

from headway.core import collectives
from headway.core.collectives import Algorithm, Link, Network
from headway.core.errors import UsageError
from headway.plan.step import ComputeTime, PlannedBucket, predict_step

ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "double_tree", "two_dimensional")


def network(hosts: int, per_host: int, between: float = 40e9) -> Network:
    return Network(hosts, per_host, Link(3e-6, 100e9), Link(14e-6, between), 300e9)


flat = st.one_of(st.tuples(st.integers(2, 16), st.just(1)), st.tuples(st.just(1), st.integers(2, 16)))


@given(flat, st.floats(1, 1e9), st.sampled_from(("ring", "two_dimensional")))
def test_on_one_level_both_are_equal(shape: tuple[int, int], nbytes: float, algorithm: Algorithm) -> None:
    net = network(*shape)
    assert simulate_all_reduce(algorithm, nbytes, net) == pytest.approx(
        collectives.predict_seconds(algorithm, nbytes, net)
    )


@given(st.integers(1, 4), st.floats(1, 1e9), st.booleans())
def test_a_tree_of_a_power_of_two_too(power: int, nbytes: float, inside: bool) -> None:
    """Otherwise the closed form counts a round more for who has no partner."""
    net = network(1, 2**power) if inside else network(2**power, 1)
    assert simulate_all_reduce("tree", nbytes, net) == pytest.approx(collectives.predict_seconds("tree", nbytes, net))


@given(st.integers(2, 8), st.integers(2, 8), st.floats(1e5, 1e9), st.sampled_from(("ring", "two_dimensional")))
def test_on_two_levels_they_are_close(hosts: int, per_host: int, nbytes: float, algorithm: Algorithm) -> None:
    """Messages hide sums behind other messages, and a ring's fast hops behind its slow ones, which the closed form
    adds up (in 1,500 such networks it is up to 1.46 times as long); never less is left than the hops' latencies alone,
    or the bytes over the slowest way."""
    net = network(hosts, per_host)
    line = collectives.predict_cost(algorithm, replace(net, reduce_bytes_s=math.inf))
    found = simulate_all_reduce(algorithm, nbytes, net)
    assert max(line.latency_s, nbytes * line.s_per_byte) <= found * (1 + 1e-9)
    assert found < 1.1 * collectives.predict_seconds(algorithm, nbytes, net)


@given(st.integers(4, 64), st.floats(1e4, 1e9))
@settings(deadline=None, max_examples=40)
@pytest.mark.check
def test_a_double_tree_is_near_to_its_closed_form(hosts: int, nbytes: float) -> None:
    """The closed form lets no chunk come down before the last has gone up (the simulation takes down to 0.42 of it),
    and no chunk wait for a path that another one occupies (up to 1.36)."""
    net = network(hosts, 1)
    found, closed = (
        simulate_all_reduce("double_tree", nbytes, net),
        collectives.predict_seconds("double_tree", nbytes, net),
    )
    assert found >= 2 * (hosts - 1) / hosts * nbytes / 40e9
    assert found >= 2 * math.floor(math.log2(hosts)) * 14e-6
    assert 0.4 < found / closed < 1.5


@given(st.integers(2, 32))
def test_two_trees_share_the_work_of_an_even_number_of_hosts(half: int) -> None:
    """A host with two children in one tree has none in the other: none sends more than all of the bytes twice."""
    made, out = schedule_messages("double_tree", 1.0, network(2 * half, 1)), [0.0] * 2 * half
    for message in made.messages:
        out[message.sender] += message.nbytes
    assert max(out) <= 2


def count_sums(algorithm: Algorithm, net: Network) -> list[float]:
    """Count, for each rank, the ranks whose values it has in its sum at the end.

    Messages are followed in the order in which they complete. A message carries all that its sender has of its part.
    """
    made, ranks = schedule_messages(algorithm, 1.0, net), net.ranks
    got = {one.number: one for one in made.messages}
    values: dict[int, frozenset[int]] = {}
    for message in made.messages:
        carried = set[int]() if message.after else {message.sender}
        for before in message.after:
            carried |= values[before]
        if message.adds:
            assert message.receiver not in carried  # nothing is added twice
            carried |= {message.receiver}
        values[message.number] = frozenset(carried)
    return [
        len(frozenset[int]().union(*(values[n] for n in got if got[n].receiver == rank), {rank}))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(1, 2), (1, 5), (3, 1), (2, 4), (4, 3)])
def test_every_rank_ends_with_the_sum_of_all(algorithm: Algorithm, shape: tuple[int, int]) -> None:
    net, ranks = network(*shape), shape[0] * shape[1]
    assert count_sums(algorithm, net) == [ranks] * ranks
    made = schedule_messages(algorithm, 1.0, net)
    sent = {one.number: one for one in made.messages}
    for message in made.messages:
        assert all(sent[before].receiver == message.sender for before in message.after)
    received = [sum(one.nbytes for one in made.messages if one.receiver == rank) for rank in range(ranks)]
    if "tree" in algorithm:
        assert sum(received) == pytest.approx(2 * (ranks - 1))
    else:  # 2 (n - 1) / n of the array on each level, which is the least there can be
        hosts, per_host = shape
        of_ring = 2 * (ranks - 1) / ranks
        of_two = 2 * (per_host - 1) / per_host + 2 * (hosts - 1) / hosts / per_host
        assert received == pytest.approx([of_ring if algorithm == "ring" else of_two] * ranks)


@given(flat, st.lists(st.floats(1e4, 1e8), min_size=1, max_size=4), st.floats(1e-4, 1.0))
@settings(deadline=None, max_examples=40)
def test_the_exchange_of_a_step_is_the_closed_form_where_ranks_are_alike(
    shape: tuple[int, int], sizes: list[float], backward: float
) -> None:
    net = network(*shape)
    shares = [(at + 1) / len(sizes) for at in range(len(sizes))]
    ready = [[share * backward] * net.ranks for share in shares]
    found = simulate_exchange("ring", sizes, ready, net)
    filled = [PlannedBucket(size, share) for size, share in zip(sizes, shares, strict=True)]
    expected = predict_step(ComputeTime(0.0, backward), 1, filled, net, among=("ring",), backward=1.0)
    assert found.done[-1] == pytest.approx(backward + expected.exposed_s)
    assert found.ends == pytest.approx([found.done[-1]] * net.ranks)


def test_one_rank_that_is_late_with_a_bucket_delays_it_and_those_after_it() -> None:
    net, sizes = network(4, 1), [one.nbytes for one in make_even_buckets(6e7)]
    ready = [[0.1 * (at + 1)] * 4 for at in range(len(sizes))]
    on_time = simulate_exchange("ring", sizes, ready, net)
    ready[1][2] += 0.5
    late = simulate_exchange("ring", sizes, ready, net)
    assert late.done[0] == on_time.done[0]
    assert late.done[1] == pytest.approx(on_time.done[1] + 0.5, rel=0.02)
    assert late.done[2] >= on_time.done[2]


def test_messages_over_one_way_wait_for_each_other() -> None:
    """Two ranks of a host send to two of another one at once: together they take as long as one after the other."""
    net = network(2, 2, between=1e9)
    found = simulate_messages(schedule_messages("two_dimensional", 4e6, net), net)
    across = sorted((one.begins, one.ends) for one in found if (one.message.sender < 2) != (one.message.receiver < 2))
    out = [one for one in found if one.message.sender < 2 <= one.message.receiver]
    spans = sorted((one.begins, one.begins + one.message.nbytes / 1e9) for one in out)
    assert len(across) == 8
    assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(spans))


def test_who_comes_late_delays_all() -> None:
    net = network(4, 1)
    made = schedule_messages("ring", 1e6, net)
    on_time = max(one.done for one in simulate_messages(made, net))
    late = max(one.done for one in simulate_messages(made, net, begins={2: 1.0}))
    assert late == pytest.approx(1.0 + on_time, rel=0.01)


def test_what_is_not_simulated_is_said() -> None:
    with pytest.raises(UsageError, match="up to 64 ranks, not 72"):
        schedule_messages("ring", 1.0, network(9, 8))
    for algorithm in set(get_args(Algorithm)) - set(ALGORITHMS):
        with pytest.raises(UsageError, match="has no algorithm"):
            schedule_messages(algorithm, 1.0, network(2, 2))
    assert schedule_messages("ring", 1.0, network(1, 1)).messages == []
    assert simulate_all_reduce("ring", 1.0, network(1, 1)) == 0.0
