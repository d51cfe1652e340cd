"""Counts the switches and cables of a fat tree with one or two levels.

Nodes connect to leaf switches. A leaf keeps so many ports for other switches that the traffic its nodes can send is at
most `oversubscription` times the traffic that can leave it. Above 1:1 all ports of a node go to the same leaf. One leaf
needs nothing above it, two are joined directly, more of them hang on core switches, with as many links to one core as
to any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

# Ports of the switches in NVIDIA's designs for 12, 36 and 144 DGX-1: a box, the director of a pod, and the core.
SMALL_RADIX, DIRECTOR_RADIX, CORE_RADIX = 36, 216, 324
# Available numbers of ports: EDR boxes and directors; 40 of HDR, 64 and 128 of NDR.
RADIXES = (36, 40, 64, 128, 216, 324)
# Fewest ports of a node in the fabric: with one its GPUs starve (the same designs).
MIN_PORTS = 2
MAX_OVERSUBSCRIPTION = 8.0


@final
@dataclass(frozen=True)
class Fabric:
    """Counts of a fabric."""

    nodes: int
    ports_per_node: int
    leaf_ports: int
    # Of a core switch; None: there is none.
    core_ports: int | None
    # Ports of each leaf for nodes, and for other switches if there are several leaves.
    down: int
    up: int
    leaves: int
    cores: int

    @property
    def node_cables(self) -> int:
        """Cables from nodes to leaf switches."""
        return self.nodes * self.ports_per_node

    @property
    def switch_cables(self) -> int:
        """Cables between switches."""
        if self.leaves == 1:
            return 0
        return self.up if self.leaves == 2 else self.leaves * self.up

    @property
    def switches(self) -> dict[int, int]:
        """Number of switches by their ports."""
        switches = {self.leaf_ports: self.leaves}
        if self.core_ports is not None:
            switches[self.core_ports] = switches.get(self.core_ports, 0) + self.cores
        return switches

    @property
    def nodes_per_leaf(self) -> float:
        """Nodes under a full leaf."""
        return self.down / self.ports_per_node

    @property
    def oversubscription(self) -> float:
        """Traffic that the nodes of a full leaf can send over the traffic that can leave it. 1 for a single leaf."""
        return 1.0 if self.leaves == 1 else min(self.down, self.node_cables) / self.up

    @property
    def links_left(self) -> int:
        """Free ports at the top: of the only leaf, or of the cores."""
        if self.leaves == 1:
            return self.leaf_ports - self.node_cables
        return 0 if self.core_ports is None else self.cores * self.core_ports - self.switch_cables


def design_fabric(
    nodes: int,
    ports_per_node: int = 4,
    *,
    oversubscription: float = 2.0,
    leaf: int | None = None,
    core: int | None = None,
) -> Fabric:
    """Designs the fabric with the fewest switches.

    Args:
        oversubscription: upper limit between leaves.
        leaf, core: ports of the switches. Default: 36 if two such leaves suffice, else directors of 216 with cores of
            324 (NVIDIA's designs for DGX-1). If only the leaf is given, a core is as large.

    Raises UsageError if a number is out of range, or the nodes do not fit under two levels of such switches.
    """
    if nodes < 1:
        fix = "Write headway plan --facility 36."
        raise UsageError(f"a facility has 1 node or more, not {nodes}", where="--facility", fix=fix)
    if ports_per_node < MIN_PORTS:
        problem = f"a node needs at least {MIN_PORTS} ports of the fabric, not {ports_per_node}"
        raise UsageError(problem, where="--ports", fix="With fewer, its GPUs wait for each other. Connect 2 or more.")
    if not 1 <= oversubscription <= MAX_OVERSUBSCRIPTION:
        problem = f"oversubscription is between 1 (none) and {MAX_OVERSUBSCRIPTION:g}, not {oversubscription:g}"
        raise UsageError(problem, where="--oversubscription")
    for name, ports in (("--leaf", leaf), ("--core", core)):
        if ports is not None and ports not in RADIXES:
            problem = f"there is no switch of {ports} ports in the catalog"
            raise UsageError(problem, where=name, fix=f"Take one of {', '.join(map(str, RADIXES))}.")
    # Up to two small boxes, else directors: as in the designs above.
    if leaf is None:
        small = _find_smallest(nodes, ports_per_node, SMALL_RADIX, SMALL_RADIX, oversubscription)
        leaf = SMALL_RADIX if small is not None and small[1] <= 2 else DIRECTOR_RADIX
    if core is None:
        core = CORE_RADIX if leaf == DIRECTOR_RADIX else leaf
    fabric = _find_smallest(nodes, ports_per_node, leaf, core, oversubscription)
    if fabric is None:
        most = _count_most_nodes(ports_per_node, leaf, core, oversubscription)
        problem = (
            f"{nodes:,} nodes with {ports_per_node} ports each do not fit under two levels of switches with {leaf} and"
            f" {core} ports at {oversubscription:g}:1"
        )
        fix = f"Up to {most:,} do. Take larger switches, fewer ports per node, or more oversubscription."
        raise UsageError(problem, where="--facility", fix=fix)
    cores, leaves, up, down = fabric
    return Fabric(nodes, ports_per_node, leaf, core if cores else None, down, up, leaves, cores)


def _find_smallest(
    nodes: int, each: int, leaf: int, core: int, oversubscription: float
) -> tuple[int, int, int, int] | None:
    """Finds (cores, leaves, up, down) with the fewest switches, and among these with the fewest uplinks; None: none
    fits."""
    ports = nodes * each
    if ports <= leaf:
        return 0, 1, 0, leaf
    # Splits come in ascending order of uplinks: a later one must save a switch to win.
    best = None
    for up, down in _list_splits(leaf, each, oversubscription):
        leaves = math.ceil(ports / down)
        cores = 0 if leaves <= 2 else _count_cores(leaves, up, core)
        if cores is not None and (best is None or leaves + cores < best[0] + best[1]):
            best = cores, leaves, up, down
    return best


def _list_splits(leaf: int, each: int, oversubscription: float) -> Iterator[tuple[int, int]]:
    """Lists (up, down) of a leaf, from the fewest uplinks to as many as there are downlinks."""
    for up in range(math.ceil(leaf / (1 + oversubscription) - 1e-9), leaf // 2 + 1):
        down = min(leaf - up, math.floor(up * oversubscription + 1e-9))
        # Oversubscribed leaves take whole nodes: a node on two leaves would send half of its traffic over the uplinks.
        if oversubscription > 1:
            down -= down % each
        if down:
            yield up, down


def _count_cores(leaves: int, up: int, core: int) -> int | None:
    """Counts the fewest cores that give each leaf as many links to one core as to another; None: there is no such
    number."""
    least = math.ceil(leaves * up / core)
    return next((count for count in range(least, up + 1) if up % count == 0 and leaves * (up // count) <= core), None)


def _count_most_nodes(each: int, leaf: int, core: int, oversubscription: float) -> int:
    """Counts the most nodes that fit, with one link from each leaf to each core."""
    most = (core * down for _, down in _list_splits(leaf, each, oversubscription))
    return max(leaf, *most) // each
