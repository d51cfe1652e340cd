"""List of all cables of a facility: which port of what goes to which port of what.

Names and ports of pods do not depend on the size of the facility. So the cables of a finished pod, up to its panels,
are among those of every larger facility. Patch cords, and cables of storage servers, change.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from headway.plan.facility.design import FacilityPlan

PATCH_CORD = "patch cord"


@final
@dataclass(frozen=True)
class Cable:
    """Cable between two ports. Ports of one device count from 1, apart for each kind: `storage 2`, `up 1`."""

    kind: str
    a: str
    a_port: str
    b: str
    b_port: str


def list_cables(plan: FacilityPlan) -> Iterator[Cable]:
    """Lists all cables: those of the fabric, of the storage network and of the management network."""
    yield from _list_fabric(plan)
    yield from _list_storage(plan)
    yield from _list_management(plan)


def format_cables(plan: FacilityPlan) -> str:
    """Formats all cables as CSV with a heading."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("cable", "from", "port", "to", "port"))
    rows.writerows(map(astuple, list_cables(plan)))
    return text.getvalue()


def _list_fabric(plan: FacilityPlan) -> Iterator[Cable]:
    """Lists the cables of the fabric, with those of storage servers that hang on it."""
    net, link = plan.fabric, plan.link_name
    switches = [
        *(f"pod {pod + 1} switch" for pod in range(net.pods)),
        *(f"storage pod {pod + 1} switch" for pod in range(net.storage_pods)),
    ]
    for node in range(net.nodes):
        pod, place = divmod(node, net.nodes_per_pod)
        for port in range(net.ports_per_node):
            down = place * net.ports_per_node + port + 1
            yield Cable(link, f"node {node + 1}", f"fabric {port + 1}", switches[pod], f"down {down}")
    for number in range(net.storage_links):
        # Storage pods fill up to as many links as they have to other pods.
        pod, down = divmod(number, net.up)
        server, port = divmod(number, net.storage_links // plan.network.servers)
        yield Cable(
            link, f"storage server {server + 1}", f"fabric {port + 1}", switches[net.pods + pod], f"down {down + 1}"
        )
    if net.is_direct:
        for up in range(1, net.up + 1):
            yield Cable(link, switches[0], f"up {up}", switches[1], f"up {up}")
    elif net.leaves > 1:
        for switch in switches:
            for up in range(1, net.up + 1):
                yield Cable(link, switch, f"up {up}", f"{switch} panel", f"back {up}")
        yield from _list_patch_cords(switches, net.up, "core", net.cores)


def _list_patch_cords(switches: list[str], up: int, name: str, cores: int) -> Iterator[Cable]:
    """Lists the patch cords between the panels of two switches, or from all panels to each core in turn."""
    if not cores:
        one, other = switches
        for number in range(1, up + 1):
            yield Cable(PATCH_CORD, f"{one} panel", f"front {number}", f"{other} panel", f"front {number}")
        return
    each = up // cores
    for place, switch in enumerate(switches):
        for number in range(up):
            turn, core = divmod(number, cores)
            port = place * each + turn + 1
            yield Cable(PATCH_CORD, f"{switch} panel", f"front {number + 1}", f"{name} {core + 1}", f"port {port}")


def _list_storage(plan: FacilityPlan) -> Iterator[Cable]:
    """Lists the cables of the storage network, if it is apart from the fabric."""
    net = plan.network
    if net.blocks is None:
        return
    switches = [f"storage switch {number + 1}" for number in range(net.leaves)]
    for node in range(plan.wanted.nodes):
        block, place = net.blocks.locate(node)
        for port in range(net.node_ports):
            down = place * net.node_ports + port + 1
            yield Cable(net.name, f"node {node + 1}", f"storage {port + 1}", switches[block], f"down {down}")
    each = net.server_ports // net.servers
    if not net.mains:
        taken = plan.wanted.nodes * net.node_ports
        for number in range(net.server_ports):
            server, port = divmod(number, each)
            at = f"down {taken + number + 1}"
            yield Cable(net.server_link, f"storage server {server + 1}", f"port {port + 1}", switches[0], at)
        return
    for switch in switches:
        for up in range(1, net.uplinks + 1):
            yield Cable(net.server_link, switch, f"up {up}", f"{switch} panel", f"back {up}")
    yield from _list_patch_cords(switches, net.uplinks, "main switch", net.mains)
    taken = net.leaves * net.uplinks // net.mains
    for number in range(net.server_ports):
        server, port = divmod(number, each)
        turn, main = divmod(number, net.mains)
        to, at = f"main switch {main + 1}", f"port {taken + turn + 1}"
        yield Cable(net.server_link, f"storage server {server + 1}", f"port {port + 1}", to, at)


def _list_management(plan: FacilityPlan) -> Iterator[Cable]:
    """Lists the cables of the management network."""
    net = plan.management
    for node in range(plan.wanted.nodes):
        block, place = net.blocks.locate(node)
        yield Cable("1 GbE", f"node {node + 1}", "management 1", f"management switch {block + 1}", f"down {place + 1}")
    # The main switch is one of the machine room: it changes with the facility, and the switches' own ports do not.
    for block in range(net.switches if net.mains else 0):
        main, port = divmod(block, net.main.ports - net.mains)
        to = f"management main {main + 1}"
        yield Cable("10 GbE", f"management switch {block + 1}", "up 1", to, f"port {port + 1}")
    for main in range(1, net.mains):
        here, there = net.main.ports - net.mains + main, net.main.ports
        yield Cable("10 GbE", "management main 1", f"port {here}", f"management main {main + 1}", f"port {there}")
