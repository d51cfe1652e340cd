"""Room for a number of nodes: racks, power, heat, air, floor, switches, cables, and the storage that feeds them.

The rules are those of NVIDIA's designs for 12, 36 and 144 DGX-1 ("DGX-1 clusters", the deck of 2018): six nodes of
3.2 kW in a rack of 19.2 kW; full bisection inside six nodes or a pod of 36, 2:1 between them; NFS over 10 GbE for few
nodes, a parallel file system from 32 on, tiers and NVMe read caches beyond a pod.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, final

from headway.core.errors import UsageError
from headway.plan.facility.catalog import NodeSpec, find_node
from headway.plan.facility.equipment import (
    RACK_UNITS,
    Equipment,
    count_equipment_racks,
    count_watts,
    list_equipment,
)
from headway.plan.facility.fabric import Fabric, design_fabric
from headway.plan.facility.management import ManagementNetwork, size_management
from headway.plan.facility.request import FacilityRequest, check_ranges, choose_training_rate
from headway.plan.facility.storage import StorageDemand, StorageNetwork, choose_network, estimate_demand

BTU_PER_WH = 3.412
# Share of its maximum power that a node takes in training: SaturnV's 124 DGX-1 drew 2.8 of 3.5 kW each on Linpack.
TRAINING_POWER_SHARE = 0.8
# Floor of a rack, assumed: 600 mm wide, 1.2 m deep, and as much again for its share of the aisles.
RACK_M2 = 0.6 * 2.4
HOURS_A_YEAR = 8766
# Heat that a cubic metre of air takes up per kelvin, in joules: 1.2 kg at 1,005 J/kg.
AIR_J_M3_K = 1.2 * 1005
LINK_NAMES = {100: "EDR", 200: "HDR", 400: "NDR"}
# Ports of leaf switches for links faster than EDR, for which no directors are planned.
LEAF_RADIXES = {200: 40, 400: 64}


@final
@dataclass(frozen=True)
class SwitchUse:
    """Switches of one kind, and the ports in use on the fullest of them."""

    name: str
    count: int
    ports: int
    used: int


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
    # Racks of switches and storage servers, which come on top.
    equipment_racks: int
    # Power left in a full rack of nodes.
    headroom_watts: float
    # Maximum power of all nodes; of all switches and storage servers; and of both.
    node_watts: float
    equipment_watts: float
    watts: float
    # `watts` times the PUE.
    building_watts: float
    heat_btu_h: float
    # Air that carries away the heat of all machines, and of a full rack of nodes.
    air_m3_h: float
    rack_air_m3_h: float
    # Energy of the building, if it trains all year.
    kwh_a_year: float
    # Floor of all racks.
    floor_m2: float
    gflops_per_watt: float
    # Training rate of a node, which the storage feeds, and its source.
    images_s: float
    images_from: str
    feed: StorageDemand
    network: StorageNetwork
    management: ManagementNetwork
    equipment: tuple[Equipment, ...]

    @property
    def pods(self) -> tuple[int, ...]:
        """Nodes of each pod."""
        return self.fabric.count_pod_nodes()

    @property
    def link_name(self) -> str:
        """Type of the fabric's cables."""
        return LINK_NAMES.get(round(self.machine.link_gbit_s), f"{self.machine.link_gbit_s:g} Gb/s")

    @property
    def storage_patch_cords(self) -> int:
        """Patch cords of the storage network: one for each uplink of a switch."""
        return self.network.leaves * self.network.uplinks

    @property
    def cables(self) -> dict[str, int]:
        """Number of cables by type, the fabric's first."""
        net, storage, management = self.fabric, self.network, self.management
        found = Counter({self.link_name: net.node_cables + net.switch_cables})
        if storage.leaves:
            panels = storage.leaves * storage.uplinks
            found[storage.name] += self.wanted.nodes * storage.node_ports
            found[storage.server_link] += storage.server_ports + panels
        found["1 GbE"] += self.wanted.nodes
        if management.mains:
            found["10 GbE"] += management.switches + management.mains - 1
        found["patch cord"] += net.patch_cords + self.storage_patch_cords
        return {kind: count for kind, count in found.items() if count}

    @property
    def switches(self) -> tuple[SwitchUse, ...]:
        """All switches, those of the fabric first."""
        net, storage, management = self.fabric, self.network, self.management
        found = [SwitchUse("pod", net.leaves, net.leaf_ports, net.leaf_ports_used)]
        if net.core_ports is not None:
            found.append(SwitchUse("core", net.cores, net.core_ports, net.core_ports_used))
        nodes = self.wanted.nodes
        if storage.leaf is not None and storage.blocks is not None:
            used = min(nodes, storage.blocks.size) * storage.node_ports
            # The servers hang on a lone switch.
            used += 0 if storage.mains else storage.server_ports
            found.append(SwitchUse("storage", storage.leaves, storage.leaf.ports, used))
            if storage.uplinks:
                found.append(SwitchUse("storage uplinks", storage.leaves, storage.leaf.uplinks, storage.uplinks))
        if storage.main is not None:
            found.append(SwitchUse("main", storage.mains, storage.main.ports, storage.main_ports_used))
        used = min(nodes, management.blocks.size)
        found.append(SwitchUse("management", management.switches, management.leaf.ports, used))
        if management.mains:
            main = SwitchUse("management main", management.mains, management.main.ports, management.main_ports_used)
            found.append(main)
        return tuple(found)

    def count_racks(self, watts: float) -> int | None:
        """Counts the racks of another power that hold all nodes; None: a rack cannot hold a single one."""
        fit = count_nodes_per_rack(watts, self.node_watts / self.wanted.nodes, self.machine)
        return _count_racks(self.pods, fit) if fit else None

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON."""
        values, net = asdict(self), self.fabric
        derived = {
            "switches": {str(ports): count for ports, count in net.switches.items()},
            "down": net.down,
            "leaves": net.leaves,
            "node_cables": net.node_cables,
            "switch_cables": net.switch_cables,
            "patch_cords": net.patch_cords,
            "links_left": net.links_left,
            "oversubscription": net.oversubscription,
        }
        return {
            **values,
            "fabric": {**values["fabric"], **derived},
            "pods": list(self.pods),
            "cables": self.cables,
            "switches": [asdict(one) for one in self.switches],
        }


def plan_facility(request: FacilityRequest) -> FacilityPlan:
    """Plans the racks, fabric and storage of a facility.

    Raises UsageError if a number is out of range, or no fabric of two levels takes so many nodes.
    """
    machine = find_node(request.node)
    ports = machine.ports if request.ports is None else request.ports
    if ports > machine.ports:
        raise UsageError(f"{machine.title} has {machine.ports} ports of the fabric, not {ports}", where="--ports")
    watts = machine.watts if request.node_watts is None else request.node_watts
    check_ranges(request, watts)
    leaf = request.leaf or LEAF_RADIXES.get(round(machine.link_gbit_s))
    design = partial(
        design_fabric, request.nodes, ports, oversubscription=request.oversubscription, leaf=leaf, core=request.core
    )
    images_s, images_from = choose_training_rate(request, machine)
    feed = estimate_demand(request.nodes, images_s, request.image_bytes, machine.local_tb * 1e12, request.data_bytes)
    network = choose_network(feed, machine, design)
    # Storage on the fabric needs pods of its own.
    net = design(storage_links=0 if network.leaves else network.server_ports)
    per_rack = count_nodes_per_rack(request.rack_watts, watts, machine)
    if per_rack < 1:
        problem = f"a rack of {request.rack_watts / 1000:g} kW cannot hold a node of {watts / 1000:g} kW"
        raise UsageError(problem, where="--rack-kw", fix="Take racks with more power and cooling.")
    racks = _count_racks(net.count_pod_nodes(), per_rack)
    management = size_management(net)
    equipment = list_equipment(net, network, management)
    equipment_racks = count_equipment_racks(equipment, request.rack_watts)
    # Cooling and circuits are sized for the maximum power. Energy is that of training: nodes draw less in the mean,
    # switches and servers nearly the same.
    nodes_w, equipment_w = request.nodes * watts, count_watts(equipment)
    power, mean_w = nodes_w + equipment_w, nodes_w * TRAINING_POWER_SHARE + equipment_w
    return FacilityPlan(
        request, machine, net, nodes_per_rack=per_rack, racks=racks, equipment_racks=equipment_racks,
        headroom_watts=request.rack_watts - per_rack * watts, node_watts=nodes_w, equipment_watts=equipment_w,
        watts=power, building_watts=power * request.pue, heat_btu_h=power * BTU_PER_WH,
        air_m3_h=compute_airflow(power, request.air_rise_k),
        rack_air_m3_h=compute_airflow(per_rack * watts, request.air_rise_k),
        kwh_a_year=mean_w * request.pue / 1000 * HOURS_A_YEAR, floor_m2=(racks + equipment_racks) * RACK_M2,
        gflops_per_watt=machine.tflops * 1e3 / watts, images_s=images_s, images_from=images_from, feed=feed,
        network=network, management=management, equipment=equipment,
    )  # fmt: skip


def compute_airflow(watts: float, rise_k: float) -> float:
    """Computes the m3/h of air that carry this heat away while they warm up by `rise_k` kelvin."""
    return watts * 3600 / (AIR_J_M3_K * rise_k)


def _count_racks(pods: Sequence[int], per_rack: int) -> int:
    """Counts the racks. Pods share none, so that a finished pod stays as it is."""
    return sum(math.ceil(nodes / per_rack) for nodes in pods)


def count_nodes_per_rack(rack_watts: float, watts: float, machine: NodeSpec) -> int:
    """Counts the nodes that fit in a rack, by power and by height."""
    return min(math.floor(rack_watts / watts + 1e-9), RACK_UNITS // machine.units)
