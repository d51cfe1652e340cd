"""The load on the storage, and the network and servers that carry it.

Nodes read over Ethernet where their own ports carry what they need, else over InfiniBand. On Ethernet a number of nodes
shares a leaf switch. Its uplinks carry all that these nodes read, and end on a panel, as those of the fabric do. The
main switches join them with the storage servers. As long as one leaf switch takes all nodes and servers, it is alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, final

from headway.core.errors import UsageError
from headway.core.text_format import format_bytes, pluralise
from headway.plan.facility.catalog import NodeSpec, SwitchSpec, load_switches
from headway.plan.facility.fabric import Fabric

# Smallest number of nodes with a parallel file system, and with tiers (NVIDIA's designs: from 32, and beyond a pod).
PARALLEL_FROM, TIERED_FROM = 32, 37
READS_PER_WRITE = 90
# Share of a link's rate that file transfers reach on Ethernet, and on InfiniBand as in links.yaml.
LINE_SHARE, INFINIBAND_SHARE = 0.9, 0.92
# Share of the fabric that reading may take from the exchange of gradients. Assumed.
FABRIC_SHARE = 0.5
# Ports of a storage server, assumed: one would be lost with its cable.
SERVER_PORTS = 2
# Uplinks of a leaf: numbers that divide among 1, 2, 3, 4 or 8 main switches.
UPLINKS = (2, 3, 4, 6, 8, 12, 16)

StorageKind = Literal["nfs", "parallel", "tiered"]
STORAGE_NAMES: dict[StorageKind, str] = {
    "nfs": "NFS appliances",
    "parallel": "a parallel file system",
    "tiered": "a parallel file system in tiers, with a read cache of NVMe in each node",
}
# Switch of the catalog for each speed of Ethernet in Gb/s.
ETHERNET = {10: "ten", 25: "twenty-five", 100: "hundred"}

FabricDesign = Callable[..., Fabric]


@final
@dataclass(frozen=True)
class StorageDemand:
    """Rates that the storage has to deliver."""

    storage: StorageKind
    # Reads of one node, and of all nodes, in the first epoch.
    node_bytes_s: float
    bytes_s: float
    # Writes, at 90 reads for one write.
    write_bytes_s: float
    # Opens per second if each sample is a file.
    opens_s: float
    # Local disks of a node, which cache what it read.
    cache_bytes: float
    # Share of the training set that this cache holds, and reads of all nodes in later epochs; None: the size of the set
    # is unknown.
    cached: float | None
    later_bytes_s: float | None


@final
@dataclass(frozen=True)
class Blocks:
    """Groups of neighbouring nodes that share a switch: parts of a pod, or whole pods. Independent of the facility."""

    # Nodes of a pod, and of a full group.
    pod: int
    size: int

    def locate(self, node: int) -> tuple[int, int]:
        """Returns (group, place in the group) of a node; all count from 0."""
        if self.size >= self.pod:
            return divmod(node, self.size)
        pod, rest = divmod(node, self.pod)
        part, place = divmod(rest, self.size)
        return pod * math.ceil(self.pod / self.size) + part, place

    def count(self, nodes: int) -> int:
        """Counts the groups of this many nodes."""
        return self.locate(nodes - 1)[0] + 1


@final
@dataclass(frozen=True)
class StorageNetwork:
    """Network between nodes and storage servers."""

    # Speed and kind of a node's ports, such as `10 GbE`.
    name: str
    # Ports of a node that carry reads, and the bytes/s of all of them.
    node_ports: int
    node_bytes_s: float
    servers: int
    # All ports of the servers, and the bytes/s of one.
    server_ports: int
    server_port_bytes_s: float
    # Speed and kind of a server's ports.
    server_link: str
    # Leaf switches, apart from the fabric; None: the storage hangs on the fabric.
    leaf: SwitchSpec | None = None
    blocks: Blocks | None = None
    leaves: int = 0
    # Used uplinks of each leaf; 0: there is one leaf, and the servers hang on it.
    uplinks: int = 0
    uplink_bytes_s: float = 0.0
    main: SwitchSpec | None = None
    mains: int = 0
    # False: even the best network delivers less than the nodes read.
    carries: bool = True
    # (network, reason) of each that carries too little.
    refused: tuple[tuple[str, str], ...] = ()
    # Networks that would carry it with other cards in the nodes.
    with_cards: tuple[str, ...] = ()

    @property
    def main_ports_used(self) -> int:
        """Ports in use on the fullest main switch."""
        if not self.mains:
            return 0
        return self.leaves * self.uplinks // self.mains + math.ceil(self.server_ports / self.mains)


def estimate_demand(
    nodes: int, images_s: float, image_bytes: float, cache_bytes: float, data_bytes: float | None
) -> StorageDemand:
    """Estimates the load on the storage, and chooses its type by the number of nodes.

    Every epoch deals the samples anew over all nodes: a node finds as large a share of its samples in its cache as the
    cache holds of the set.
    """
    kind: StorageKind = "nfs" if nodes < PARALLEL_FROM else "parallel" if nodes < TIERED_FROM else "tiered"
    each = images_s * image_bytes
    cached = None if data_bytes is None else min(1.0, cache_bytes / data_bytes)
    return StorageDemand(
        kind, node_bytes_s=each, bytes_s=nodes * each, write_bytes_s=nodes * each / READS_PER_WRITE,
        opens_s=nodes * images_s, cache_bytes=cache_bytes, cached=cached,
        later_bytes_s=None if cached is None else (1 - cached) * nodes * each,
    )  # fmt: skip


class _TooSlowError(Exception):
    """A network carries less than the nodes read."""


def choose_network(demand: StorageDemand, machine: NodeSpec, design: FabricDesign) -> StorageNetwork:
    """Chooses the slowest network that carries the load: the node's own Ethernet ports, else InfiniBand.

    Where neither carries it, the node's own Ethernet ports are used as far as they go.

    Args:
        design: designs the fabric, with as many links of storage servers as its keyword `storage_links` says.
    """
    fabric = design()
    refused, with_cards = list[tuple[str, str]](), list[str]()
    chosen = None
    for speed in ETHERNET:
        try:
            found = _size_ethernet(speed, demand.node_bytes_s, machine, fabric)
        except _TooSlowError as error:
            refused.append((f"{speed} GbE", str(error)))
            continue
        if speed <= machine.storage_gbit_s:
            chosen = found
            break
        with_cards.append(found.name)
    if chosen is None:
        try:
            chosen = _size_infiniband(demand.node_bytes_s, machine, design)
        except _TooSlowError as error:
            refused.append(("InfiniBand", str(error)))
    if chosen is None:
        chosen = _size_what_ports_carry(machine, fabric)
    return replace(chosen, refused=tuple(refused), with_cards=tuple(with_cards))


def _size_what_ports_carry(machine: NodeSpec, fabric: Fabric) -> StorageNetwork:
    """Sizes the node's own Ethernet for less than the nodes read: what its ports carry, or half of that, and so on.

    Raises UsageError if the catalog's switches do not even join so many nodes.
    """
    speed = max(one for one in ETHERNET if one <= machine.storage_gbit_s)
    full = machine.storage_ports * _convert_rate(speed)
    # A thousandth of what the ports carry would be no storage network any more.
    for halvings in range(10):
        try:
            return replace(_size_ethernet(speed, full / 2**halvings, machine, fabric), carries=False)
        except _TooSlowError:
            continue
    problem = f"no switches of the catalog join the storage ports of {fabric.nodes:,} nodes"
    raise UsageError(problem, where="--facility", fix="Plan several facilities with fewer nodes each.")


def _convert_rate(gbit_s: float, share: float = LINE_SHARE) -> float:
    """Converts a link's rate into the bytes/s that it carries."""
    return gbit_s * 1e9 / 8 * share


