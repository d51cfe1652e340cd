"""A room for so many nodes: racks, power, heat, floor, switches and cables, and the storage that feeds them.

The rules are those of NVIDIA's designs for 12, 36 and 144 DGX-1 ("DGX-1 clusters", the deck of 2018): six nodes of
3.2 kW in a rack of 19.2 kW; full bisection inside six nodes or a pod of 36, 2:1 between them; NFS over 10 GbE for few
nodes, a parallel file system from 32 on, tiers and read caches of NVMe beyond a pod.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, final

from headway.core.errors import UsageError, suggest_nearest
from headway.core.workload import Workload
from headway.plan.ask import job_of, of_device
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import devices
from headway.plan.fabric import Fabric, fabric

RACK_WATTS, RACK_UNITS = 19_200, 42
POD = 36
"""Nodes of a pod."""
PARALLEL_FROM = 32
"""Nodes from which on storage is a parallel file system."""
READS_PER_WRITE = 90
IMAGE_BYTES = 114_660
"""Of an encoded image of ImageNet in the mean (MLPerf Storage, its ResNet-50 workload)."""
BTU_PER_WH = 3.412
USED = 0.8
"""Of what a data sheet says at most, that a node takes in training: SaturnV's 124 DGX-1 drew 2.8 of 3.5 kW each on
Linpack."""
RACK_M2 = 0.6 * 2.4
"""Floor of a rack, assumed: 600 mm wide, 1.2 m deep, and as much for its share of the aisles before and behind it."""
HOURS_A_YEAR = 8766
LINE_SHARE = 0.9
"""Of a link's rate that files can have."""
ETHERNET_PORTS, ETHERNET_UPLINKS = 24, 2
"""In NVIDIA's design 12 nodes of two 10 GbE ports each fill one switch of 24: none is left for the storage itself."""

StorageKind = Literal["nfs", "parallel", "tiered"]
STORAGE: dict[StorageKind, str] = {
    "nfs": "NFS appliances on 10 GbE",
    "parallel": "a parallel file system",
    "tiered": "a parallel file system in tiers, with a read cache of NVMe in each node",
}


@final
@dataclass(frozen=True)
class Node:
    """A machine of the catalog; units as in its file."""

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
def catalog() -> dict[str, Node]:
    """name -> machine."""
    return {name: Node(**values) for name, values in read_catalog("nodes").items()}


def node_of(name: str) -> Node:
    """Raises UsageError: there is none of this name."""
    found = catalog()
    if name not in found:
        raise UsageError(f"there is no node {name!r} in the catalog", where="--node", fix=suggest_nearest(name, found))
    return found[name]


