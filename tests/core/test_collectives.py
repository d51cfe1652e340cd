from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.collectives import (
    LARGEST_BUCKET,
    SMALLEST_BUCKET,
    Algorithm,
    LinearCost,
    Link,
    Network,
    RankOrder,
    choose_algorithm,
    choose_bucket_for_cost,
    count_bytes_out_of_host,
    predict_cost,
    predict_phases,
    predict_seconds,
)
from headway.core.errors import UsageError

ALL: tuple[Algorithm, ...] = get_args(Algorithm)
HIERARCHICAL: tuple[Algorithm, ...] = ("leader", "two_dimensional", "torus")
ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)
NOTHING = Link(0.0, math.inf)
SLOW = Link(0.0, 25e6)  # 200 Mbit/s
MIB = 1 << 20
patient = settings(deadline=None)  # a busy machine is no failure

links = st.builds(Link, st.floats(1e-7, 1e-2), st.floats(1e5, 1e12))
networks = st.builds(Network, st.integers(1, 9), st.integers(1, 9), links, links, st.floats(1e8, 1e12))
sizes = st.floats(0, 1e9)
ratios = st.sampled_from([0.25, 0.5, 1.0])
algorithms = st.sampled_from(ALL)


def flat(ranks: int, a: float = 1e-4, b: float = 1e-9) -> Network:
    """One rank a host, and sums that cost nothing."""
    return Network(ranks, 1, NOTHING, Link(a, 1 / b), math.inf)


@patient
@given(algorithms, sizes, links, links, st.sampled_from(ORDERS))
def test_one_rank_costs_nothing(algorithm: Algorithm, n: float, inside: Link, between: Link, order: RankOrder) -> None:
    alone = Network(1, 1, inside, between, 1e9)
    assert predict_seconds(algorithm, n, alone, order=order) == 0
    assert count_bytes_out_of_host(algorithm, n, alone, order=order) == 0


@patient
@given(algorithms, sizes, sizes, networks, ratios, st.sampled_from(ORDERS))
def test_more_bytes_take_no_less_time(
    algorithm: Algorithm, n: float, more: float, network: Network, ratio: float, order: RankOrder
) -> None:
    for cost in (predict_seconds, count_bytes_out_of_host):
        few = cost(algorithm, n, network, wire_ratio=ratio, order=order)
        many = cost(algorithm, n + more, network, wire_ratio=ratio, order=order)
        assert 0 <= few <= many * (1 + 1e-12)


@patient
@given(algorithms, sizes, networks, ratios, st.sampled_from(ORDERS))
def test_smaller_messages_and_faster_links_take_no_more_time(
    algorithm: Algorithm, n: float, network: Network, ratio: float, order: RankOrder
) -> None:
    whole = predict_seconds(algorithm, n, network, order=order)
    assert predict_seconds(algorithm, n, network, wire_ratio=ratio, order=order) <= whole * (1 + 1e-12)
    for place in ("inside", "between"):
        link = getattr(network, place)
        faster = {**vars(network), place: Link(link.latency_s / 2, link.bandwidth_bytes_s * 2)}
        assert predict_seconds(algorithm, n, Network(**faster), order=order) <= whole * (1 + 1e-12)


@patient
@given(algorithms, sizes, networks, ratios, st.sampled_from(ORDERS))
def test_the_link_of_a_host_is_never_faster_than_its_bandwidth(
    algorithm: Algorithm, n: float, network: Network, ratio: float, order: RankOrder
) -> None:
    out = count_bytes_out_of_host(algorithm, n, network, wire_ratio=ratio, order=order)
    needed = out / network.between.bandwidth_bytes_s
    assert predict_seconds(algorithm, n, network, wire_ratio=ratio, order=order) >= needed * (1 - 1e-9)


@patient
@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 1e9), ratios)
def test_a_sum_needs_each_host_to_send_its_share(hosts: int, per_host: int, n: float, ratio: float) -> None:
    """No all-reduce gets by with less than 2 (M - 1) / M n out of the busiest host; the hierarchical ones need that."""
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    least = 2 * (hosts - 1) / hosts * n * ratio
    for algorithm in ("ring", "tree", "halving_doubling", "double_tree"):
        for order in ORDERS:
            assert count_bytes_out_of_host(algorithm, n, network, wire_ratio=ratio, order=order) >= least * (1 - 1e-9)
    for algorithm in HIERARCHICAL:
        assert count_bytes_out_of_host(algorithm, n, network, wire_ratio=ratio) == pytest.approx(least)


