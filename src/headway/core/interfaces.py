"""Checks of the network interfaces that the user names: every host has them, and they lead to the other hosts."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from headway.core.errors import CommunicationError, UsageError
from headway.core.hosts import find_interface_address, find_interface_to


def normalise_interfaces(interface: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the interfaces as a tuple; empty if the user named none.

    Raises:
        UsageError: a name is empty or occurs twice.
    """
    names = (interface,) if isinstance(interface, str) else tuple(interface or ())
    if not all(names) or len(set(names)) < len(names):
        what = f"the network interfaces are {', '.join(names)!r}"
        raise UsageError(what, fix="Name each interface once, for example [eth0, eth1].")
    return names


def check_interfaces(
    names: Sequence[str], hosts: Sequence[Sequence[int]], rank: int, gather: Callable[[str, Any], list[Any]]
) -> None:
    """Checks the interfaces of all hosts. Every rank calls it, and all raise the same error.

    Several interfaces also have to lead to their namesakes on the other hosts: Gloo does not choose the interface that
    its packets leave by, the routing table does. Two interfaces in one subnet would send everything over one of them.

    Args:
        names: the interfaces that the user names, the same on all ranks.
        hosts: ranks of each host.
        rank: rank of this process.
        gather: publishes a JSON value under a key, and returns the values of all ranks in their order.

    Raises:
        UsageError: a host lacks an interface, or packets would leave by another one.
        RuntimeError: a rank did not answer.
    """
    own = _list_addresses()
    reports = gather("interfaces", [platform.node(), [own.get(name) for name in names], sorted(own)])
    for ranks in hosts:
        node, addresses, known = reports[ranks[0]]
        missing = [name for name, address in zip(names, addresses, strict=True) if address is None]
        if missing:
            what = f"there is no network interface {missing[0]} with an address on the host of rank {ranks[0]} ({node})"
            raise UsageError(what, fix=f"It has {', '.join(known)}. Name interfaces that all hosts have.")
    if len(names) == 1:
        return
    peers = [ranks[0] for ranks in hosts if rank not in ranks]
    complaints = gather("routes", _find_wrong_route(names, [(peer, *reports[peer][:2]) for peer in peers]))
    if complaint := next(filter(None, complaints), ""):
        fix = "Give each interface a subnet of its own, the same one on all hosts, or name one interface."
        raise UsageError(complaint, fix=fix)


def _list_addresses() -> dict[str, str]:
    """Returns the address of each network interface of this host that has one."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = psutil.net_if_addrs().items()
    return {name: find_interface_address(name) for name, those in entries if any(x.family in families for x in those)}


def _find_wrong_route(names: Sequence[str], peers: Sequence[tuple[int, str, Sequence[str]]]) -> str:
    """Returns a sentence about the first interface that is not the route to its namesake on another host."""
    for peer, node, addresses in peers:
        for name, address in zip(names, addresses, strict=True):
            try:
                route = find_interface_to(address)
            except CommunicationError:
                route = "none"
            if route != name:
                target = f"{name} of the host of rank {peer} ({node}, {address})"
                return f"packets from {platform.node()} to {target} leave by {route}, not by {name}"
    return ""
