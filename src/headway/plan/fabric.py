"""Switches and cables: a fat tree of one or two levels, counted and listed port by port.

Nodes' ports go to leaf switches; a leaf keeps so many ports for other switches that what may leave it is at most
`oversubscription` times less than what its nodes can send. Where that is more than 1, all ports of a node go to one
leaf. One leaf needs nothing above it, two are joined to each other, more of them hang on core switches, each leaf with
as many links to one core as to any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

SMALL_RADIX, DIRECTOR_RADIX, CORE_RADIX = 36, 216, 324
"""Ports of the switches in NVIDIA's designs for 12, 36 and 144 DGX-1: a box, a pod's director, and what joins pods."""
RADIXES = (36, 40, 64, 128, 216, 324)
"""Ports of a switch: EDR boxes and directors; 40 of HDR, 64 and 128 of NDR."""
MIN_PORTS = 2
"""Of a node, connected to the fabric: with one, it starves GPUs (the same designs)."""
MAX_OVERSUBSCRIPTION = 8.0


@final
@dataclass(frozen=True)
class Cable:
    """From one port to another; both are counted from 1."""

    a: str
    a_port: int
    b: str
    b_port: int


@final
@dataclass(frozen=True)
class Fabric:
    """Attributes:
    down, up: ports of each leaf for nodes, and for other switches where there are several leaves.
    core_ports: of a core switch; None: there is none.
    """

    nodes: int
    ports_per_node: int
    leaf_ports: int
    core_ports: int | None
    down: int
    up: int
    leaves: int
    cores: int

    @property
    def node_cables(self) -> int:
        return self.nodes * self.ports_per_node

    @property
    def switch_cables(self) -> int:
        """Between switches."""
        if self.leaves == 1:
            return 0
        return self.up if self.leaves == 2 else self.leaves * self.up

    @property
    def switches(self) -> dict[int, int]:
        """ports -> how many of them."""
        found = {self.leaf_ports: self.leaves}
        if self.core_ports is not None:
            found[self.core_ports] = found.get(self.core_ports, 0) + self.cores
        return found

    @property
    def nodes_per_leaf(self) -> float:
        """Of a full one."""
        return self.down / self.ports_per_node

    @property
    def oversubscription(self) -> float:
        """Of a full leaf: what its nodes can send over what can leave it. 1: there is one leaf, or they are equal."""
        return 1.0 if self.leaves == 1 else min(self.down, self.node_cables) / self.up

    @property
    def links_left(self) -> int:
        """Ports at the top that are free for more: of the only leaf, or of the cores."""
        if self.leaves == 1:
            return self.leaf_ports - self.node_cables
        return 0 if self.core_ports is None else self.cores * self.core_ports - self.switch_cables

    def list_cables(self) -> Iterator[Cable]:
        """All of the fabric's, nodes first."""
        for number in range(self.node_cables):
            node, port = divmod(number, self.ports_per_node)
            leaf, at = divmod(number, self.down)
            yield Cable(f"node {node + 1}", port + 1, f"leaf {leaf + 1}", at + 1)
        if self.leaves == 2:
            for number in range(self.up):
                at = self.down + number + 1
                yield Cable("leaf 1", at, "leaf 2", at)
        elif self.leaves > 2:
            each = self.up // self.cores
            for leaf in range(self.leaves):
                for number in range(self.up):
                    core, turn = number % self.cores, number // self.cores
                    yield Cable(f"leaf {leaf + 1}", self.down + number + 1, f"core {core + 1}", leaf * each + turn + 1)