@patient
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6), sizes)
def test_two_ranks_send_half_and_get_half(a: float, b: float, n: float) -> None:
    """With two ranks, the ring, halving-doubling and the hierarchical algorithms all cost 2 (a + n b / 2)."""
    for network in (flat(2, a, b), Network(1, 2, Link(a, 1 / b), NOTHING, math.inf)):
        expected = 2 * (a + n / 2 * b)
        for algorithm in ("ring", "halving_doubling", "two_dimensional", "torus"):
            assert predict_seconds(algorithm, n, network) == pytest.approx(expected)
        assert predict_seconds("tree", n, network) == pytest.approx(2 * (a + n * b))
    assert predict_seconds("leader", n, flat(2, a, b)) == pytest.approx(expected)


@patient
@given(st.integers(2, 40), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6), sizes)
def test_on_a_flat_network_the_formulas_are_those_of_the_books(ranks: int, a: float, b: float, n: float) -> None:
    network, deep = flat(ranks, a, b), math.ceil(math.log2(ranks))
    ring = 2 * (ranks - 1) * a + 2 * (ranks - 1) / ranks * n * b
    assert predict_seconds("ring", n, network) == pytest.approx(ring)
    assert predict_seconds("ring", n, network, order="round_robin") == pytest.approx(ring)
    for algorithm in ("leader", "two_dimensional"):  # no host has anything to sum inside
        assert predict_seconds(algorithm, n, network) == pytest.approx(ring)
    assert predict_seconds("tree", n, network) == pytest.approx(2 * deep * (a + n * b))
    assert predict_seconds("parameter_server", n, network) == pytest.approx(2 * a + 2 * n * b)
    halving = 2 * math.floor(math.log2(ranks)) * a
    power = 1 << math.floor(math.log2(ranks))
    folded = 2 * (a + n * b) if power != ranks else 0
    expected = halving + 2 * (power - 1) / power * n * b + folded
    assert predict_seconds("halving_doubling", n, network) == pytest.approx(expected)


@patient
@given(st.integers(2, 40), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6), sizes, st.floats(1, 1e6))
def test_the_double_tree_takes_its_best_number_of_chunks(
    ranks: int, a: float, b: float, n: float, chunks: float
) -> None:
    network, deep = flat(ranks, a, b), math.ceil(math.log2(ranks))
    best = predict_seconds("double_tree", n, network)

    def predict(chunks: float) -> float:
        return 2 * (deep + chunks) * (a + n * b / chunks)

    assert best <= predict(chunks) * (1 + 1e-9)
    count = math.sqrt(deep * n * b / a)
    if count > 1:
        assert best == pytest.approx(2 * (math.sqrt(deep * a) + math.sqrt(n * b)) ** 2)
        assert best == pytest.approx(predict(count))
    else:
        assert best == pytest.approx(predict(1))


@patient
@given(st.integers(2, 6), st.integers(1, 6), sizes)
def test_a_ring_out_of_order_crosses_with_every_rank(hosts: int, per_host: int, n: float) -> None:
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    block, turn = (count_bytes_out_of_host("ring", n, network, order=order) for order in ORDERS)
    assert block == pytest.approx(2 * (network.ranks - 1) / network.ranks * n)
    assert turn == pytest.approx(per_host * block)
    assert predict_seconds("ring", n, network, order="round_robin") == pytest.approx(
        per_host * predict_seconds("ring", n, network)
    )


@patient
@given(st.integers(1, 8), st.integers(1, 8), sizes, links, links)
def test_in_a_ring_in_order_the_slowest_chunk_makes_the_latency(
    hosts: int, per_host: int, n: float, inside: Link, between: Link
) -> None:
    """Each one begins at another rank, and makes 2 (N - 1) hops."""
    network = Network(hosts, per_host, inside, between, math.inf)
    ranks = hosts * per_host
    hop = [(inside if (to + 1) % per_host and ranks > 1 else between).latency_s for to in range(ranks)]
    if hosts == 1:
        hop = [inside.latency_s] * ranks
    ways = [sum(hop[(first + at) % ranks] for at in range(2 * (ranks - 1))) for first in range(ranks)]
    assert predict_seconds("ring", 0, network) == pytest.approx(max(ways))


def tree_messages(hosts: int, per_host: int, order: RankOrder) -> list[tuple[int, int]]:
    """(child's host, parent's host) of every edge: a rank's parent is the rank without its lowest bit."""
    ranks = hosts * per_host
    at = [rank // per_host if order == "block" else rank % hosts for rank in range(ranks)]
    return [(at[rank], at[rank & (rank - 1)]) for rank in range(1, ranks)]


@patient
@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from(ORDERS))
def test_the_tree_sends_what_its_edges_say(hosts: int, per_host: int, order: RankOrder) -> None:
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    crossing = [edge for edge in tree_messages(hosts, per_host, order) if edge[0] != edge[1]]
    busiest = max(sum(host in edge for edge in crossing) for host in range(hosts))
    assert count_bytes_out_of_host("tree", 1000, network, order=order) == 1000 * busiest


