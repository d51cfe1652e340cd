"""Racks, power, cables and storage: the published designs, and what holds of every one."""

from __future__ import annotations

import base64
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.facility import page
from headway.plan.facility.catalog import list_node_types
from headway.plan.facility.design import compute_airflow, plan_facility
from headway.plan.facility.drawing import draw_facility
from headway.plan.facility.placement import PlacedJob, place_jobs
from headway.plan.facility.request import FacilityRequest, build_facility_request
from headway.plan.facility.text import format_facility
from headway.plan.workloads import find_workload


@pytest.mark.parametrize(
    ("nodes", "racks", "kw", "cables", "storage"),
    [
        # 14 cables of 10 GbE to the storage; beyond 12 nodes, 40 GbE from the switches of the pods and to the storage.
        (12, 2, 38.4, {"EDR": 60, "10 GbE": 24 + 14, "1 GbE": 12}, "nfs"),
        (36, 6, 115.2, {"EDR": 144, "10 GbE": 72, "40 GbE": 12 + 12, "1 GbE": 36, "patch cord": 12}, "parallel"),
        (
            144, 24, 460.8,
            {"EDR": 864, "10 GbE": 288 + 4, "40 GbE": 48 + 42, "1 GbE": 144, "patch cord": 288 + 48}, "tiered",
        ),
    ],
)  # fmt: skip
def test_the_designs_for_dgx_1(nodes: int, racks: int, kw: float, cables: dict[str, int], storage: str) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes))
    assert (found.racks, found.nodes_per_rack, found.headroom_watts) == (racks, 6, 0)
    assert found.node_watts == pytest.approx(kw * 1000)
    assert found.cables == cables
    assert found.feed.storage == storage


def test_the_air_was_worked_out_by_hand() -> None:
    """19.2 kW are 69.12 MJ an hour; a cubic metre takes 1.206 kJ per kelvin, so 18.09 kJ at 15 K: 3,821 m3/h."""
    found = plan_facility(FacilityRequest(nodes=12))
    assert found.rack_air_m3_h == pytest.approx(3820.9, abs=0.1)
    assert found.air_m3_h == pytest.approx(7641.8 * found.watts / 38_400, abs=0.1)
    assert compute_airflow(19_200, 10) == pytest.approx(5731.3, abs=0.1)


@given(nodes=st.integers(1, 3000), node=st.sampled_from(list_node_types()), kw=st.floats(11, 60))
def test_more_nodes_never_take_less(nodes: int, node: str, kw: float) -> None:
    wanted = FacilityRequest(nodes=nodes, node=node, rack_watts=kw * 1000)
    try:
        more = plan_facility(replace(wanted, nodes=nodes + 1))
    except UsageError:
        return
    one = plan_facility(wanted)
    for name in ("racks", "node_watts"):
        assert getattr(more, name) >= getattr(one, name), name
    assert sum(one.pods) == nodes
    # Pods share no rack.
    assert one.racks == sum(math.ceil(pod / one.nodes_per_rack) for pod in one.pods)
    assert one.nodes_per_rack * (one.node_watts / nodes) <= wanted.rack_watts * (1 + 1e-9)


@given(
    nodes=st.integers(1, 20_000),
    node=st.sampled_from(list_node_types()),
    images_s=st.floats(1, 1e8),
    image_bytes=st.floats(10, 1e9),
)
@example(nodes=8000, node="dgx-1", images_s=1e6, image_bytes=114_660.0)
def test_every_facility_has_a_plan_or_a_sentence(nodes: int, node: str, images_s: float, image_bytes: float) -> None:
    wanted = FacilityRequest(nodes=nodes, node=node, images_s=images_s, image_bytes=image_bytes, rack_watts=40_000)
    try:
        found = plan_facility(wanted)
    except UsageError:
        # Too many nodes for any switches; no other error.
        return
    assert format_facility(found)
    assert all(one.used <= one.ports for one in found.switches)


def test_a_facility_feeds_no_more_than_its_cpus_load() -> None:
    """AlexNet in 16 bits would take 67,046 images/s of a DGX-1's devices; its CPUs load 10,986."""
    workload = find_workload("alexnet", ("precision=fp16",))
    found = plan_facility(build_facility_request(workload, nodes=36, node="dgx-1"))
    assert found.feed.opens_s / 36 == pytest.approx(10_986, rel=1e-4)
    assert "of alexnet, as its CPUs load" in format_facility(found)


def test_power_racks_and_floor_hold_switches_and_servers() -> None:
    """By hand: a director of 4 kW, 2 storage switches of 250 W, a main one of 400 W, one of management of 100 W, and 6
    servers of 800 W are 9.8 kW in 12 + 2 + 1 + 1 + 12 units."""
    found = plan_facility(FacilityRequest(nodes=36))
    assert [(one.name, one.count) for one in found.equipment] == [
        ("pod", 1), ("storage", 2), ("main", 1), ("management", 1), ("storage server", 6),
    ]  # fmt: skip
    assert (found.equipment_watts, found.watts, found.equipment_racks) == (9_800, 125_000, 1)
    assert found.building_watts == pytest.approx(125_000 * 1.4)
    assert found.heat_btu_h == pytest.approx(125_000 * 3.412)
    assert found.floor_m2 == pytest.approx(7 * 1.44)
    # Nodes at 80 % of their maximum, all else at its own.
    assert found.kwh_a_year == pytest.approx((115.2 * 0.8 + 9.8) * 1.4 * 8766)
    said = format_facility(found)
    assert "and 1 rack for 5 switches and 6 storage servers\n" in said
    assert "125.0 kW: 115.2 kW for the nodes, 9.8 kW for switches and storage servers (assumed); 175.0 kW" in said
    assert "MWh a year of training, with nodes at 80% of their maximum" in said
    # Seven directors of 12 units, and 21 servers of 2: height counts where power does not.
    tall = plan_facility(FacilityRequest(nodes=250, rack_watts=200_000))
    units = sum(one.count * one.units for one in tall.equipment)
    assert tall.equipment_racks == math.ceil(units / 42) > math.ceil(tall.equipment_watts / 200_000)