@final
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is planned.

    Attributes:
        node_watts, ports: default: as in the catalog.
        leaf, core: ports of the switches; default: as `headway.plan.fabric` takes them.
        images_s: that one node trains on; default: ResNet-50's on it. images_from: words that say what of.
        image_bytes: that are read for one of them.
        data_bytes: of the whole set; None: unknown.
        samples: files or records of it; None: unknown.
        pue: power of the building over that of the machines.
    """

    nodes: int
    node: str = "dgx-1"
    node_watts: float | None = None
    rack_watts: float = RACK_WATTS
    ports: int | None = None
    oversubscription: float = 2.0
    leaf: int | None = None
    core: int | None = None
    images_s: float | None = None
    images_from: str = ""
    image_bytes: float = IMAGE_BYTES
    data_bytes: float | None = None
    samples: int | None = None
    pue: float = 1.4


@final
@dataclass(frozen=True)
class Feed:
    """What the storage has to give. Attributes:
    node_bytes_s, bytes_s: to one node, and to all.
    write_bytes_s: beside it, at 90 reads for one write.
    path_bytes_s: that a node's storage network carries: its 10 GbE, apart from the fabric.
    kept: the data set fits on the disks of one node, so that later epochs read from there; None: unknown.
    opens_s: opens a second, were each sample a file.
    """

    storage: StorageKind
    node_bytes_s: float
    bytes_s: float
    write_bytes_s: float
    path_bytes_s: float
    kept: bool | None
    opens_s: float


@final
@dataclass(frozen=True)
class Facility:
    """Attributes:
    nodes_per_rack, racks: by power, and by height.
    headroom_watts: of a full rack, that its nodes leave.
    watts, heat_btu_h: of all nodes at their most; switches are not in it.
    building_watts: times the PUE. kwh_a_year: of the building, if it trains all year.
    cables: kind -> how many; `EDR` by the speed of the node's links.
    ethernet: speed in Gb/s -> switches of 24 ports.
    """

    wanted: Wanted
    machine: Node
    fabric: Fabric
    nodes_per_rack: int
    racks: int
    headroom_watts: float
    watts: float
    building_watts: float
    heat_btu_h: float
    kwh_a_year: float
    floor_m2: float
    gflops_per_watt: float
    cables: dict[str, int]
    ethernet: dict[int, int]
    feed: Feed

    @property
    def pods(self) -> tuple[int, ...]:
        """Nodes under each leaf switch."""
        return pods_of(self.fabric)

    def racks_of(self, watts: float) -> int | None:
        """How many of another power would take the nodes; None: one does not hold a single node."""
        fit = fitting(watts, self.watts / self.wanted.nodes, self.machine)
        return math.ceil(self.wanted.nodes / fit) if fit else None

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        found = asdict(self)
        switches = {str(ports): count for ports, count in self.fabric.switches.items()}
        of_fabric = {
            "switches": switches,
            "node_cables": self.fabric.node_cables,
            "switch_cables": self.fabric.switch_cables,
            "links_left": self.fabric.links_left,
            "oversubscription": self.fabric.oversubscription,
        }
        return {**found, "fabric": {**found["fabric"], **of_fabric}, "pods": list(self.pods)}


def wanted_for(workload: Workload | None, **values: Any) -> Wanted:
    """What is asked, with a workload's images and samples where nothing is said of them; the rate at which a node
    trains on them is then that of its data sheet, as `headway.plan.ask` has it."""
    given = {name: value for name, value in values.items() if value is not None}
    if workload is not None:
        samples, encoded = workload.run.samples, workload.input.encoded_bytes
        given["samples"] = samples
        if encoded:
            given.setdefault("image_bytes", encoded)
            given.setdefault("data_bytes", samples * encoded)
        if "images_s" not in given and workload.operations:
            machine = node_of(given["node"])
            job = job_of(workload, of_device(workload, devices()[machine.device]), workload.run.epochs)
            each = job.per_device_of(machine.gpus)
            images_s = machine.gpus * each / job.compute.seconds(each)
            given |= {"images_s": images_s, "images_from": f" of {workload.name}, by the data sheet"}
    return Wanted(**given)


LINKS = {100: "EDR", 200: "HDR", 400: "NDR"}
LEAVES = {200: 40, 400: 64}
"""Ports of the boxes for faster links than EDR, of which directors are not planned."""


def link_name(node: Node) -> str:
    """Of the fabric's cables."""
    return LINKS.get(round(node.link_gbit_s), f"{node.link_gbit_s:g} Gb/s")


