"""Counts the switches and cables of a fat tree whose pods can be replicated.

A pod is one leaf switch and its nodes. How many nodes it takes, and how many ports it keeps for other pods, follows
from the switch and not from the size of the facility: a finished pod stays as it is, however many more are added. The
traffic that a pod's nodes can send is at most `oversubscription` times the traffic that can leave it. All ports of a
node go to its pod.

The links of a pod end on a patch panel. Patch cords join the panels of two pods, or those of more pods with core
switches, as many links to one core as to any other. Growing changes patch cords and no cable of a finished pod.
"""

from __future__ import annotations

import math
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
    # Nodes of a finished pod, and ports that it keeps for other pods.
    nodes_per_pod: int
    up: int
    pods: int
    cores: int
    # Links of storage servers that hang on the fabric, and the pods of those servers.
    storage_links: int = 0
    storage_pods: int = 0

    @property
    def down(self) -> int:
        """Ports of a leaf switch that a finished pod's nodes take."""
        return self.nodes_per_pod * self.ports_per_node

    @property
    def leaves(self) -> int:
        """Leaf switches: one for each pod."""
        return self.pods + self.storage_pods

    @property
    def is_direct(self) -> bool:
        """True if cables join two small switches without a panel, as in NVIDIA's design for 12 nodes."""
        return self.leaves == 2 and self.leaf_ports == SMALL_RADIX

    @property
    def node_cables(self) -> int:
        """Cables from nodes and storage servers to leaf switches."""
        return self.nodes * self.ports_per_node + self.storage_links

    @property
    def switch_cables(self) -> int:
        """Cables that leave a pod: to the other pod, or to a panel."""
        return 0 if self.leaves == 1 else self.up if self.is_direct else self.leaves * self.up

    @property
    def patch_cords(self) -> int:
        """Patch cords at the panels."""
        if self.leaves == 1 or self.is_direct:
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
    def oversubscription(self) -> float:
        """Traffic that the nodes of a full pod can send over the traffic that can leave it. 1 for a single leaf."""
        return 1.0 if self.leaves == 1 else min(self.down, self.nodes * self.ports_per_node) / self.up

    @property
    def leaf_ports_used(self) -> int:
        """Ports in use on the fullest leaf switch."""
        fullest = max(min(self.down, self.nodes * self.ports_per_node), min(self.up, self.storage_links))
        return fullest + (self.up if self.leaves > 1 else 0)

    @property
    def core_ports_used(self) -> int:
        """Ports in use on each core switch."""
        return self.leaves * self.up // self.cores if self.cores else 0

    @property
    def links_left(self) -> int:
        """Free ports at the top: of the only leaf, or of the cores."""
        if self.leaves == 1:
            return self.leaf_ports - self.node_cables
        return 0 if self.core_ports is None else self.cores * (self.core_ports - self.core_ports_used)

    def count_pod_nodes(self) -> tuple[int, ...]:
        """Counts the nodes of each pod: all are full but the last."""
        each = self.nodes_per_pod
        return tuple(min(each, self.nodes - each * pod) for pod in range(self.pods))


def design_fabric(
    nodes: int,
    ports_per_node: int = 4,
    *,
    oversubscription: float = 2.0,
    leaf: int | None = None,
    core: int | None = None,
    storage_links: int = 0,
) -> Fabric:
    """Designs the fabric: pods, and the fewest cores that join them.

    Args:
        oversubscription: upper limit between pods.
        leaf, core: ports of the switches. Default: 36 if two such leaves suffice, else directors of 216 with cores of
            324 (NVIDIA's designs for DGX-1). If only the leaf is given, a core is as large.
        storage_links: links of storage servers, which get pods of their own without oversubscription.

    Raises UsageError if a number is out of range, or the nodes do not fit under two levels of such switches.
    """
    _check_numbers(nodes, ports_per_node, oversubscription, leaf, core)
    if leaf is None:
        small, _ = _split_leaf(SMALL_RADIX, ports_per_node, oversubscription)
        leaf = SMALL_RADIX if nodes <= 2 * small else DIRECTOR_RADIX
    if core is None:
        core = CORE_RADIX if leaf == DIRECTOR_RADIX else leaf
    each, up = _split_leaf(leaf, ports_per_node, oversubscription)
    pods, storage_pods = math.ceil(nodes / each), math.ceil(storage_links / up)
    leaves = pods + storage_pods
    cores = 0 if leaves <= 2 else _count_cores(leaves, up, core)
    if cores is None:
        # With one link from each leaf to each core there are as many leaves as a core has ports.
        most = each * max(0, core - storage_pods)
        problem = (
            f"{nodes:,} nodes with {ports_per_node} ports each do not fit under two levels of switches with {leaf} and"
            f" {core} ports at {oversubscription:g}:1"
        )
        larger = [one for one in RADIXES if one > leaf]
        switches = f"larger switches (--leaf {larger[-1]})" if larger else "several facilities"
        fix = f"Up to {most:,} do. Take {switches}, fewer ports per node, or more oversubscription."
        raise UsageError(problem, where="--facility", fix=fix)
    return Fabric(
        nodes, ports_per_node, leaf, core if cores else None, each, up, pods, cores, storage_links, storage_pods
    )


def _check_numbers(nodes: int, ports: int, oversubscription: float, leaf: int | None, core: int | None) -> None:
    """Raises UsageError if a number is out of range."""
    if nodes < 1:
        fix = "Write headway plan --facility 36."
        raise UsageError(f"a facility has 1 node or more, not {nodes}", where="--facility", fix=fix)
    if ports < MIN_PORTS:
        problem = f"a node needs at least {MIN_PORTS} ports of the fabric, not {ports}"
        raise UsageError(problem, where="--ports", fix="With fewer, its GPUs wait for each other. Connect 2 or more.")
    if not 1 <= oversubscription <= MAX_OVERSUBSCRIPTION:
        problem = f"oversubscription is between 1 (none) and {MAX_OVERSUBSCRIPTION:g}, not {oversubscription:g}"
        raise UsageError(problem, where="--oversubscription")
    for name, radix in (("--leaf", leaf), ("--core", core)):
        if radix is not None and radix not in RADIXES:
            problem = f"there is no switch of {radix} ports in the catalog"
            raise UsageError(problem, where=name, fix=f"Take one of {', '.join(map(str, RADIXES))}.")


def _split_leaf(leaf: int, each: int, oversubscription: float) -> tuple[int, int]:
    """Splits the ports of a leaf. Returns (nodes, uplinks).

    The most nodes win, then the number of uplinks with the most divisors, so that cores can be few at first and many
    later, then the fewest uplinks.
    """
    fewest = math.ceil(leaf / (1 + oversubscription) - 1e-9)
    splits = [
        (min(leaf - up, math.floor(up * oversubscription + 1e-9)) // each, up) for up in range(fewest, leaf // 2 + 1)
    ]
    return max(splits, key=lambda split: (split[0], sum(split[1] % one == 0 for one in range(1, split[1])), -split[1]))


def _count_cores(leaves: int, up: int, core: int) -> int | None:
    """Counts the fewest cores that give each leaf as many links to one core as to another; None: there is no such
    number."""
    least = math.ceil(leaves * up / core)
    return next((count for count in range(least, up + 1) if up % count == 0 and leaves * (up // count) <= core), None)