def _size_ethernet(speed: int, node_bytes_s: float, machine: NodeSpec, fabric: Fabric) -> StorageNetwork:
    """Sizes a network of this speed. Raises _TooSlowError if it carries too little."""
    ports, leaf = machine.storage_ports, load_switches()[ETHERNET[speed]]
    own, up_bytes_s = _convert_rate(speed), _convert_rate(leaf.uplink_gbit_s)
    if node_bytes_s > ports * own:
        reason = f"a node reads {format_bytes(node_bytes_s)}/s, and its {pluralise(ports, 'port')} carry"
        raise _TooSlowError(f"{reason} {format_bytes(ports * own)}/s")
    # Even one node must not read more than the uplinks carry.
    share = min(leaf.ports // ports, math.floor(leaf.uplinks * up_bytes_s / node_bytes_s))
    if share < 1:
        raise _TooSlowError(f"the uplinks of a switch carry {format_bytes(leaf.uplinks * up_bytes_s)}/s")
    pod = fabric.nodes_per_pod
    size = math.ceil(pod / math.ceil(pod / share)) if share < pod else share - share % pod
    blocks, nodes = Blocks(pod, size), fabric.nodes
    leaves, total = blocks.count(nodes), nodes * node_bytes_s
    network = StorageNetwork(
        f"{speed} GbE", ports, ports * own, servers=0, server_ports=0, server_port_bytes_s=own,
        server_link=f"{speed} GbE", leaf=leaf, blocks=blocks, leaves=leaves,
    )  # fmt: skip
    # One switch for nodes and servers, if it has the ports; the smaller one if that suffices.
    alone = _round_up(total / own, SERVER_PORTS)
    if leaves == 1:
        for spec in (load_switches()["ten-small"], leaf):
            if spec.gbit_s == speed and nodes * ports + alone <= spec.ports:
                return replace(network, leaf=spec, servers=alone // SERVER_PORTS, server_ports=alone)
    uplinks = next(count for count in UPLINKS if count * up_bytes_s >= size * node_bytes_s * (1 - 1e-9))
    main = _choose_main(leaves, uplinks, total / up_bytes_s)
    if main is None:
        raise _TooSlowError(f"no switch joins {leaves:,} leaf switches and the servers of {format_bytes(total)}/s")
    spec, mains = main
    server_ports = _round_up(total / up_bytes_s, SERVER_PORTS * mains)
    return replace(
        network, servers=server_ports // SERVER_PORTS, server_ports=server_ports, server_port_bytes_s=up_bytes_s,
        server_link=f"{leaf.uplink_gbit_s:g} GbE", uplinks=uplinks, uplink_bytes_s=up_bytes_s, main=spec, mains=mains,
    )  # fmt: skip


def _choose_main(leaves: int, uplinks: int, server_ports: float) -> tuple[SwitchSpec, int] | None:
    """Chooses the main switches and their number, which divides the uplinks of a leaf; None: none have the ports."""
    for spec in (load_switches()["main"], load_switches()["main-chassis"]):
        for mains in (count for count in range(1, uplinks + 1) if uplinks % count == 0):
            each = _round_up(server_ports, SERVER_PORTS * mains) // mains
            if leaves * uplinks // mains + each <= spec.ports:
                return spec, mains
    return None


def _round_up(number: float, step: int) -> int:
    """Rounds up to a multiple, at least one step."""
    return step * max(1, math.ceil(number / step - 1e-9))


def _size_infiniband(node_bytes_s: float, machine: NodeSpec, design: FabricDesign) -> StorageNetwork:
    """Sizes storage servers that hang on the fabric. Raises _TooSlowError if it carries too little."""
    fabric = design()
    link = _convert_rate(machine.link_gbit_s, INFINIBAND_SHARE)
    own, pod = fabric.ports_per_node * link, fabric.up * link / fabric.nodes_per_pod
    if node_bytes_s > FABRIC_SHARE * min(own, pod):
        reason = f"a node reads {format_bytes(node_bytes_s)}/s, and half of its share of the fabric is"
        raise _TooSlowError(f"{reason} {format_bytes(FABRIC_SHARE * min(own, pod))}/s")
    links = _round_up(fabric.nodes * node_bytes_s / link, SERVER_PORTS)
    try:
        design(storage_links=links)
    except UsageError:
        raise _TooSlowError(f"the fabric has no ports for {links:,} links of storage servers") from None
    return StorageNetwork(
        "InfiniBand", fabric.ports_per_node, own, servers=links // SERVER_PORTS, server_ports=links,
        server_port_bytes_s=link, server_link=f"{machine.link_gbit_s:g} Gb/s InfiniBand",
    )  # fmt: skip