@patient
@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from(ORDERS))
def test_messages_of_one_step_of_the_tree_share_the_link_of_a_host(hosts: int, per_host: int, order: RankOrder) -> None:
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    busiest: dict[int, int] = {}
    for rank, (child, parent) in enumerate(tree_messages(hosts, per_host, order), start=1):
        step = rank & -rank  # the lowest bit of the child's rank
        of_step = [(c, p) for r, (c, p) in enumerate(tree_messages(hosts, per_host, order), 1) if r & -r == step]
        sent, got = (
            sum(edge[end] == host != edge[1 - end] for edge in of_step) for end, host in ((0, child), (1, parent))
        )
        busiest[step] = max(busiest.get(step, 0), sent, got)
    assert predict_seconds("tree", 25e6, network, order=order) == pytest.approx(2 * sum(busiest.values()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 4), (4, 2), (8, 8)])
def test_halving_fills_the_links_between_hosts_and_no_more(hosts: int, per_host: int, order: RankOrder) -> None:
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    out = count_bytes_out_of_host("halving_doubling", MIB, network, order=order)
    assert out == pytest.approx(2 * (hosts - 1) / hosts * MIB * (1 if order == "block" else per_host))
    assert predict_seconds("halving_doubling", MIB, network, order=order) == pytest.approx(out / 25e6)


@patient
@given(st.integers(1, 6), st.integers(1, 6), sizes, links, links)
def test_servers_on_the_ranks_own_hosts_tell_each_other_their_parts(
    hosts: int, per_host: int, n: float, inside: Link, between: Link
) -> None:
    """Gradients of the other hosts' parts, and as much of the result; ranks send all of theirs inside."""
    network = Network(hosts, per_host, inside, between, math.inf)
    far = 2 * (between.latency_s * (hosts > 1) + (hosts - 1) / hosts * n / between.bandwidth_bytes_s)
    near = 2 * (inside.latency_s + per_host * n / inside.bandwidth_bytes_s) if per_host > 1 else 0.0
    assert predict_seconds("shared_server", n, network) == pytest.approx(far + near)
    assert count_bytes_out_of_host("shared_server", n, network) == pytest.approx(2 * (hosts - 1) / hosts * n)


def test_sums_cost_what_each_rank_adds() -> None:
    """Over links without a price: a rank of the ring and of the slices adds one part of each other rank's array."""
    network = Network(2, 4, NOTHING, NOTHING, 1e9)
    expected = {"ring": 7 / 8, "two_dimensional": 3 / 4 + 1 / 2 / 4, "torus": 3 / 4 + 1 / 2 / 4, "leader": 1 + 1 / 2}
    expected |= {"tree": 3, "halving_doubling": 7 / 8, "double_tree": 1, "parameter_server": 4}
    for algorithm, arrays in expected.items():
        assert predict_seconds(algorithm, 1e9, network) == pytest.approx(arrays), algorithm  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "per_host", "algorithm", "order", "milliseconds"),
    [
        (2, 2, "ring", "block", 252),
        (2, 2, "ring", "round_robin", 503),
        (2, 2, "two_dimensional", "block", 168),
        (2, 2, "leader", "block", 168),
        (2, 4, "ring", "block", 294),
        (2, 4, "ring", "round_robin", 1174),
        (2, 4, "two_dimensional", "block", 168),
        (4, 2, "ring", "block", 294),
        (4, 2, "two_dimensional", "block", 252),
    ],
)
def test_four_mib_over_200_mbit_a_host(
    hosts: int, per_host: int, algorithm: Algorithm, order: RankOrder, milliseconds: int
) -> None:
    """Measured on such links: 268, 548, 184, 180, 358, 1254, 205, 331 and 286 ms (headers, and the processor)."""
    network = Network(hosts, per_host, NOTHING, SLOW, math.inf)
    assert predict_seconds(algorithm, 4 * MIB, network, order=order) * 1e3 == pytest.approx(milliseconds, rel=5e-3)


@patient
@given(networks, sizes, ratios)
def test_slices_are_never_worse_than_the_whole_through_leaders(network: Network, n: float, ratio: float) -> None:
    leader, slices, torus = (predict_seconds(name, n, network, wire_ratio=ratio) for name in HIERARCHICAL)
    assert torus <= slices * (1 + 1e-12)
    assert slices <= leader * (1 + 1e-12)


