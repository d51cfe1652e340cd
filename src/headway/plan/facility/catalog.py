"""Node types and switches of the catalog that a facility is built of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

from headway.core.errors import UsageError, suggest_nearest
from headway.plan.catalogs import read_catalog


@final
@dataclass(frozen=True)
class NodeSpec:
    """Node type of the catalog, in the units of its file."""

    title: str
    watts: float
    units: int
    gpus: int
    device: str
    ports: int
    link_gbit_s: float
    # Ports of the storage network, and the fastest Ethernet that they run.
    storage_ports: int
    storage_gbit_s: float
    tflops: float
    local_tb: float
    images_s: float


@final
@dataclass(frozen=True)
class SwitchSpec:
    """Ethernet switch of the catalog: its ports, and its faster ports towards other switches."""

    title: str
    ports: int
    gbit_s: float
    uplinks: int = 0
    uplink_gbit_s: float = 0.0


@cache
def load_nodes() -> dict[str, NodeSpec]:
    """Loads the node types of the catalog, by name."""
    return {name: NodeSpec(**values) for name, values in read_catalog("nodes").items()}


@cache
def load_switches() -> dict[str, SwitchSpec]:
    """Loads the Ethernet switches of the catalog, by name."""
    return {name: SwitchSpec(**values) for name, values in read_catalog("switches").items()}


def find_node(name: str) -> NodeSpec:
    """Finds a node type by name. Raises UsageError if there is none."""
    nodes = load_nodes()
    if name not in nodes:
        raise UsageError(
            f"there is no node type {name!r} in the catalog", where="--node", fix=suggest_nearest(name, nodes)
        )
    return nodes[name]
