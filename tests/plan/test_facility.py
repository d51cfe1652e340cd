"""Racks, power, cables and storage: the published designs, and what holds of every one."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan import facility_page
from headway.plan.facility import FacilityRequest, count_ethernet_switches, load_nodes, plan_facility
from headway.plan.facility_text import format_facility
from headway.plan.placement import PlacedJob, place_jobs


@pytest.mark.parametrize(
    ("nodes", "racks", "kw", "cables", "storage"),
    [
        (12, 2, 38.4, {"EDR": 60, "10 GbE": 24, "1 GbE": 12}, "nfs"),
        (36, 6, 115.2, {"EDR": 144, "10 GbE": 72, "1 GbE": 36}, "parallel"),
        (144, 24, 460.8, {"EDR": 864, "10 GbE": 288, "1 GbE": 144}, "tiered"),
    ],
)
def test_the_designs_for_dgx_1(nodes: int, racks: int, kw: float, cables: dict[str, int], storage: str) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes))
    assert (found.racks, found.nodes_per_rack, found.headroom_watts) == (racks, 6, 0)
    assert found.watts == pytest.approx(kw * 1000)
    assert found.cables == cables
    assert found.feed.storage == storage


def test_twelve_need_one_switch_of_24_ports_for_each_other_network() -> None:
    assert plan_facility(FacilityRequest(nodes=12)).ethernet == {10: 1, 1: 1}


def test_ethernet_of_more_has_a_level_above() -> None:
    """Each of 24 ports keeps two for that."""
    assert [count_ethernet_switches(ports) for ports in (1, 24, 25, 44, 45, 264, 265)] == [1, 1, 3, 3, 4, 13, 15]


@pytest.mark.parametrize(("nodes", "storage"), [(1, "nfs"), (31, "nfs"), (32, "parallel"), (37, "tiered")])
def test_storage_grows_with_the_nodes(nodes: int, storage: str) -> None:
    assert plan_facility(FacilityRequest(nodes=nodes)).feed.storage == storage


def test_storage_feeds_what_is_trained() -> None:
    """130 DGX-1 at ResNet-50 read 165 GB/s; what was read there once and fits is not read again."""
    feed = plan_facility(FacilityRequest(nodes=130, data_bytes=146e9)).feed
    assert feed.bytes_s == pytest.approx(130 * 11_105 * 114_660)
    assert feed.write_bytes_s == pytest.approx(feed.bytes_s / 90)
    assert feed.kept is True
    assert plan_facility(FacilityRequest(nodes=2, data_bytes=8e12)).feed.kept is False
    assert plan_facility(FacilityRequest(nodes=2)).feed.kept is None


@given(nodes=st.integers(1, 3000), node=st.sampled_from(sorted(load_nodes())), kw=st.floats(11, 60))
def test_more_nodes_never_take_less(nodes: int, node: str, kw: float) -> None:
    wanted = FacilityRequest(nodes=nodes, node=node, rack_watts=kw * 1000)
    try:
        more = plan_facility(replace(wanted, nodes=nodes + 1))
    except UsageError:
        return
    one = plan_facility(wanted)
    for name in ("racks", "watts", "building_watts", "heat_btu_h", "floor_m2"):
        assert getattr(more, name) >= getattr(one, name), name
    assert sum(one.pods) == nodes
    full = one.nodes_per_rack * one.racks
    assert full - one.nodes_per_rack < nodes <= full
    assert one.nodes_per_rack * (one.watts / nodes) <= wanted.rack_watts * (1 + 1e-9)


def test_racks_of_half_the_power_are_twice_as_many() -> None:
    found = plan_facility(FacilityRequest(nodes=36))
    assert (found.racks, found.count_racks(9_600), found.count_racks(3_000)) == (6, 12, None)


def test_racks_are_limited_by_height_too() -> None:
    assert plan_facility(FacilityRequest(nodes=40, rack_watts=200_000)).nodes_per_rack == 14  # of 3 units, in 42


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node": "dgx1"}, "no node type 'dgx1' .* Did you mean 'dgx-1'?"),
        ({"node": "cray"}, "Known here: dgx-1, "),
        ({"ports": 5}, "has 4 ports of the fabric, not 5"),
        ({"ports": 1}, "at least 2 ports"),
        ({"rack_watts": 3000}, "a rack of 3 kW cannot hold a node of 3.2 kW"),
        ({"rack_watts": 1e6}, "--rack-kw: 1000 is out of range: the option takes 1 to 300 kW"),
        ({"node_watts": 0}, "--node-kw: 0 is out of range"),
        ({"pue": 0.9}, "--pue: 0.9 is out of range: the option takes 1 to 3"),
        ({"images_s": -1}, "--images-s: -1 is out of range"),
        ({"image_bytes": 0}, "--image-kb: 0 is out of range"),
        ({"data_bytes": 0}, "--data-gb: 0 is out of range"),
        ({"pue": float("nan")}, "--pue: nan is out of range"),
        ({"nodes": -3}, "1 node or more, not -3"),
    ],
)
def test_what_is_out_of_range_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_facility(FacilityRequest(**{"nodes": 36, **changes}))


@pytest.mark.parametrize("nodes", [1, 12, 36, 100, 144, 1000])
def test_the_page_shows_what_the_text_says(nodes: int, tmp_path: Path) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes, data_bytes=1e12, samples=10**6))
    placed = place_jobs([PlacedJob(1, 1e8)], found.pods)
    facility_page.write_page(found, tmp_path / "page.html", placed)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for line in format_facility(found).splitlines()[1:]:
        assert line[13:] in html.replace("&#39;", "'"), line
    picture = re.search(r"data:image/svg\+xml;base64,([\w+/=]+)", html)
    assert picture is not None
    drawn = ET.fromstring(base64.b64decode(picture[1]))
    said = [one.text or "" for one in drawn.iter() if one.tag.endswith("text")]
    assert ("and 22 more" in said) == (nodes == 1000)
    assert f"{found.fabric.leaf_ports} ports" in said


@pytest.mark.parametrize(("nodes", "kw"), [(13, 19.2), (144, 16.0), (130, 13.0)])
def test_the_drawing_has_a_bar_for_each_node_and_the_racks_of_the_text(nodes: int, kw: float) -> None:
    """Also where a rack holds nodes of two pods."""
    found = plan_facility(FacilityRequest(nodes=nodes, rack_watts=kw * 1000))
    drawn = facility_page.draw_facility(found)
    more = sum(int(one) for one in re.findall(r">\+ (\d+)<", drawn))
    assert drawn.count("#eef1f5") + more == found.racks
    if not more:
        assert drawn.count(facility_page.GREEN) == nodes


def test_json_of_it_is_whole() -> None:
    found = json.loads(json.dumps(plan_facility(FacilityRequest(nodes=144)).to_json()))
    assert found["fabric"]["switches"] == {"216": 4, "324": 1}
    assert found["pods"] == [36, 36, 36, 36]
    assert found["feed"]["storage"] == "tiered"