def facility(wanted: Wanted) -> Facility:
    """Raises UsageError: a number is out of range; or no design of two levels of switches takes so many nodes."""
    machine = node_of(wanted.node)
    ports = machine.ports if wanted.ports is None else wanted.ports
    if ports > machine.ports:
        raise UsageError(f"{machine.title} has {machine.ports} ports of the fabric, not {ports}", where="--ports")
    watts = machine.watts if wanted.node_watts is None else wanted.node_watts
    _check(wanted, watts)
    leaf = wanted.leaf or LEAVES.get(round(machine.link_gbit_s))
    net = fabric(wanted.nodes, ports, oversubscription=wanted.oversubscription, leaf=leaf, core=wanted.core)
    per_rack = fitting(wanted.rack_watts, watts, machine)
    if per_rack < 1:
        what = f"a rack of {wanted.rack_watts / 1000:g} kW holds no node of {watts / 1000:g} kW"
        raise UsageError(what, where="--rack-kw", fix="Take racks with more power and cooling.")
    racks = math.ceil(wanted.nodes / per_rack)
    power = wanted.nodes * watts
    cables = {
        link_name(machine): net.node_cables + net.switch_cables,
        "10 GbE": wanted.nodes * machine.ethernet_10,
        "1 GbE": wanted.nodes * machine.ethernet_1,
    }
    return Facility(
        wanted,
        machine,
        net,
        nodes_per_rack=per_rack,
        racks=racks,
        headroom_watts=wanted.rack_watts - per_rack * watts,
        watts=power,
        building_watts=power * wanted.pue,
        heat_btu_h=power * BTU_PER_WH,
        kwh_a_year=power * USED * wanted.pue / 1000 * HOURS_A_YEAR,
        floor_m2=racks * RACK_M2,
        gflops_per_watt=machine.tflops * 1e3 / watts,
        cables=cables,
        ethernet={10: ethernet_switches(cables["10 GbE"]), 1: ethernet_switches(cables["1 GbE"])},
        feed=_feed(wanted, machine),
    )


def fitting(rack_watts: float, watts: float, machine: Node) -> int:
    """Nodes that a rack takes, by power and by height."""
    return min(math.floor(rack_watts / watts + 1e-9), RACK_UNITS // machine.units)


def pods_of(net: Fabric) -> tuple[int, ...]:
    """Nodes under each leaf switch; of a node whose ports go to two of them, under the first."""
    ends = [min(net.nodes, math.ceil(net.nodes_per_leaf * (leaf + 1))) for leaf in range(net.leaves)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def ethernet_switches(ports: int) -> int:
    """Of 24 ports: one; or as many as leave two ports of each for links to one more level above them."""
    if ports <= ETHERNET_PORTS:
        return 1
    below = math.ceil(ports / (ETHERNET_PORTS - ETHERNET_UPLINKS))
    return below + math.ceil(below * ETHERNET_UPLINKS / ETHERNET_PORTS)


def _check(wanted: Wanted, watts: float) -> None:
    """Raises UsageError."""
    limits: list[tuple[str, float | None, float, float, str]] = [
        ("--node-kw", watts / 1000, 0.1, 200, "kW"),
        ("--rack-kw", wanted.rack_watts / 1000, 1, 300, "kW"),
        ("--pue", wanted.pue, 1, 3, ""),
        ("--images-s", wanted.images_s, 1, 1e8, "images/s"),
        ("--image-kb", wanted.image_bytes / 1000, 0.01, 1e6, "kB"),
        ("--data-gb", None if wanted.data_bytes is None else wanted.data_bytes / 1e9, 1e-9, 1e9, "GB"),
    ]
    for name, value, low, high, unit in limits:
        if value is not None and not low <= value <= high:
            what = f"{value:g} is out of range: between {low:g} and {high:,g}{' ' + unit if unit else ''}"
            raise UsageError(what, where=name)


def _feed(wanted: Wanted, machine: Node) -> Feed:
    nodes = wanted.nodes
    kind: StorageKind = "nfs" if nodes < PARALLEL_FROM else "parallel" if nodes <= POD else "tiered"
    images_s = machine.images_s if wanted.images_s is None else wanted.images_s
    each = images_s * wanted.image_bytes
    return Feed(
        kind,
        node_bytes_s=each,
        bytes_s=nodes * each,
        write_bytes_s=nodes * each / READS_PER_WRITE,
        path_bytes_s=machine.ethernet_10 * 10e9 / 8 * LINE_SHARE,
        kept=None if wanted.data_bytes is None else wanted.data_bytes <= machine.local_tb * 1e12,
        opens_s=nodes * images_s,
    )