def test_only_what_goes_between_hosts_shrinks_in_the_hierarchical_forms() -> None:
    inside = Network(1, 4, Link(1e-5, 1e9), SLOW, math.inf)
    for algorithm in HIERARCHICAL:
        assert predict_seconds(algorithm, MIB, inside, wire_ratio=0.5) == predict_seconds(algorithm, MIB, inside)
    for algorithm in ("ring", "tree", "halving_doubling", "double_tree"):
        assert predict_seconds(algorithm, MIB, inside, wire_ratio=0.5) < predict_seconds(algorithm, MIB, inside)


@patient
@given(networks, sizes, ratios)
def test_phases_add_up(network: Network, n: float, ratio: float) -> None:
    for algorithm in ALL:
        first, second, third = predict_phases(algorithm, n, network, wire_ratio=ratio)
        assert first + second + third == pytest.approx(predict_seconds(algorithm, n, network, wire_ratio=ratio))
        if algorithm not in HIERARCHICAL:
            assert first == third == 0


@patient
@given(networks, sizes, ratios)
def test_the_choice_is_the_cheapest(network: Network, n: float, ratio: float) -> None:
    seconds, algorithm = choose_algorithm(n, network, wire_ratio=ratio)
    among: tuple[Algorithm, ...] = ("ring", "tree", "leader", "two_dimensional")
    costs = {name: predict_seconds(name, n, network, wire_ratio=ratio) for name in among}
    assert seconds == min(costs.values()) == costs[algorithm]


def test_of_equal_algorithms_the_first_is_taken() -> None:
    assert choose_algorithm(MIB, flat(2), among=("two_dimensional", "ring"))[1] == "two_dimensional"
    assert choose_algorithm(MIB, flat(2), among=("ring", "two_dimensional"))[1] == "ring"
    assert choose_algorithm(0, Network(1, 1, NOTHING, NOTHING, 1.0))[1] == "ring"


def test_small_ones_go_by_the_tree_and_large_ones_by_slices() -> None:
    network = Network(4, 4, Link(2e-4, 1e9), Link(3e-4, 25e6), 5e9)
    assert choose_algorithm(1024, network)[1] == "tree"
    assert choose_algorithm(8 * MIB, network)[1] == "two_dimensional"
    one_host = Network(1, 8, Link(2e-4, 1e9), NOTHING, 5e9)
    assert choose_algorithm(64, one_host, among=("ring", "tree"))[1] == "tree"
    assert choose_algorithm(64 * MIB, one_host, among=("ring", "tree"))[1] == "ring"


@patient
@given(networks, st.floats(1e3, 1e10), st.sampled_from(ALL), st.floats(0.1, 10))
def test_the_bucket_has_the_least_exposed_time(
    network: Network, total: float, algorithm: Algorithm, other: float
) -> None:
    cost = predict_cost(algorithm, network)
    best = choose_bucket_for_cost(total, cost)
    assert SMALLEST_BUCKET <= best <= LARGEST_BUCKET
    free = cost.s_per_byte and math.sqrt(total * cost.latency_s / cost.s_per_byte)
    if SMALLEST_BUCKET < free < LARGEST_BUCKET:

        def taken(b: float) -> float:
            return total / b * cost.latency_s + total * cost.s_per_byte + cost.seconds(b)

        assert taken(best) <= taken(best * other) * (1 + 1e-6)


def test_buckets_of_a_network_without_a_price_are_large() -> None:
    assert choose_bucket_for_cost(1e9, LinearCost(0.0, 0.0)) == LARGEST_BUCKET
    assert choose_bucket_for_cost(1e9, LinearCost(0.0, 1e-9)) == SMALLEST_BUCKET
    ring = predict_cost("ring", Network(2, 2, NOTHING, Link(5e-4, 25e6), math.inf))
    assert choose_bucket_for_cost(44e6, ring) == pytest.approx(1049e3, rel=0.01)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UsageError, match="no algorithm 'star'"):
        predict_cost("star", flat(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [(-1e-9, 1.0), (0.0, 0.0), (0.0, -1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_what_is_no_link_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="is not a link"):
        Link(*values)


@pytest.mark.parametrize("values", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, math.nan)])
def test_what_is_no_network_is_refused(values: tuple[int, int, float]) -> None:
    hosts, ranks, speed = values
    with pytest.raises(UsageError, match="is not a network"):
        Network(hosts, ranks, NOTHING, NOTHING, speed)


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert Link(1e-3, 1e6).seconds(1e6) == pytest.approx(1.001)
