"""The management network: a port of 1 GbE for each node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from headway.plan.facility.catalog import SwitchSpec, load_switches
from headway.plan.facility.fabric import Fabric
from headway.plan.facility.storage import Blocks


@final
@dataclass(frozen=True)
class ManagementNetwork:
    """Switches of the management network."""

    leaf: SwitchSpec
    blocks: Blocks
    switches: int
    # Joins the switches by one uplink each; unused if there is one switch.
    main: SwitchSpec
    mains: int

    @property
    def main_ports_used(self) -> int:
        """Ports in use on the fullest main switch."""
        if not self.mains:
            return 0
        return min(self.switches, self.main.ports - self.mains) + self.mains - 1


def size_management(fabric: Fabric) -> ManagementNetwork:
    """Sizes the management network. Pods that are no larger than a switch share none, or are whole under one."""
    small, large = load_switches()["one-small"], load_switches()["one"]
    pod = fabric.nodes_per_pod
    # A pod that a switch cannot take is split evenly over several.
    parts = math.ceil(pod / large.ports)
    size = math.ceil(pod / parts) if parts > 1 else large.ports - large.ports % pod
    blocks = Blocks(pod, size)
    switches = blocks.count(fabric.nodes)
    mains = [load_switches()[name] for name in ("ten", "main-chassis")]
    main = next((spec for spec in mains if switches < spec.ports), mains[-1])
    # Several main switches are joined to the first one, which keeps a port for each.
    count = next(number for number in range(1, 100) if number * (main.ports - number) >= switches)
    leaf = small if fabric.nodes <= small.ports and switches == 1 else large
    return ManagementNetwork(leaf, blocks, switches, main, count if switches > 1 else 0)