@given(nodes=st.integers(1, 120), node=st.sampled_from(list_node_types()))
def test_what_stands_in_a_facility_adds_up(nodes: int, node: str) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes, node=node, rack_watts=30_000))
    ports = {one.name: one.count for one in found.switches if one.name != "storage uplinks"}
    servers = {"storage server": found.network.servers}
    assert {one.name: one.count for one in found.equipment} == ports | servers
    assert found.watts == pytest.approx(found.node_watts + sum(one.count * one.watts for one in found.equipment))
    assert found.equipment_racks * 30_000 >= found.equipment_watts
    cards = page.build_panels(found)[0].data["cards"]
    (switches,) = (one for one in cards if one["label"] == "switches")
    assert switches["value"] == f"{sum(ports.values()):,}"
    assert all(f"{count:,} {name}" in switches["note"] for name, count in ports.items())


def test_numbers_are_said_as_people_say_them() -> None:
    said = format_facility(plan_facility(FacilityRequest(nodes=60)))
    assert "19.2 kW each; a full one has no power left; and 2 racks for" in said
    assert "7.68 TB of a node's own disks hold 67 million such images" in said
    assert "(11,105 images/s of ResNet-50 by MLPerf v0.6, one DGX-1, mixed precision; 115 kB each)" in said
    assert ", 96 patch cords (72 of the fabric, 24 of the storage)\n" in said
    assert "patch panels: 72 cords between the pods" in draw_facility(plan_facility(FacilityRequest(nodes=60)))
    few = format_facility(plan_facility(FacilityRequest(nodes=1)))
    assert "1 storage server with 2 x 10 GbE, by its ports: a server has" in few
    asked = build_facility_request(None, nodes=3, node="dgx-1", images_s=500.0)
    assert "(500 images/s as requested; 115 kB each)" in format_facility(plan_facility(asked))
    words = build_facility_request(find_workload("bert-large", ("precision=fp16",)), nodes=3, node="dgx-1")
    assert " sequences/s of bert-large, by the data sheet; 2.05 kB each" in format_facility(plan_facility(words))


def test_racks_of_half_the_power_are_twice_as_many() -> None:
    found = plan_facility(FacilityRequest(nodes=36))
    assert (found.racks, found.count_racks(9_600), found.count_racks(3_000)) == (6, 12, None)


def test_racks_are_limited_by_height_too() -> None:
    assert plan_facility(FacilityRequest(nodes=40, rack_watts=200_000)).nodes_per_rack == 14  # of 3 units, in 42


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node": "dgx1"}, "no node type 'dgx1' .* Did you mean 'dgx-1'?"),
        ({"node": "cray"}, "Known here: abci, dgx-1, "),
        ({"ports": 5}, "has 4 ports of the fabric, not 5"),
        ({"ports": 1}, "at least 2 ports"),
        ({"rack_watts": 3000}, "a rack of 3 kW cannot hold a node of 3.2 kW"),
        ({"rack_watts": 1e6}, "--rack-kw: 1000 is out of range: the option takes 1 to 300 kW"),
        ({"node_watts": 0}, "--node-kw: 0 is out of range"),
        ({"pue": 0.9}, "--pue: 0.9 is out of range: the option takes 1 to 3"),
        ({"images_s": -1}, "--images-s: -1 is out of range"),
        ({"image_bytes": 0}, "--image-kb: 0 is out of range"),
        ({"data_bytes": 0}, "--data-gb: 0 is out of range"),
        ({"air_rise_k": 0}, "--air-rise: 0 is out of range: the option takes 1 to 60 kelvin"),
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
    page.write_page(found, tmp_path / "page.html", placed)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for line in format_facility(found).splitlines()[1:]:
        assert line[13:] in html.replace("&#39;", "'"), line
    picture = re.search(r"data:image/svg\+xml;base64,([\w+/=]+)", html)
    assert picture is not None
    drawn = ET.fromstring(base64.b64decode(picture[1]))
    said = [one.text or "" for one in drawn.iter() if one.tag.endswith("text")]
    assert ("and 24 more pods" in said) == (nodes == 1000)
    assert f"switch of {found.fabric.leaf_ports} ports" in said


def test_json_of_it_is_whole() -> None:
    found = json.loads(json.dumps(plan_facility(FacilityRequest(nodes=144)).to_json()))
    assert found["fabric"]["switches"] == {"216": 4, "324": 1}
    assert found["pods"] == [36, 36, 36, 36]
    assert found["feed"]["storage"] == "tiered"
    assert {"name": "main", "count": 3, "ports": 32, "used": 30} in found["switches"]
