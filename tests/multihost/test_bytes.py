"""Sums over several hosts: what crosses between them is what the formula says, and the sums are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._network.ranks import Ranks

from headway.core.collectives import Algorithm, Link, Network, count_bytes_out_of_host

pytestmark = [pytest.mark.root, pytest.mark.check]

NUMBERS = 1 << 18
WIRES = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5}
ERRORS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}
"""Of a sum, over its largest number: two roundings of 11, and of 8, bits."""

LAYOUTS = [Layout(2, 2), Layout(2, 2, "round_robin"), Layout(3, 1), Layout(2, 3, "round_robin"), Layout(3, 2)]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    asked = {"arms": "tests.multihost._sums", "numbers": NUMBERS}
    layout: Layout = request.param
    with Hosts(layout.hosts, rate_bits_s=None) as hosts, Ranks(hosts, layout, asked) as found:
        yield found


def test_namespaces_of_one_machine_are_hosts_and_the_interface_is_found(ranks: Ranks) -> None:
    layout = ranks.layout
    hosts = [[rank for rank in range(layout.size) if layout.host(rank) == host] for host in range(layout.hosts)]
    for rank, facts in enumerate(ranks.facts):
        assert facts == {"hosts": hosts, "interface": "eth0", "local_rank": layout.local_rank(rank)}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", ["ring", "tree", "leader", "two_dimensional"])
def test_bytes_and_sums(ranks: Ranks, algorithm: Algorithm, wire: str) -> None:
    link = Link(1e-4, 1e9)
    network = Network(ranks.layout.hosts, ranks.layout.per_host, link, link, 1e10)
    formula = count_bytes_out_of_host(algorithm, 4 * NUMBERS, network, wire_ratio=WIRES[wire])
    turn = ranks.turn(f"{algorithm} {wire}")
    assert max(turn.payload) == pytest.approx(formula, rel=0.02)
    (first,) = turn.answers[0]
    assert first <= ERRORS[wire]
    assert turn.answers == [[first]] * ranks.layout.size
