"""Node types and switches of the catalog that a facility is built of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from headway.core.errors import UsageError, suggest_nearest
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import Cluster, find_cluster, load_clusters

# Links of links.yaml that are InfiniBand; None: a file gives the numbers of a link alone.
INFINIBAND_LINKS = (None, "infiniband", "edr", "hdr", "ndr")


@final
@dataclass(frozen=True)
class NodeSpec:
    """Node type of a facility, in the units of its cluster's file."""

    title: str
    watts: float
    units: int
    gpus: int
    # By its name in the catalog, or the title of the user's own.
    device: str
    ports: int
    link_gbit_s: float
    # Ports of the storage network, and the fastest Ethernet that they run.
    storage_ports: int
    storage_gbit_s: float
    tflops: float
    local_tb: float
    # ResNet-50's rate and its source; None: not published.
    images_s: float | None
    images_from: str


@final
@dataclass(frozen=True)
class SwitchSpec:
    """Switch of the catalog: its ports, its faster ports towards other switches, and what it takes from a rack."""

    title: str
    ports: int
    gbit_s: float
    # The most that it draws with all of its cables, and its height in units of a rack.
    watts: float
    units: int
    uplinks: int = 0
    uplink_gbit_s: float = 0.0


@cache
def load_switches() -> dict[str, SwitchSpec]:
    """Loads the switches of the catalog, by name."""
    return {name: SwitchSpec(**values) for name, values in read_catalog("switches").items()}


def find_fabric_switch(ports: int) -> SwitchSpec:
    """Finds the switch of the fabric with so many ports."""
    return load_switches()[f"fabric-{ports}"]


def list_node_types() -> list[str]:
    """Lists the clusters of the catalog whose nodes can stand in a facility, in alphabetical order."""
    return sorted(name for name, cluster in load_clusters().items() if cluster.room is not None)


def find_node_cluster(name: str) -> Cluster:
    """Finds the cluster of a node type by its name in the catalog, or in a YAML file.

    Raises UsageError if there is none, or a facility of its nodes cannot be planned.
    """
    if name not in load_clusters() and Path(name).suffix not in (".yaml", ".yml"):
        fix = suggest_nearest(name, list_node_types())
        raise UsageError(f"there is no node type {name!r} in the catalog", where="--node", fix=fix)
    cluster = find_cluster(name)
    problem = ""
    if cluster.room is None:
        problem = f"{name} has no `room`: nobody says what a rack has to give to such a node, or it is rented"
    elif cluster.between is None or cluster.between.link not in INFINIBAND_LINKS:
        problem = f"the fabric of a facility is InfiniBand, and {cluster.title} has none"
    if problem:
        fix = f"Take one of {', '.join(list_node_types())}, or a YAML file with `room` and `between` (docs/plan.md)."
        raise UsageError(problem, where="--node", fix=fix)
    return cluster


def find_node(name: str) -> NodeSpec:
    """Finds a node type by the name of its cluster. Raises UsageError as `find_node_cluster` does."""
    cluster = find_node_cluster(name)
    room, between, peak = cluster.room, cluster.between, cluster.device_spec.tflops
    assert room is not None
    assert between is not None
    return NodeSpec(
        title=cluster.title, watts=room.watts, units=room.units, gpus=cluster.devices,
        device=cluster.device if isinstance(cluster.device, str) else cluster.device.title,
        ports=between.ports, link_gbit_s=between.gbit_s, storage_ports=room.storage_ports,
        storage_gbit_s=room.storage_gbit_s, tflops=room.tflops or cluster.devices * (peak.mixed or peak.fp32),
        local_tb=room.local_tb, images_s=room.images_s, images_from=room.images_from,
    )  # fmt: skip