def design_fabric(
    nodes: int,
    ports_per_node: int = 4,
    *,
    oversubscription: float = 2.0,
    leaf: int | None = None,
    core: int | None = None,
) -> Fabric:
    """The fabric with the fewest switches.

    Args:
        oversubscription: at most so much between leaves.
        leaf, core: ports of the switches; default: of 36 where two of them suffice, else directors of 216 with cores of
            324 (NVIDIA's designs for DGX-1); a core is as large as a leaf where only the leaf is given.

    Raises:
        UsageError: a number is out of range, or so many nodes do not fit under two levels of such switches.
    """
    if nodes < 1:
        raise UsageError(f"a facility has 1 node or more, not {nodes}", fix="headway plan --facility 36")
    if ports_per_node < MIN_PORTS:
        what = f"a node wants at least {MIN_PORTS} ports of the fabric, not {ports_per_node}"
        raise UsageError(what, where="--ports", fix="With fewer, its GPUs wait for each other: connect 2 or more.")
    if not 1 <= oversubscription <= MAX_OVERSUBSCRIPTION:
        what = f"oversubscription is between 1 (none) and {MAX_OVERSUBSCRIPTION:g}, not {oversubscription:g}"
        raise UsageError(what, where="--oversubscription")
    for name, ports in (("--leaf", leaf), ("--core", core)):
        if ports is not None and ports not in RADIXES:
            what = f"there is no switch of {ports} ports here"
            raise UsageError(what, where=name, fix=f"Take one of {', '.join(map(str, RADIXES))}.")
    if leaf is None:
        small = _find_smallest(nodes, ports_per_node, SMALL_RADIX, SMALL_RADIX, oversubscription)
        leaf = SMALL_RADIX if small is not None and small[1] <= 2 else DIRECTOR_RADIX
    if core is None:
        core = CORE_RADIX if leaf == DIRECTOR_RADIX else leaf
    found = _find_smallest(nodes, ports_per_node, leaf, core, oversubscription)
    if found is None:
        most = _count_most_nodes(ports_per_node, leaf, core, oversubscription)
        what = (
            f"{nodes:,} nodes with {ports_per_node} ports each do not fit under two levels of switches with {leaf} and"
            f" {core} ports at {oversubscription:g}:1"
        )
        fix = f"Up to {most:,} do; larger switches, fewer ports a node or more oversubscription take more."
        raise UsageError(what, where="--facility", fix=fix)
    cores, leaves, up, down = found
    return Fabric(nodes, ports_per_node, leaf, core if cores else None, down, up, leaves, cores)


def _find_smallest(
    nodes: int, each: int, leaf: int, core: int, oversubscription: float
) -> tuple[int, int, int, int] | None:
    """(cores, leaves, up, down) with the fewest switches; of these with the fewest links upwards."""
    ports = nodes * each
    if ports <= leaf:
        return 0, 1, 0, leaf
    best = None
    for up, down in _list_splits(leaf, each, oversubscription):
        leaves = math.ceil(ports / down)
        cores = 0 if leaves <= 2 else _count_cores(leaves, up, core)
        if cores is not None and (best is None or leaves + cores < best[0] + best[1]):
            best = cores, leaves, up, down
    return best


def _list_splits(leaf: int, each: int, oversubscription: float) -> Iterator[tuple[int, int]]:
    """(up, down) of a leaf, from the fewest links upwards to as many as there are downwards."""
    for up in range(math.ceil(leaf / (1 + oversubscription) - 1e-9), leaf // 2 + 1):
        down = min(leaf - up, math.floor(up * oversubscription + 1e-9))
        if oversubscription > 1:
            down -= down % each
        if down:
            yield up, down


def _count_cores(leaves: int, up: int, core: int) -> int | None:
    """The fewest that take all links so that each leaf has as many to one as to another; None: there is no such
    number."""
    least = math.ceil(leaves * up / core)
    return next((count for count in range(least, up + 1) if up % count == 0 and leaves * (up // count) <= core), None)


def _count_most_nodes(each: int, leaf: int, core: int, oversubscription: float) -> int:
    """With one link from each leaf to each core."""
    most = (core * down for _, down in _list_splits(leaf, each, oversubscription))
    return max(leaf, *most) // each
