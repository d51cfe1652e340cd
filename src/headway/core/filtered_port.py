"""Door: the port at which Gloo listens, with a packet filter before it that needs no rights (SO_ATTACH_FILTER).

The kernel asks the filter about each packet to the listening socket, the first of a connection too, and drops what it
does not admit without an answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, final

import psutil

from headway.core.process_sockets import Address, Instruction, ProcessSocket, list_new_sockets, list_sockets
from headway.core.torch_c10d import load_c10d

DEVICES = 5
"""How often Gloo is asked for a port to listen on, where another thread began to listen at the same moment."""

MOST_INSTRUCTIONS = 4096

# Of the kernel's instructions (linux/filter.h): load a word or half a word, jump where it is equal, return.
LOAD, LOAD_HALF, EQUAL, RETURN = 0x20, 0x28, 0x15, 0x06
NETWORK = 0xFFF00000
"""Offsets from here on are those of the IP header; others of the TCP header."""
SOURCE, SOURCE_6 = NETWORK + 12, NETWORK + 8
SOURCE_PORT = 0
ADMIT, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)


@final
class FilteredPort:
    """A device of Gloo, and the port at which it takes connections. It is shut at first.

    Attributes:
        device: for ProcessGroupGloo. addresses: at which it listens.
    """

    def __init__(self, interface: str) -> None:
        self._listener: ProcessSocket | None = None
        self.addresses: list[Address] = []
        for _ in range(DEVICES):
            before = {end.inode for end in list_sockets()}
            self.device: Any = load_c10d().ProcessGroupGloo.create_device(interface=interface)
            found = [(end, address) for end in list_new_sockets(before) if (address := end.read_listening_address())]
            self.addresses = [address for _, address in found]
            if len(found) == 1:
                self._listener = found[0][0]
                break
        self.refuse_all()

    def refuse_all(self) -> None:
        """Admits nobody."""
        self.admit([])

    def admit(self, sources: Sequence[str] | Sequence[Address]) -> None:
        """Admits these alone: hosts by their addresses, or single ports of them.

        A kernel without filters, or with a smaller limit for them, admits all; who connects is looked at anyway.
        """
        if self._listener is None:
            return
        program = [one for source in sources for one in _build_rule(source)] + [DROP]
        if len(program) > MOST_INSTRUCTIONS or not self._listener.attach_filter(program):
            self._listener.attach_filter([ADMIT])


def list_own_addresses() -> list[str]:
    """Of all network interfaces of this host: packets to another host may start from any of them."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (one for entries in psutil.net_if_addrs().values() for one in entries if one.family in families)
    return sorted({one.address.partition("%")[0] for one in found})


def _build_rule(source: str | Address) -> list[Instruction]:
    """Admits what comes from an address, or from one port of it."""
    host, port = (source, None) if isinstance(source, str) else source
    address = ip_address(host)
    packed, offset = address.packed, SOURCE if address.version == 4 else SOURCE_6
    words = struct.unpack(f"!{len(packed) // 4}I", packed)
    loads = [((LOAD, 0, 0, offset + 4 * place), word) for place, word in enumerate(words)]
    if port is not None:
        loads.append(((LOAD_HALF, 0, 0, SOURCE_PORT), port))
    out: list[Instruction] = []
    for place, (load, value) in enumerate(loads):
        # Where it differs, behind the rest of this rule and its end.
        out += [load, (EQUAL, 0, 2 * (len(loads) - place - 1) + 1, value)]
    return [*out, ADMIT]
