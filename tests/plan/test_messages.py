"""Message by message, and closed form: the same where both apply."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import collectives
from headway.core.collectives import Algorithm, Link, Network
from headway.core.errors import UsageError
from headway.plan.messages import Message, plan, seconds, simulate

ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "two_dimensional")


def network(hosts: int, per_host: int, between: float = 40e9) -> Network:
    return Network(hosts, per_host, Link(3e-6, 100e9), Link(14e-6, between), 300e9)


flat = st.one_of(st.tuples(st.integers(2, 16), st.just(1)), st.tuples(st.just(1), st.integers(2, 16)))


@given(flat, st.floats(1, 1e9), st.sampled_from(("ring", "two_dimensional")))
def test_on_one_level_both_are_equal(shape: tuple[int, int], nbytes: float, algorithm: Algorithm) -> None:
    net = network(*shape)
    assert seconds(algorithm, nbytes, net) == pytest.approx(collectives.seconds(algorithm, nbytes, net))


@given(st.integers(1, 4), st.floats(1, 1e9), st.booleans())
def test_a_tree_of_a_power_of_two_too(power: int, nbytes: float, inside: bool) -> None:
    """Otherwise the closed form counts a round more for who has no partner."""
    net = network(1, 2**power) if inside else network(2**power, 1)
    assert seconds("tree", nbytes, net) == pytest.approx(collectives.seconds("tree", nbytes, net))


@given(st.integers(2, 8), st.integers(2, 8), st.floats(1e5, 1e9), st.sampled_from(("ring", "two_dimensional")))
def test_on_two_levels_they_are_close(hosts: int, per_host: int, nbytes: float, algorithm: Algorithm) -> None:
    """Messages hide sums behind other messages, which the closed form adds; and pipelines fill."""
    net = network(hosts, per_host)
    assert 0.7 < seconds(algorithm, nbytes, net) / collectives.seconds(algorithm, nbytes, net) < 1.3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(1, 2), (1, 5), (3, 1), (2, 4), (4, 3)])
def test_every_rank_ends_with_the_sum_of_all(algorithm: Algorithm, shape: tuple[int, int]) -> None:
    """What each message carries is followed: sets of ranks whose values are in it, for each part of the array."""
    net, ranks = network(*shape), shape[0] * shape[1]
    made = plan(algorithm, 1.0, net)
    sent: dict[int, Message] = {one.number: one for one in made.messages}
    for message in made.messages:
        assert all(sent[before].receiver == message.sender for before in message.after)
    if algorithm == "tree":
        knows = [{rank} for rank in range(ranks)]
        for message in made.messages:
            knows[message.receiver] |= knows[message.sender]
        assert all(known == set(range(ranks)) for known in knows)
    received = [sum(one.nbytes for one in made.messages if one.receiver == rank) for rank in range(ranks)]
    if algorithm == "ring":  # 2 (n - 1) / n of the array, which is the least there can be
        assert received == pytest.approx([2 * (ranks - 1) / ranks] * ranks)


def test_messages_over_one_way_wait_for_each_other() -> None:
    """Two ranks of a host send to two of another one at once: together they take as long as one after the other."""
    net = network(2, 2, between=1e9)
    found = simulate(plan("two_dimensional", 4e6, net), net)
    across = sorted((one.begins, one.ends) for one in found if (one.message.sender < 2) != (one.message.receiver < 2))
    out = [one for one in found if one.message.sender < 2 <= one.message.receiver]
    spans = sorted((one.begins, one.begins + one.message.nbytes / 1e9) for one in out)
    assert len(across) == 8
    assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(spans))


def test_who_comes_late_delays_all() -> None:
    net = network(4, 1)
    made = plan("ring", 1e6, net)
    on_time = max(one.done for one in simulate(made, net))
    late = max(one.done for one in simulate(made, net, begins={2: 1.0}))
    assert late == pytest.approx(1.0 + on_time, rel=0.01)


def test_what_is_not_simulated_is_said() -> None:
    with pytest.raises(UsageError, match="up to 64 ranks, not 72"):
        plan("ring", 1.0, network(9, 8))
    for algorithm in set(get_args(Algorithm)) - set(ALGORITHMS):
        with pytest.raises(UsageError, match="not simulated"):
            plan(algorithm, 1.0, network(2, 2))
    assert plan("ring", 1.0, network(1, 1)).messages == []
    assert seconds("ring", 1.0, network(1, 1)) == 0.0
