"""Room for a number of nodes: racks, power, heat, floor, switches, cables, and the storage that feeds them.

The rules are those of NVIDIA's designs for 12, 36 and 144 DGX-1 ("DGX-1 clusters", the deck of 2018): six nodes of
3.2 kW in a rack of 19.2 kW; full bisection inside six nodes or a pod of 36, 2:1 between them; NFS over 10 GbE for few
nodes, a parallel file system from 32 on, tiers and NVMe read caches beyond a pod.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, final

from headway.core.errors import UsageError, suggest_nearest
from headway.core.workload import Workload
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import load_devices
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.fabric import Fabric, design_fabric
from headway.plan.job import build_job

RACK_WATTS, RACK_UNITS = 19_200, 42
# Nodes per pod.
POD_NODES = 36
# Smallest number of nodes with a parallel file system.
PARALLEL_FROM = 32
READS_PER_WRITE = 90
# Mean size of an encoded ImageNet image (MLPerf Storage, its ResNet-50 workload).
IMAGE_BYTES = 114_660
BTU_PER_WH = 3.412
# Share of its maximum power that a node takes in training: SaturnV's 124 DGX-1 drew 2.8 of 3.5 kW each on Linpack.
TRAINING_POWER_SHARE = 0.8
# Floor of a rack, assumed: 600 mm wide, 1.2 m deep, and as much again for its share of the aisles.
RACK_M2 = 0.6 * 2.4
HOURS_A_YEAR = 8766
# Share of a link's rate that file transfers reach.
LINE_SHARE = 0.9
# NVIDIA's design connects 12 nodes with two 10 GbE ports each to one switch of 24: no port is left for the storage.
ETHERNET_PORTS, ETHERNET_UPLINKS = 24, 2

StorageKind = Literal["nfs", "parallel", "tiered"]
STORAGE_NAMES: dict[StorageKind, str] = {
    "nfs": "NFS appliances on 10 GbE",
    "parallel": "a parallel file system",
    "tiered": "a parallel file system in tiers, with a read cache of NVMe in each node",
}


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
    ethernet_10: int
    ethernet_1: int
    tflops: float
    local_tb: float
    images_s: float


@cache
def load_nodes() -> dict[str, NodeSpec]:
    """Loads the node types of the catalog, by name."""
    return {name: NodeSpec(**values) for name, values in read_catalog("nodes").items()}


def find_node(name: str) -> NodeSpec:
    """Finds a node type by name. Raises UsageError if there is none."""
    nodes = load_nodes()
    if name not in nodes:
        raise UsageError(
            f"there is no node type {name!r} in the catalog", where="--node", fix=suggest_nearest(name, nodes)
        )
    return nodes[name]


@final
@dataclass(frozen=True, kw_only=True)
class FacilityRequest:
    """Requested facility, in SI units."""

    nodes: int
    node: str = "dgx-1"
    # Maximum power of a node; None: as in the catalog.
    node_watts: float | None = None
    rack_watts: float = RACK_WATTS
    ports: int | None = None
    oversubscription: float = 2.0
    # Ports of the switches; None: `design_fabric` chooses.
    leaf: int | None = None
    core: int | None = None
    # Training rate of a node; None: ResNet-50's.
    images_s: float | None = None
    # Source of that rate, as the text appends it.
    images_from: str = ""
    image_bytes: float = IMAGE_BYTES
    # Size of the training set; None: unknown.
    data_bytes: float | None = None
    samples: int | None = None
    # Power of the building over that of the machines.
    pue: float = 1.4


@final
@dataclass(frozen=True)
class StorageDemand:
    """Rates that the storage has to deliver."""

    storage: StorageKind
    # Reads of one node, and of all nodes.
    node_bytes_s: float
    bytes_s: float
    # Writes, at 90 reads for one write.
    write_bytes_s: float
    # Capacity of a node's storage network: its 10 GbE ports, apart from the fabric.
    path_bytes_s: float
    # The local disks of a node hold the training set, so that later epochs read from there; None: unknown.
    kept: bool | None
    # Opens per second if each sample is a file.
    opens_s: float


@final
@dataclass(frozen=True)
class FacilityPlan:
    """Planned facility."""

    wanted: FacilityRequest
    machine: NodeSpec
    fabric: Fabric
    # Racks fill up by power or by height, whichever ends first.
    nodes_per_rack: int
    racks: int
    # Power left in a full rack.
    headroom_watts: float
    # Maximum power of all nodes, without switches.
    watts: float
    # `watts` times the PUE.
    building_watts: float
    heat_btu_h: float
    # Energy of the building, if it trains all year.
    kwh_a_year: float
    floor_m2: float
    gflops_per_watt: float
    # Number by type; the type of fabric cables depends on the speed of a node's links.
    cables: dict[str, int]
    # Number of 24-port switches by speed in Gb/s.
    ethernet: dict[int, int]
    feed: StorageDemand

    @property
    def pods(self) -> tuple[int, ...]:
        """Nodes under each leaf switch."""
        return count_pod_nodes(self.fabric)

    def count_racks(self, watts: float) -> int | None:
        """Counts the racks of another power that hold all nodes; None: a rack cannot hold a single one."""
        fit = count_nodes_per_rack(watts, self.watts / self.wanted.nodes, self.machine)
        return math.ceil(self.wanted.nodes / fit) if fit else None

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON."""
        values = asdict(self)
        switches = {str(ports): count for ports, count in self.fabric.switches.items()}
        derived = {
            "switches": switches,
            "node_cables": self.fabric.node_cables,
            "switch_cables": self.fabric.switch_cables,
            "links_left": self.fabric.links_left,
            "oversubscription": self.fabric.oversubscription,
        }
        return {**values, "fabric": {**values["fabric"], **derived}, "pods": list(self.pods)}


