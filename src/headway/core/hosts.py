"""Which host a process runs on, and by which address and network interface it and another reach each other."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket

import psutil

from headway.core.errors import CommunicationError

ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that belong to nobody (RFC 5737, RFC 3849): their route is the default route."""


def identify_host() -> str:
    """Names the host of this process: equal for two processes if and only if they share a network stack.

    The hostname alone does not do: containers and network namespaces of one machine often share it, and two machines
    may. So it is the kernel's boot id and the number of the network namespace, with the hostname for the reader.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # hidden in some sandboxes
        boot = ""
    return f"{platform.node()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def find_interface_to(address: str) -> str:
    """Name of the network interface by which `address` is reached; see `own_address`."""
    return _find_interface(find_own_address(address))


def find_own_address(towards: str) -> str:
    """The address of this host from which packets to another start, so that the other reaches it there; where that is
    this host itself, the one that was given.

    Only the routing table is asked, nothing is sent.

    Args:
        towards: a name or a number, IPv4 or IPv6. A name of this host that means 127.0.1.1 here, as Debian writes it
            into /etc/hosts, stands for the default route: the others know it by another address.

    Raises:
        CommunicationError: the name is unknown, or there is no route.
    """
    fix = "Is the address right, and is the network up? The option `interface` names one where the route misleads."
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise CommunicationError(f"this name means no address here ({error})", where=towards, fix=fix) from error
    sources = [source for info in found if (source := _find_source_address(info[0], info[4]))]
    if not sources:
        raise CommunicationError("there is no route to this address", where=towards, fix=fix)
    if all(_is_loopback(source) for source in sources) and not is_loopback_name(towards):
        families = (socket.AF_INET, socket.AF_INET6)
        beyond = [_find_source_address(family, (target, 9)) for family, target in zip(families, ANYWHERE, strict=True)]
        sources = [source for source in beyond if source] + sources
    return sources[0]


def choose_listening_address(address: str) -> str:
    """Where to listen so that others come by `address`: there, or on all interfaces ("" or "::") where that is no
    address of this host, as that of a router, or a name that means 127.0.1.1 here and something else elsewhere.
    """
    is_v6 = ":" in address
    try:
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as end:
            end.bind((address, 0))
            own = _strip_scope(end.getsockname()[0])
    except OSError:
        own = ""
    if own and (is_loopback_name(address) or not _is_loopback(own)):
        return address
    return "::" if is_v6 else ""


def find_interface_address(interface: str) -> str:
    """This host's address on a network interface, IPv4 where there is one.

    Raises:
        CommunicationError: it has none.
    """
    entries = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return entry.address
    raise CommunicationError("this network interface has no address", where=interface)


def _find_source_address(family: int, target: tuple[object, ...]) -> str | None:
    """The own address from which packets to `target` start; None where there is no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.connect(target)
            return _strip_scope(end.getsockname()[0])
    except OSError:
        return None


def _find_interface(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(_strip_scope(entry.address) == address for entry in entries):
            return name
    if _is_loopback(address):  # any 127.x.y.z is the loopback's
        return _find_interface("127.0.0.1")
    raise CommunicationError("no network interface has this address, from which packets would start", where=address)


def _strip_scope(address: str) -> str:
    """Without the scope that link-local IPv6 addresses carry."""
    return address.partition("%")[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_loopback_name(address: str) -> bool:
    """Whether the user wrote the loopback itself, not a name that happens to lead there."""
    try:
        return _is_loopback(_strip_scope(address))
    except ValueError:
        return address.lower().startswith("localhost")
