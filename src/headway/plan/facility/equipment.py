"""Switches and storage servers of a facility: their number, their power, and the racks that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headway.plan.facility.catalog import find_fabric_switch
from headway.plan.facility.fabric import Fabric
from headway.plan.facility.management import ManagementNetwork
from headway.plan.facility.storage import StorageNetwork

RACK_UNITS = 42
# Power and height of a storage server. Assumed: two processors, and 24 disks in two units.
SERVER_WATTS, SERVER_UNITS = 800, 2
SERVER = "storage server"


@final
@dataclass(frozen=True)
class Equipment:
    """Switches of one place in the networks, or storage servers. `watts` and `units` are those of one."""

    name: str
    count: int
    watts: float
    units: int


def list_equipment(fabric: Fabric, storage: StorageNetwork, management: ManagementNetwork) -> tuple[Equipment, ...]:
    """Lists the switches, those of the fabric first, and the storage servers."""
    places = [("pod", fabric.leaves, find_fabric_switch(fabric.leaf_ports))]
    if fabric.core_ports is not None:
        places.append(("core", fabric.cores, find_fabric_switch(fabric.core_ports)))
    if storage.leaf is not None:
        places.append(("storage", storage.leaves, storage.leaf))
    if storage.main is not None:
        places.append(("main", storage.mains, storage.main))
    places.append(("management", management.switches, management.leaf))
    places.append(("management main", management.mains, management.main))
    found = [Equipment(name, count, spec.watts, spec.units) for name, count, spec in places if count]
    return (*found, Equipment(SERVER, storage.servers, SERVER_WATTS, SERVER_UNITS))


def count_watts(equipment: Sequence[Equipment]) -> float:
    """Counts the power of all switches and servers."""
    return sum(one.count * one.watts for one in equipment)


def count_equipment_racks(equipment: Sequence[Equipment], rack_watts: float) -> int:
    """Counts the racks for switches and servers, by power or by height, whichever takes more.

    They stand in racks of their own: those of a finished pod stay as they are.
    """
    units = sum(one.count * one.units for one in equipment)
    return max(math.ceil(count_watts(equipment) / rack_watts - 1e-9), math.ceil(units / RACK_UNITS))
