"""The port that Gloo listens on, behind a packet filter that needs no privileges (SO_ATTACH_FILTER).

The kernel runs the filter on each packet to the listening socket, the first of a connection too, and silently drops
those that it does not admit.
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

# Attempts to get a port from Gloo: the listener is ambiguous if another thread starts to listen at the same moment.
DEVICES = 5

# The kernel's own limit for a filter (BPF_MAXINSNS).
MOST_INSTRUCTIONS = 4096

# Classic BPF instructions (linux/filter.h): load a word, load a half word, jump if equal, return.
LOAD, LOAD_HALF, EQUAL, RETURN = 0x20, 0x28, 0x15, 0x06
# Offsets from here on (SKF_NET_OFF) are into the IP header; smaller ones are into the TCP header.
NETWORK = 0xFFF00000
SOURCE, SOURCE_6 = NETWORK + 12, NETWORK + 8
SOURCE_PORT = 0
ADMIT, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)


@final
class FilteredPort:
    """A Gloo device and the port that it accepts connections on. It refuses all at first.

    Attributes:
        device: device for ProcessGroupGloo.
        addresses: addresses that it listens on.
    """

    def __init__(self, interface: str) -> None:
        # Gloo does not say which port it took: it is the one listener that appears during the call.
        self._listener: ProcessSocket | None = None
        self.addresses: list[Address] = []
        for _ in range(DEVICES):
            before = {end.inode for end in list_sockets()}
            self.device: Any = load_c10d().ProcessGroupGloo.create_device(interface=interface)
            ports = [(end, address) for end in list_new_sockets(before) if (address := end.read_listening_address())]
            self.addresses = [address for _, address in ports]
            if len(ports) == 1:
                self._listener = ports[0][0]
                break
        self.refuse_all()

    def refuse_all(self) -> None:
        """Admits no packet."""
        self.admit([])

    def admit(self, sources: Sequence[str] | Sequence[Address]) -> None:
        """Admits packets from these sources alone: hosts by address, or single ports of them.

        A kernel without filters, or with a smaller limit, admits all; `GlooGroups` checks every connection anyway.
        """
        if self._listener is None:
            return
        # Rules in turn, each ends with ADMIT; a packet that passes all of them is dropped.
        program = [one for source in sources for one in _build_rule(source)] + [DROP]
        if len(program) > MOST_INSTRUCTIONS or not self._listener.attach_filter(program):
            self._listener.attach_filter([ADMIT])


def list_own_addresses() -> list[str]:
    """Returns the addresses of all network interfaces: packets to another host may leave from any of them."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = (one for entries in psutil.net_if_addrs().values() for one in entries if one.family in families)
    return sorted({one.address.partition("%")[0] for one in addresses})


def _build_rule(source: str | Address) -> list[Instruction]:
    """Builds the instructions that admit packets from an address, or from one port of it."""
    host, port = (source, None) if isinstance(source, str) else source
    address = ip_address(host)
    packed, offset = address.packed, SOURCE if address.version == 4 else SOURCE_6
    words = struct.unpack(f"!{len(packed) // 4}I", packed)
    loads = [((LOAD, 0, 0, offset + 4 * place), word) for place, word in enumerate(words)]
    if port is not None:
        loads.append(((LOAD_HALF, 0, 0, SOURCE_PORT), port))
    out: list[Instruction] = []
    for place, (load, value) in enumerate(loads):
        # On a mismatch, jump behind the rest of this rule and its ADMIT, to the next rule.
        out += [load, (EQUAL, 0, 2 * (len(loads) - place - 1) + 1, value)]
    return [*out, ADMIT]
