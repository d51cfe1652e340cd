"""Node types: one catalog for jobs and facilities, and a user's own file for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests._support import headway, refused

from headway.core.errors import UsageError
from headway.plan.cluster import load_clusters
from headway.plan.facility.catalog import find_fabric_switch, find_node, list_node_types, load_switches
from headway.plan.facility.design import plan_facility
from headway.plan.facility.fabric import RADIXES
from headway.plan.facility.request import FacilityRequest
from headway.plan.facility.text import format_facility


@pytest.mark.parametrize("name", list_node_types())
def test_a_node_type_serves_a_job_and_a_facility(name: str) -> None:
    found, cluster = find_node(name), load_clusters()[name]
    assert cluster.between is not None
    assert (found.gpus, found.ports, found.link_gbit_s) == (
        cluster.devices, cluster.between.ports, cluster.between.gbit_s,
    )  # fmt: skip
    # A rack provides more than a node draws in training.
    assert found.watts >= (cluster.node.watts or 0) > 0 or name == "abci"
    peak = cluster.device_spec.tflops.mixed
    assert peak is None or found.tflops == pytest.approx(cluster.devices * peak, rel=0.01)
    assert "images/s of ResNet-50" in format_facility(plan_facility(FacilityRequest(nodes=7, node=name)))


def test_dgx_of_every_kind_are_node_types() -> None:
    assert {name for name in load_clusters() if name.startswith("dgx")} == set(list_node_types()) - {"abci"}


def test_every_switch_of_a_fabric_takes_power_and_height() -> None:
    assert [find_fabric_switch(ports).ports for ports in RADIXES] == list(RADIXES)
    assert all(one.watts > 0 and one.units >= 1 for one in load_switches().values())


def test_a_users_own_file_serves_both(tmp_path: Path) -> None:
    values = load_clusters()["dgx-a100"].model_dump(mode="json") | {"title": "ours"}
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(values))
    assert "4 x ours: 32 GPUs" in headway("plan", "--facility", "4", "--node", path).out
    assert headway("plan", "resnet50", "--cluster", path, "--nodes", "1").out.startswith("resnet50 on ours")
    # Without a published rate, the device's data sheet says what the storage has to feed; without disks there is no
    # cache.
    path.write_text(yaml.safe_dump(values | {"room": {"watts": 5000, "units": 6}}))
    said = headway("plan", "--facility", "4", "--node", path).out
    assert " images/s of ResNet-50 in 16 bits, by the data sheet; 115 kB each" in said
    assert "no cache: nodes have no disks of their own" in said
    path.write_text(yaml.safe_dump(values | {"room": {"watts": 5000}}))
    assert "'room.units' is missing" in refused("plan", "--facility", "4", "--node", path, status=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aws-p5.48xlarge", "aws-p5.48xlarge has no `room`: .*Take one of abci, dgx-1, "),
        ("dgx-h2000", "no node type 'dgx-h2000' in the catalog. Did you mean 'dgx-h200'?"),
        ("box-8x-l40s", "has no `room`"),
        ("nowhere.yaml", "nowhere.yaml: .*cannot be read"),
    ],
)
def test_other_nodes_are_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_node(name)


@pytest.mark.parametrize("between", [{"link": "roce-100", "ports": 4}, None])
def test_a_fabric_is_infiniband(between: dict[str, object] | None, tmp_path: Path) -> None:
    values = load_clusters()["dgx-a100"].model_dump(mode="json") | {"between": between}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump({key: one for key, one in values.items() if one is not None}))
    with pytest.raises(UsageError, match=r"the fabric of a facility is InfiniBand, and DGX A100, 8 .* has none"):
        find_node(str(tmp_path / "ours.yaml"))
