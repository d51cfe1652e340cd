"""Switches and cables: NVIDIA's published designs, and what holds of every fabric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.fabric import RADIXES, Fabric, design_fabric

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("nodes", "switches", "between", "left", "ratio"),
    [
        (12, {36: 2}, 12, 0, 2.0),
        (36, {216: 1}, 0, 72, 1.0),
        (144, {216: 4, 324: 1}, 288, 36, 2.0),
    ],
)
def test_the_designs_for_dgx_1(nodes: int, switches: dict[int, int], between: int, left: int, ratio: float) -> None:
    found = design_fabric(nodes)
    assert found.switches == switches
    assert (found.node_cables, found.switch_cables, found.links_left) == (4 * nodes, between, left)
    assert found.oversubscription == ratio


def test_groups_of_6_and_pods_of_36() -> None:
    assert design_fabric(12).nodes_per_leaf == 6
    assert design_fabric(144).nodes_per_leaf == 36


@pytest.mark.parametrize(("nodes", "leaves", "cores", "between"), [(12, 3, 2, 54), (36, 8, 6, 144), (144, 32, 18, 576)])
def test_without_oversubscription(nodes: int, leaves: int, cores: int, between: int) -> None:
    """36-port switches: the links of each leaf divide evenly among the cores."""
    found = design_fabric(nodes, leaf=36, oversubscription=1)
    assert (found.leaves, found.cores, found.switch_cables) == (leaves, cores, between)


def test_what_one_switch_holds_needs_no_other() -> None:
    assert design_fabric(9).switches == {36: 1}
    assert design_fabric(54).switches == {216: 1}
    assert design_fabric(36, oversubscription=1).switches == {216: 1}


@pytest.mark.parametrize("leaf", [36, 40, 64, 128, 216, 324])
@pytest.mark.parametrize("ports", [4, 8])
def test_a_node_hangs_on_one_leaf_where_leaves_are_oversubscribed(leaf: int, ports: int) -> None:
    found = design_fabric(100, ports, leaf=leaf)
    assert found.down % ports == 0
    assert found.oversubscription <= 2


def try_fabric(nodes: int, ports: int, leaf: int | None, ratio: float) -> Fabric | None:
    try:
        return design_fabric(nodes, ports, leaf=leaf, oversubscription=ratio)
    except UsageError:
        return None


@dataclass(frozen=True)
class Cable:
    """Cable from one port to another. Ports are counted from 1."""

    a: str
    a_port: int
    b: str
    b_port: int


def list_cables(fabric: Fabric) -> Iterator[Cable]:
    """All cables, those of nodes first."""
    for number in range(fabric.node_cables):
        node, port = divmod(number, fabric.ports_per_node)
        leaf, at = divmod(number, fabric.down)
        yield Cable(f"node {node + 1}", port + 1, f"leaf {leaf + 1}", at + 1)
    if fabric.leaves == 2:
        for number in range(fabric.up):
            at = fabric.down + number + 1
            yield Cable("leaf 1", at, "leaf 2", at)
    elif fabric.leaves > 2:
        # A leaf deals its links out to the cores in turn, so that each core gets as many.
        each = fabric.up // fabric.cores
        for leaf in range(fabric.leaves):
            for number in range(fabric.up):
                core, turn = number % fabric.cores, number // fabric.cores
                yield Cable(f"leaf {leaf + 1}", fabric.down + number + 1, f"core {core + 1}", leaf * each + turn + 1)


anything = (
    st.integers(1, 1500),
    st.integers(2, 8),
    st.sampled_from((None, *RADIXES)),
    st.sampled_from(RATIOS),
)


@given(*anything)
def test_every_port_has_one_cable_and_every_leaf_its_links(
    nodes: int, ports: int, leaf: int | None, ratio: float
) -> None:
    found = try_fabric(nodes, ports, leaf, ratio)
    if found is None:
        return
    ends = [end for one in list_cables(found) for end in ((one.a, one.a_port), (one.b, one.b_port))]
    assert len(set(ends)) == len(ends) == 2 * (found.node_cables + found.switch_cables)
    most = {"node": ports, "leaf": found.leaf_ports, "core": found.core_ports or 0}
    assert all(1 <= port <= most[name.split()[0]] for name, port in ends)
    assert Counter(name for name, _ in ends if name.startswith("node")) == Counter(
        {f"node {number + 1}": ports for number in range(nodes)}
    )
    down, up = Counter[str](), Counter[tuple[str, str]]()
    for one in list_cables(found):
        if one.a.startswith("node"):
            down[one.b] += 1
        else:
            up[one.a, one.b] += 1
            if found.leaves == 2:
                up[one.b, one.a] += 1
    for name, used in down.items():
        links = [count for (leaf_name, _), count in up.items() if leaf_name == name]
        assert found.leaves == 1 or used <= ratio * sum(links)
        assert len(set(links)) <= 1  # as many to one core as to another
    assert len(down) == found.leaves
    assert len({core for _, core in up}) == (2 if found.leaves == 2 else found.cores)
    assert found.oversubscription <= ratio


@given(*anything)
def test_more_nodes_never_take_less(nodes: int, ports: int, leaf: int | None, ratio: float) -> None:
    fewer, more = try_fabric(nodes, ports, leaf, ratio), try_fabric(nodes + 1, ports, leaf, ratio)
    if more is None:
        return
    assert fewer is not None
    assert more.node_cables > fewer.node_cables
    sold = [sum(each * many for each, many in one.switches.items()) for one in (fewer, more)]
    assert sold[1] >= sold[0]
    if leaf is not None:
        assert sum(more.switches.values()) >= sum(fewer.switches.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "a facility has 1 node or more, not 0"),
        ({"nodes": 4, "ports_per_node": 1}, "at least 2 ports of the fabric, not 1"),
        ({"nodes": 4, "oversubscription": 0.5}, "between 1 .none. and 8, not 0.5"),
        ({"nodes": 4, "oversubscription": 9}, "not 9"),
        ({"nodes": 4, "leaf": 48}, "no switch of 48 ports.* Take one of 36, 40"),
        ({"nodes": 4, "core": 1}, "no switch of 1 ports"),
        ({"nodes": 11_665}, "11,665 nodes with 4 ports each do not fit .* Up to 11,664 do"),
        ({"nodes": 217, "leaf": 36}, "Up to 216 do"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        design_fabric(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaf", [None, *RADIXES])
@pytest.mark.parametrize("ratio", RATIOS)
def test_as_many_as_are_said_to_fit_do(leaf: int | None, ratio: float) -> None:
    with pytest.raises(UsageError) as refused:
        design_fabric(10**6, leaf=leaf, oversubscription=ratio)
    most = int(str(refused.value).split("Up to ")[1].split(" do")[0].replace(",", ""))
    assert design_fabric(most, leaf=leaf, oversubscription=ratio).nodes == most
    assert try_fabric(most + 1, 4, leaf, ratio) is None
