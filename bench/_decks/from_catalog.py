"""What the planner's facilities and its catalog of devices give beside the decks' clusters and trends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from bench._decks.figure import Ours
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import Device, load_clusters
from headway.plan.facility.design import FacilityPlan, plan_facility
from headway.plan.facility.fabric import MIN_PORTS
from headway.plan.facility.request import FacilityRequest
from headway.plan.facility.simulation import MILES_PER_NODE_HOUR
from headway.plan.facility.storage import PARALLEL_FROM, READS_PER_WRITE
from headway.plan.growth import CPU_FLOPS, PF_S_DAY
from headway.plan.workloads import find_workload

# AlphaGo Zero's compute over AlexNet's, as the deck has it.
GROWTH = 300_000
# Krizhevsky et al. 2012, section 5: "roughly 90 cycles through the training set of 1.2 million images".
EPOCHS, IMAGES = 90, 1.2e6
# A training step costs three forward passes of two operations for each multiply-add.
OPERATIONS = 3 * 2
YEAR_S = 365.25 * 86_400
NODES = ("dgx-1", "dgx-a100", "dgx-h100")
# Miles of paved road in the USA (Federal Highway Administration, some 2.8 million).
PAVED_MILES = 2.8e6


@cache
def _plan(nodes: int) -> FacilityPlan:
    return plan_facility(FacilityRequest(nodes=nodes))


def _find_switch(plan: FacilityPlan, name: str) -> float:
    return next(one.ports for one in plan.switches if one.name == name)


def _count_cables(plan: FacilityPlan, kind: str, parts: int) -> float:
    return plan.cables[kind] / parts


def _find_largest(plan: FacilityPlan) -> float:
    """The most nodes under one core switch."""
    net = plan.fabric
    assert net.core_ports is not None
    return net.core_ports // net.up * net.nodes_per_pod


_COUNTS: Mapping[str, Callable[[FacilityPlan], float]] = {
    "min-ports": lambda plan: MIN_PORTS,
    "storage-gbit-s": lambda plan: plan.machine.storage_gbit_s,
    "pod": lambda plan: plan.fabric.nodes_per_pod,
    "pods": lambda plan: plan.fabric.pods,
    "room": lambda plan: plan.fabric.leaves * plan.fabric.nodes_per_pod,
    "racks": lambda plan: plan.racks,
    "nodes-per-rack": lambda plan: plan.nodes_per_rack,
    "rack-kw": lambda plan: plan.nodes_per_rack * plan.machine.watts / 1e3,
    "leaves": lambda plan: plan.fabric.leaves,
    "leaf-ports": lambda plan: plan.fabric.leaf_ports,
    "core-ports": lambda plan: _find_switch(plan, "core"),
    "oversubscription": lambda plan: plan.fabric.oversubscription,
    "links-left": lambda plan: plan.fabric.links_left,
    "largest": _find_largest,
    "storage-ports": lambda plan: _find_switch(plan, "storage"),
    "management-ports": lambda plan: _find_switch(plan, "management"),
    "edr-a-node": lambda plan: plan.fabric.node_cables / plan.wanted.nodes,
    "edr-gbit": lambda plan: plan.machine.link_gbit_s,
    "ten-a-node": lambda plan: plan.network.node_ports,
    "one-a-node": lambda plan: _count_cables(plan, "1 GbE", plan.wanted.nodes),
    "one-a-pod": lambda plan: _count_cables(plan, "1 GbE", plan.fabric.pods),
}
# The decks' own designs, which the planner's nodes, switches and rules follow. The other counts follow from these.
TAKEN = frozenset(
    {"min-ports", "storage-gbit-s", "leaf-ports", "core-ports", "rack-kw", "oversubscription", "nodes-per-rack"}
    | {"edr-a-node", "edr-gbit", "ten-a-node", "one-a-node"}
)
_MORE = {"12/storage-ports": "the nodes' cables fill 24 ports, and ResNet-50 needs 14 more for the storage"}


def find_facility(asked: str) -> Ours:
    """Finds a number of a facility: NODES/COUNT, parallel-from, reads, miles/HOURS/NODES or road-days."""
    kind, *rest = asked.split("/")
    if kind == "parallel-from":
        return Ours("taken over", PARALLEL_FROM)
    if kind == "reads":
        return Ours("taken over", READS_PER_WRITE)
    if kind == "miles":
        hours, nodes = map(float, rest)
        return Ours(
            "taken over", MILES_PER_NODE_HOUR * hours * nodes, f"{MILES_PER_NODE_HOUR:,.0f} miles an hour and node"
        )
    if kind == "road-days":
        return Ours("planned", PAVED_MILES / (MILES_PER_NODE_HOUR * 24 * 8), "at the rate of the row above")
    value = float(_COUNTS[rest[0]](_plan(int(kind))))
    return Ours("taken over" if rest[0] in TAKEN else "planned", value, _MORE.get(asked, ""))


def list_devices() -> dict[str, Device]:
    """Lists the catalog's devices by name."""
    return {name: Device.model_validate(entry) for name, entry in read_catalog("devices").items()}


def get_peak(device: Device) -> float:
    """The fastest peak at which a network trains, in 10^12 operations per second."""
    return device.tflops.mixed or device.tflops.fp32


@cache
def count_alexnet() -> float:
    """Counts the operations of AlexNet's training."""
    return OPERATIONS * find_workload("alexnet").forward_multiply_adds * EPOCHS * IMAGES


def count_devices(pf_s: float, name: str) -> int:
    """Counts the devices of a kind that give so many peta-operations per second."""
    return math.ceil(1e3 * pf_s / get_peak(list_devices()[name]))


def describe_nodes(pf_s_days: float) -> str:
    """Describes the days that single nodes need."""
    clusters, texts = load_clusters(), []
    for name in NODES:
        days = pf_s_days / _get_node_pf_s(name)
        texts.append(f"{days:,.0f} days on one {clusters[name].title.partition(',')[0]}")
    return ", ".join(texts)


def _get_node_pf_s(name: str) -> float:
    cluster = load_clusters()[name]
    return cluster.devices * get_peak(cluster.device_spec) / 1e3


def find_trend(kind: str) -> Ours:
    """Finds what the catalog gives beside the deck's trends of compute."""
    if kind == "today":
        rest = ", ".join(
            f"{load_clusters()[name].title.partition(',')[0]} {_get_node_pf_s(name):.3g}" for name in NODES
        )
        return Ours("planned", _get_node_pf_s("dgx-a100"), f"dense, 16 bits, one node: {rest}")
    if kind == "years":
        return Ours("planned", 1000 * PF_S_DAY / CPU_FLOPS / YEAR_S, f"at {CPU_FLOPS / 1e12:.2g} TFLOP/s")
    largest = GROWTH * count_alexnet() / PF_S_DAY
    if kind == "growth":
        more = f"our AlexNet, {EPOCHS} epochs: {count_alexnet() / PF_S_DAY:.2g} PF/s-days; the deck's 1,000 over it"
        return Ours("planned", 1000 * PF_S_DAY / count_alexnet(), more)
    return Ours("planned", largest, f"{GROWTH:,} times our AlexNet; {describe_nodes(1000)} for 1,000")
