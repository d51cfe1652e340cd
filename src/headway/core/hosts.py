"""Identity of a host, and the addresses and network interfaces by which hosts reach each other."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket

import psutil

from headway.core.errors import CommunicationError

# Documentation addresses that no host has (RFC 5737, RFC 3849): their route is the default route.
ANYWHERE = ("192.0.2.1", "2001:db8::1")


def identify_host() -> str:
    """Returns an identity that two processes share if and only if they share a network stack.

    It is the kernel's boot id and the number of the network namespace, with the hostname for the reader. A hostname
    alone is not unique: containers of one machine often share it, and so may two machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    # Some sandboxes hide the file.
    except OSError:
        boot = ""
    return f"{platform.node()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def find_interface_to(address: str) -> str:
    """Returns the network interface of the route to `address`; errors as in `find_own_address`."""
    return _find_interface(find_own_address(address))


def find_own_address(towards: str) -> str:
    """Returns the address of this host that another host can reach it by: the source address of the route to it.

    Only the routing table is read; no packet is sent.

    Args:
        towards: a name or an address of the other host, IPv4 or IPv6. A name that resolves to 127.0.1.1, as Debian
            writes the own hostname into /etc/hosts, stands for the default route: other hosts resolve it otherwise.

    Raises:
        CommunicationError: the name is unknown, or there is no route.
    """
    fix = "Is the address right, and is the network up? Set the option `interface` if the route is the wrong one."
    try:
        addresses = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise CommunicationError(f"this name has no address here ({error})", where=towards, fix=fix) from error
    sources = [source for info in addresses if (source := _find_source_address(info[0], info[4]))]
    if not sources:
        raise CommunicationError("there is no route to this address", where=towards, fix=fix)
    # A hostname that leads to the loopback: prefer the source of the default route, per family.
    if all(_is_loopback(source) for source in sources) and not is_loopback_name(towards):
        families = (socket.AF_INET, socket.AF_INET6)
        beyond = [_find_source_address(family, (target, 9)) for family, target in zip(families, ANYWHERE, strict=True)]
        sources = [source for source in beyond if source] + sources
    return sources[0]


def choose_listening_address(address: str) -> str:
    """Returns the address to listen on so that other hosts can connect to `address`.

    It is `address` itself, or all interfaces ("" or "::") if this host does not have it (a router's) or resolves it to
    127.0.1.1 while other hosts resolve it otherwise.
    """
    # Binding tells whether this host has the address.
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
    """Returns this host's address on a network interface, IPv4 if there is one.

    Raises:
        CommunicationError: the interface has no address.
    """
    # IPv4 first: link-local IPv6 addresses need a scope, which other hosts do not know.
    entries = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return entry.address
    raise CommunicationError("this network interface has no address", where=interface)


def _find_source_address(family: int, target: tuple[object, ...]) -> str | None:
    """Returns the source address of packets to `target`; None without a route."""
    # `connect` on a datagram socket only reads the routing table.
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
    # All of 127.0.0.0/8 belongs to the loopback, but only 127.0.0.1 is listed.
    if _is_loopback(address):
        return _find_interface("127.0.0.1")
    raise CommunicationError("no network interface has this address, from which packets would start", where=address)


def _strip_scope(address: str) -> str:
    """Removes the scope (`%eth0`) that link-local IPv6 addresses carry."""
    return address.partition("%")[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_loopback_name(address: str) -> bool:
    """Returns True if the user wrote the loopback itself, not a name that happens to resolve to it."""
    try:
        return _is_loopback(_strip_scope(address))
    except ValueError:
        return address.lower().startswith("localhost")
