"""Sockets of this process, found under /proc, to shut down the connections of a Gloo group.

Gloo cannot abort an operation under way, but its connections can be shut down. Other threads open sockets too while a
group connects: a connection is the group's if one of its ends is a port that a rank of the group listens on, and each
rank tells the others its own port.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any, final

# An IPv4 or IPv6 address without scope, and a port.
Address = tuple[str, int]

# An instruction of a packet filter: code, jump if true, jump if false, operand (linux/filter.h).
Instruction = tuple[int, int, int, int]

# struct sock_filter and struct sock_fprog; Python's socket module does not name the two options.
INSTRUCTION, PROGRAM = struct.Struct("HBBI"), struct.Struct("HP")
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27


@final
class ProcessSocket:
    """An open socket of this process: a file descriptor, which may be reused, and the inode, which tells."""

    def __init__(self, number: int, inode: str) -> None:
        self.number, self.inode = number, inode

    def shut_down(self) -> None:
        """Shuts the connection down in both directions, if the descriptor is still the same socket."""
        if end := self._duplicate():
            # An OSError means that it has ended already.
            with end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def read_listening_address(self) -> Address | None:
        """Returns the address that it listens on; None if it is not a TCP listener."""
        if end := self._duplicate():
            with end:
                if _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return normalise_address(end.getsockname())
        return None

    def read_endpoints(self) -> tuple[Address, Address] | None:
        """Returns its own address and its peer's; None if it is no (longer a) connection."""
        if end := self._duplicate():
            with end, suppress(OSError):
                if _is_tcp(end):
                    return normalise_address(end.getsockname()), normalise_address(end.getpeername())
        return None

    def is_connected_to(self, others: Container[Address]) -> bool:
        """Returns True if its peer is one of these addresses."""
        endpoints = self.read_endpoints()
        return endpoints is not None and endpoints[1] in others

    def was_accepted_at(self, own: Container[Address]) -> bool:
        """Returns True if it was accepted at one of these own addresses, even if the peer has left since."""
        if end := self._duplicate():
            with end, suppress(OSError):
                listens = _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                return _is_tcp(end) and not listens and normalise_address(end.getsockname()) in own
        return False

    def read_peer_address(self) -> Address | None:
        """Returns its peer's address; None if it is no (longer a) connection."""
        endpoints = self.read_endpoints()
        return endpoints and endpoints[1]

    def read_source_address(self) -> Address | None:
        """Returns the local address of a connection, also while it is being established."""
        if end := self._duplicate():
            with end, suppress(OSError):
                listens = _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if _is_tcp(end) and not listens and (address := normalise_address(end.getsockname()))[1]:
                    return address
        return None

    def attach_filter(self, program: Sequence[Instruction]) -> bool:
        """Attaches a packet filter in place of the previous one; returns False if the kernel refuses."""
        # The kernel copies the program during setsockopt, so `code` has to live only until then.
        code = ctypes.create_string_buffer(b"".join(INSTRUCTION.pack(*one) for one in program))
        if end := self._duplicate():
            with end, suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, PROGRAM.pack(len(program), ctypes.addressof(code)))
                return True
        return False

    def detach_filter(self) -> None:
        """Removes the filter that an accepted connection inherits from its listener: it costs time per packet."""
        if end := self._duplicate():
            # An OSError means that it has none.
            with end, suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def _duplicate(self) -> socket.socket | None:
        """Returns a second descriptor for it, or None if it is closed."""
        # The inode is compared after `dup`: the descriptor may be closed and reused at any moment.
        try:
            number = os.dup(self.number)
        except OSError:
            return None
        try:
            if _read_inode(number) == self.inode:
                return socket.socket(fileno=number)
        except OSError:
            pass
        os.close(number)
        return None


def list_sockets() -> list[ProcessSocket]:
    """Returns all open sockets of this process."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = _read_inode(int(name))
        # The descriptor of this listing itself is closed by now.
        except OSError:
            continue
        if inode.startswith("socket:"):
            sockets.append(ProcessSocket(int(name), inode))
    return sockets


def list_new_sockets(before: Container[str]) -> list[ProcessSocket]:
    """Returns the open sockets whose inodes are not among `before`."""
    return [one for one in list_sockets() if one.inode not in before]


def _read_inode(number: int) -> str:
    return os.readlink(f"/proc/self/fd/{number}")


def _is_tcp(end: socket.socket) -> bool:
    return end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM


def normalise_address(name: Sequence[Any]) -> Address:
    """Returns host and port of a socket's name, without the scope and flow label of IPv6; JSON lists work too."""
    return str(name[0]).partition("%")[0], int(name[1])
