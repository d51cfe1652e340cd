"""Every cable of a facility: ports are enough and used once, and finished pods keep their cables."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.facility.cables import PATCH_CORD, Cable, format_cables, list_cables
from headway.plan.facility.catalog import list_node_types
from headway.plan.facility.design import FacilityPlan, plan_facility
from headway.plan.facility.request import FacilityRequest

NAMED = (6, 12, 36, 54, 55, 100, 144, 200, 1000)


def check_ports(found: FacilityPlan) -> None:
    """Checks that no port has two cables, and that no switch or server needs more ports than it has."""
    cables = list(list_cables(found))
    ends = [end for one in cables for end in ((one.a, one.a_port), (one.b, one.b_port))]
    assert len(set(ends)) == len(ends)
    by_device = defaultdict(Counter[str])
    for device, port in ends:
        by_device[device][port.split()[0]] += 1
    net, storage = found.fabric, found.network
    for device, ports in by_device.items():
        kind = device.rstrip("0123456789 ")
        if device.startswith("node"):
            expected = {"fabric": net.ports_per_node, "management": 1}
            assert ports == expected | ({"storage": storage.node_ports} if storage.leaves else {})
        elif device.endswith("panel"):
            assert ports["back"] == ports["front"]
        elif device.startswith(("pod", "storage pod")):
            assert sum(ports.values()) <= net.leaf_ports
        elif kind == "core":
            assert ports.total() == found.fabric.core_ports_used <= (net.core_ports or 0)
        elif kind == "storage switch":
            assert storage.leaf is not None
            assert ports["down"] <= storage.leaf.ports
            assert ports["up"] == storage.uplinks <= storage.leaf.uplinks
        elif kind == "main switch":
            assert storage.main is not None
            assert ports.total() <= storage.main_ports_used <= storage.main.ports
        elif kind == "management switch":
            assert ports["down"] <= found.management.leaf.ports
        elif kind == "management main":
            assert ports.total() <= found.management.main_ports_used <= found.management.main.ports
        else:
            assert kind == "storage server", device
            assert ports.total() == storage.server_ports / storage.servers
    # The numbers of the text are those of the list.
    assert all(one.used <= one.ports for one in found.switches)
    kinds = Counter(one.kind for one in cables)
    assert {**kinds} == found.cables


def check_bandwidth(found: FacilityPlan) -> None:
    """Checks that every stretch between nodes and servers carries what the nodes read."""
    net, each, total = found.network, found.feed.node_bytes_s, found.feed.bytes_s
    assert net.carries
    assert each <= net.node_bytes_s
    assert net.server_ports * net.server_port_bytes_s >= total * (1 - 1e-9)
    if net.blocks is None or not net.mains:
        return
    below = Counter(net.blocks.locate(node)[0] for node in range(found.wanted.nodes))
    assert max(below.values()) * each <= net.uplinks * net.uplink_bytes_s * (1 + 1e-9)
    # As many uplinks of a switch, and as many servers, hang on each main switch.
    assert net.uplinks % net.mains == net.server_ports % net.mains == 0


@pytest.mark.parametrize("nodes", NAMED)
def test_ports_suffice(nodes: int) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes))
    check_ports(found)
    check_bandwidth(found)


@given(
    nodes=st.integers(1, 2000),
    node=st.sampled_from(list_node_types()),
    images_s=st.one_of(st.none(), st.floats(10, 2e5)),
    leaf=st.sampled_from((None, None, 36, 40, 64, 128, 216)),
    oversubscription=st.sampled_from((1.0, 1.5, 2.0, 4.0)),
)
@example(nodes=300, node="dgx-1", images_s=30_000.0, leaf=None, oversubscription=2.0)
@example(nodes=2000, node="dgx-1", images_s=None, leaf=None, oversubscription=2.0)
def test_ports_suffice_for_every_facility(
    nodes: int, node: str, images_s: float | None, leaf: int | None, oversubscription: float
) -> None:
    wanted = FacilityRequest(
        nodes=nodes, node=node, images_s=images_s, leaf=leaf, oversubscription=oversubscription, rack_watts=40_000
    )
    try:
        found = plan_facility(wanted)
    except UsageError:
        # More nodes than two levels of such switches take: `test_fabric` looks at that.
        return
    check_ports(found)
    if found.network.carries:
        check_bandwidth(found)


@cache
def list_pod_cables(wanted: FacilityRequest) -> tuple[int, frozenset[Cable]]:
    """Finished pods of a facility, and the cables that end in one of them."""
    found = plan_facility(wanted)
    each = found.fabric.nodes_per_pod
    finished = wanted.nodes // each
    ends = {f"node {number + 1}" for number in range(finished * each)}
    ends |= {f"pod {number + 1} switch" for number in range(finished)}
    return finished, frozenset(one for one in list_cables(found) if {one.a, one.b} & ends and one.kind != PATCH_CORD)


@given(
    sizes=st.tuples(st.integers(1, 2000), st.integers(1, 2000)).map(sorted),
    node=st.sampled_from(("dgx-1", "dgx-1", "dgx-1-p100")),
    images_s=st.sampled_from((None, 30_000.0)),
)
@example(sizes=[36, 200], node="dgx-1", images_s=None)
@example(sizes=[36, 37], node="dgx-1", images_s=30_000.0)
@example(sizes=[144, 1000], node="dgx-1", images_s=None)
def test_growing_never_recables_a_finished_pod(sizes: list[int], node: str, images_s: float | None) -> None:
    few, many = (FacilityRequest(nodes=nodes, node=node, images_s=images_s) for nodes in sizes)
    if few.nodes <= 12:
        # Two small switches: their groups of six are no pods.
        return
    finished, cables = list_pod_cables(few)
    assert cables <= list_pod_cables(many)[1]
    # Every port of every finished node, and the way out of the pod.
    if finished > 1:
        assert sum(one.b_port.startswith("back") for one in cables) == 72 * finished


def test_from_30_to_200_nodes_no_cable_of_a_node_moves() -> None:
    """Not even in a pod that is still growing."""
    before = set[Cable]()
    for nodes in range(30, 201):
        cables = {one for one in list_cables(plan_facility(FacilityRequest(nodes=nodes))) if one.a.startswith("node")}
        assert before < cables
        before = cables


def test_the_list_is_a_table() -> None:
    found = plan_facility(FacilityRequest(nodes=12))
    rows = list(csv.reader(io.StringIO(format_cables(found))))
    assert rows[:2] == [
        ["cable", "from", "port", "to", "port"],
        ["EDR", "node 1", "fabric 1", "pod 1 switch", "down 1"],
    ]
    assert len(rows) == 1 + sum(found.cables.values())


def test_other_nodes_get_the_same_list() -> None:
    """A pod of two leaf sizes: what changes the pod changes its cables, and nothing else does."""
    one = FacilityRequest(nodes=40, node="dgx-a100")
    assert list_pod_cables(one)[1] < list_pod_cables(replace(one, nodes=80))[1]