def build_facility_request(workload: Workload | None, **values: Any) -> FacilityRequest:
    """Builds a request from the given values, completed from a workload.

    A workload gives size and number of its samples; the training rate of a node then follows from the data sheet.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if workload is not None:
        # Explicit values win over those of the workload.
        samples, encoded = workload.run.samples, workload.input.encoded_bytes
        given["samples"] = samples
        if encoded:
            given.setdefault("image_bytes", encoded)
            given.setdefault("data_bytes", samples * encoded)
        if "images_s" not in given and workload.operations:
            machine = find_node(given["node"])
            job = build_job(
                workload, estimate_from_data_sheet(workload, load_devices()[machine.device]), workload.run.epochs
            )
            each = job.split_batch(machine.gpus)
            images_s = machine.gpus * each / job.compute.seconds(each)
            given |= {"images_s": images_s, "images_from": f" of {workload.name}, by the data sheet"}
    return FacilityRequest(**given)


LINK_NAMES = {100: "EDR", 200: "HDR", 400: "NDR"}
# Ports of leaf switches for links faster than EDR, for which no directors are planned.
LEAF_RADIXES = {200: 40, 400: 64}


def name_link(node: NodeSpec) -> str:
    """Names the cable type of the fabric."""
    return LINK_NAMES.get(round(node.link_gbit_s), f"{node.link_gbit_s:g} Gb/s")


def plan_facility(request: FacilityRequest) -> FacilityPlan:
    """Plans the racks, fabric and storage of a facility.

    Raises UsageError if a number is out of range, or no fabric of two levels takes so many nodes.
    """
    machine = find_node(request.node)
    ports = machine.ports if request.ports is None else request.ports
    if ports > machine.ports:
        raise UsageError(f"{machine.title} has {machine.ports} ports of the fabric, not {ports}", where="--ports")
    watts = machine.watts if request.node_watts is None else request.node_watts
    _check_ranges(request, watts)
    leaf = request.leaf or LEAF_RADIXES.get(round(machine.link_gbit_s))
    net = design_fabric(request.nodes, ports, oversubscription=request.oversubscription, leaf=leaf, core=request.core)
    per_rack = count_nodes_per_rack(request.rack_watts, watts, machine)
    if per_rack < 1:
        problem = f"a rack of {request.rack_watts / 1000:g} kW cannot hold a node of {watts / 1000:g} kW"
        raise UsageError(problem, where="--rack-kw", fix="Take racks with more power and cooling.")
    racks = math.ceil(request.nodes / per_rack)
    # Cooling and circuits are sized for the maximum power, energy for the mean power in training.
    power = request.nodes * watts
    cables = {
        name_link(machine): net.node_cables + net.switch_cables,
        "10 GbE": request.nodes * machine.ethernet_10,
        "1 GbE": request.nodes * machine.ethernet_1,
    }
    return FacilityPlan(
        request, machine, net, nodes_per_rack=per_rack, racks=racks,
        headroom_watts=request.rack_watts - per_rack * watts, watts=power, building_watts=power * request.pue,
        heat_btu_h=power * BTU_PER_WH,
        kwh_a_year=power * TRAINING_POWER_SHARE * request.pue / 1000 * HOURS_A_YEAR, floor_m2=racks * RACK_M2,
        gflops_per_watt=machine.tflops * 1e3 / watts, cables=cables,
        ethernet={10: count_ethernet_switches(cables["10 GbE"]), 1: count_ethernet_switches(cables["1 GbE"])},
        feed=_estimate_storage(request, machine),
    )  # fmt: skip


def count_nodes_per_rack(rack_watts: float, watts: float, machine: NodeSpec) -> int:
    """Counts the nodes that fit in a rack, by power and by height."""
    return min(math.floor(rack_watts / watts + 1e-9), RACK_UNITS // machine.units)


def count_pod_nodes(net: Fabric) -> tuple[int, ...]:
    """Counts the nodes under each leaf switch. A node whose ports go to two of them counts under the first."""
    ends = [min(net.nodes, math.ceil(net.nodes_per_leaf * (leaf + 1))) for leaf in range(net.leaves)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def count_ethernet_switches(ports: int) -> int:
    """Counts the 24-port switches for this many ports: one, or two levels with two uplinks per switch."""
    if ports <= ETHERNET_PORTS:
        return 1
    below = math.ceil(ports / (ETHERNET_PORTS - ETHERNET_UPLINKS))
    return below + math.ceil(below * ETHERNET_UPLINKS / ETHERNET_PORTS)


def _check_ranges(request: FacilityRequest, watts: float) -> None:
    """Raises UsageError if a number is out of range."""
    limits: list[tuple[str, float | None, float, float, str]] = [
        ("--node-kw", watts / 1000, 0.1, 200, "kW"),
        ("--rack-kw", request.rack_watts / 1000, 1, 300, "kW"),
        ("--pue", request.pue, 1, 3, ""),
        ("--images-s", request.images_s, 1, 1e8, "images/s"),
        ("--image-kb", request.image_bytes / 1000, 0.01, 1e6, "kB"),
        ("--data-gb", None if request.data_bytes is None else request.data_bytes / 1e9, 1e-9, 1e9, "GB"),
    ]
    for name, value, low, high, unit in limits:
        if value is not None and not low <= value <= high:
            bounds = f"{low:g} to {high:,g}{' ' + unit if unit else ''}"
            raise UsageError(f"{value:g} is out of range: the option takes {bounds}", where=name)


def _estimate_storage(request: FacilityRequest, machine: NodeSpec) -> StorageDemand:
    """Estimates the load on the storage, and chooses its type by the number of nodes."""
    nodes = request.nodes
    kind: StorageKind = "nfs" if nodes < PARALLEL_FROM else "parallel" if nodes <= POD_NODES else "tiered"
    images_s = machine.images_s if request.images_s is None else request.images_s
    each = images_s * request.image_bytes
    return StorageDemand(
        kind, node_bytes_s=each, bytes_s=nodes * each, write_bytes_s=nodes * each / READS_PER_WRITE,
        path_bytes_s=machine.ethernet_10 * 10e9 / 8 * LINE_SHARE,
        kept=None if request.data_bytes is None else request.data_bytes <= machine.local_tb * 1e12,
        opens_s=nodes * images_s,
    )  # fmt: skip
