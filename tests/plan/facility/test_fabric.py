"""Switches and cables: NVIDIA's published designs, and what holds of every fabric."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.facility.fabric import RADIXES, Fabric, design_fabric

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
    assert design_fabric(12).nodes_per_pod == 6
    assert design_fabric(144).nodes_per_pod == 36


def test_without_oversubscription_a_pod_keeps_half_of_its_ports() -> None:
    """36 ports: 16 for four nodes, and of 16 to 18 the number of links that divides most."""
    found = design_fabric(36, leaf=36, oversubscription=1)
    assert (found.nodes_per_pod, found.up, found.pods, found.cores) == (4, 18, 9, 6)
    assert design_fabric(54, oversubscription=1).switches == {216: 2}


def test_pods_do_not_depend_on_the_size_of_the_facility() -> None:
    assert {(one.nodes_per_pod, one.up) for one in map(design_fabric, range(13, 2001, 7))} == {(36, 72)}
    assert design_fabric(37).switches == {216: 2}
    assert [design_fabric(nodes).cores for nodes in (72, 73, 144, 145, 200, 1000)] == [0, 1, 1, 2, 2, 8]


def test_storage_gets_pods_without_oversubscription() -> None:
    """A storage pod takes as many links as it has to other pods."""
    found = design_fabric(36, storage_links=80)
    assert (found.pods, found.storage_pods, found.cores) == (1, 2, 1)
    assert found.leaf_ports_used == 144 + 72
    assert found.core_ports_used == 3 * 72


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


anything = (
    st.integers(1, 1500),
    st.integers(2, 8),
    st.sampled_from((None, *RADIXES)),
    st.sampled_from(RATIOS),
)


@given(*anything)
def test_what_a_pod_can_send_can_leave_it(nodes: int, ports: int, leaf: int | None, ratio: float) -> None:
    """And each pod has as many links to one core as to another. `test_cables` looks at every port."""
    found = try_fabric(nodes, ports, leaf, ratio)
    if found is None:
        return
    assert sum(found.count_pod_nodes()) == nodes
    assert set(found.count_pod_nodes()[:-1]) <= {found.nodes_per_pod}
    assert found.down <= ratio * found.up
    assert found.down + found.up <= found.leaf_ports
    assert found.oversubscription <= ratio
    assert found.cores == 0 or found.up % found.cores == 0
    assert (found.cores > 0) == (found.leaves > 2)


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
