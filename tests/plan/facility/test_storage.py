"""The load on the storage and the network that carries it, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.plan.facility.design import plan_facility
from headway.plan.facility.request import FacilityRequest
from headway.plan.facility.storage import Blocks, estimate_demand
from headway.plan.facility.text import format_facility


@pytest.mark.parametrize(("nodes", "storage"), [(1, "nfs"), (31, "nfs"), (32, "parallel"), (37, "tiered")])
def test_storage_grows_with_the_nodes(nodes: int, storage: str) -> None:
    assert plan_facility(FacilityRequest(nodes=nodes)).feed.storage == storage


def test_storage_feeds_what_is_trained() -> None:
    """130 DGX-1 at ResNet-50 read 165 GB/s; what a node has read stays on its disks."""
    feed = plan_facility(FacilityRequest(nodes=130, data_bytes=146e9)).feed
    assert feed.bytes_s == pytest.approx(130 * 11_105 * 114_660)
    assert feed.write_bytes_s == pytest.approx(feed.bytes_s / 90)
    assert (feed.cached, feed.later_bytes_s) == (1, 0)
    assert plan_facility(FacilityRequest(nodes=2)).feed.cached is None


def test_a_cache_of_half_the_set_halves_the_reads() -> None:
    feed = estimate_demand(10, images_s=1000, image_bytes=1e5, cache_bytes=4e12, data_bytes=8e12)
    assert (feed.bytes_s, feed.cached, feed.later_bytes_s) == (1e9, 0.5, 5e8)


def test_a_pod_was_worked_out_by_hand() -> None:
    """A node reads 1.273 GB/s: less than 2 x 10 GbE carry, 2.25. A switch of 48 ports takes half a pod of 36, so 22.9
    GB/s, or 6 uplinks of 4.5 GB/s. All read 45.8 GB/s, so the servers need 11 such ports, and have two each."""
    net = plan_facility(FacilityRequest(nodes=36)).network
    assert net.leaf is not None
    assert net.blocks is not None
    assert net.main is not None
    assert (net.name, net.leaf.ports, net.blocks.size, net.leaves, net.uplinks) == ("10 GbE", 48, 18, 2, 6)
    assert (net.main.ports, net.mains, net.main_ports_used, net.server_ports, net.servers) == (32, 1, 24, 12, 6)


@pytest.mark.parametrize(
    ("node", "images_s", "name", "said"),
    [
        ("dgx-1", None, "10 GbE", ""),
        ("dgx-1", 30_000, "InfiniBand", "10 GbE cannot carry it: a node reads 3.44 GB/s, and its 2 ports carry 2.25"),
        ("dgx-1", 30_000, "InfiniBand", "25 GbE or 100 GbE would do too, with other cards in the nodes"),
        ("dgx-2", None, "25 GbE", "10 GbE cannot carry it: a node reads 2.79 GB/s, and its 2 ports carry 2.25 GB/s"),
        ("dgx-h100", None, "100 GbE", "25 GbE cannot carry it: a node reads 6.43 GB/s, and its 2 ports carry 5.62"),
        ("dgx-1", 900_000, "10 GbE", "InfiniBand cannot carry it: a node reads 103 GB/s"),
        ("dgx-1", 900_000, "10 GbE", "so training waits for data"),
    ],
)  # fmt: skip
def test_the_slowest_network_that_carries_it(node: str, images_s: float | None, name: str, said: str) -> None:
    found = plan_facility(FacilityRequest(nodes=100, node=node, images_s=images_s))
    assert found.network.name == name
    assert said in format_facility(found)


@given(pod=st.integers(1, 80), size=st.integers(1, 80), nodes=st.integers(1, 500))
def test_blocks_are_parts_of_pods_or_whole_pods(pod: int, size: int, nodes: int) -> None:
    size = size if size < pod else size - size % pod
    blocks = Blocks(pod, size)
    found = [blocks.locate(node) for node in range(nodes)]
    assert len(set(found)) == nodes
    assert max(place for _, place in found) < size
    assert [block for block, _ in found] == sorted(block for block, _ in found)
    assert {block for block, _ in found} == set(range(blocks.count(nodes)))
    for node, (block, _) in enumerate(found):
        # A block that is no larger than a pod lies in one pod.
        assert size > pod or block // -(-pod // size) == node // pod
