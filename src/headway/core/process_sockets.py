"""Which of this process's sockets are a group's. Gloo cannot end what is under way; its connections can be shut down.

Other threads open sockets too while a group connects. A connection is the group's where one of its ends is a port on
which a rank of the group listens; each rank tells the others its own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any, final

Address = tuple[str, int]
"""IPv4 or IPv6, without scope; and port."""

Instruction = tuple[int, int, int, int]
"""Of a packet filter: code, how far to jump where it is true and where not, number (linux/filter.h)."""

INSTRUCTION, PROGRAM = struct.Struct("HBBI"), struct.Struct("HP")
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27


@final
class ProcessSocket:
    """An open socket of this process: a file number that may come to mean another one, and the kernel's own number."""

    def __init__(self, number: int, inode: str) -> None:
        self.number, self.inode = number, inode

    def shut_down(self) -> None:
        """Ends the connection in both directions, where the number still means the same socket."""
        if end := self._duplicate():
            with end, suppress(OSError):  # it has ended already
                end.shutdown(socket.SHUT_RDWR)

    def read_listening_address(self) -> Address | None:
        """Where it takes TCP connections; None where it does not."""
        if end := self._duplicate():
            with end:
                if _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return normalise_address(end.getsockname())
        return None

    def read_endpoints(self) -> tuple[Address, Address] | None:
        """Its own address and that of the other end; None where it is no connection, or none any more."""
        if end := self._duplicate():
            with end, suppress(OSError):
                if _is_tcp(end):
                    return normalise_address(end.getsockname()), normalise_address(end.getpeername())
        return None

    def is_connected_to(self, others: Container[Address]) -> bool:
        """Whether it is a connection to one of these addresses."""
        found = self.read_endpoints()
        return found is not None and found[1] in others

    def was_accepted_at(self, own: Container[Address]) -> bool:
        """Whether it was taken at one of the own addresses, also where the other end has left since."""
        if end := self._duplicate():
            with end, suppress(OSError):
                listens = _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                return _is_tcp(end) and not listens and normalise_address(end.getsockname()) in own
        return False

    def read_peer_address(self) -> Address | None:
        """Address of the other end; None where it is no connection, or none any more."""
        found = self.read_endpoints()
        return found and found[1]

    def read_source_address(self) -> Address | None:
        """Own address of a connection, also of one that the other end has not answered yet."""
        if end := self._duplicate():
            with end, suppress(OSError):
                listens = _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if _is_tcp(end) and not listens and (found := normalise_address(end.getsockname()))[1]:
                    return found
        return None

    def attach_filter(self, program: Sequence[Instruction]) -> bool:
        """Puts a packet filter before it, in the place of the one that there was. False where the kernel does not."""
        code = ctypes.create_string_buffer(b"".join(INSTRUCTION.pack(*one) for one in program))
        if end := self._duplicate():
            with end, suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, PROGRAM.pack(len(program), ctypes.addressof(code)))
                return True
        return False

    def detach_filter(self) -> None:
        """Takes away the filter that a connection has from the socket at which it was taken: it costs time."""
        if end := self._duplicate():
            with end, suppress(OSError):  # it has none
                end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def _duplicate(self) -> socket.socket | None:
        """A second handle on it; None where it is closed."""
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
    """All that this process has now."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = _read_inode(int(name))
        except OSError:  # the handle of the folder itself
            continue
        if inode.startswith("socket:"):
            found.append(ProcessSocket(int(name), inode))
    return found


def list_new_sockets(before: Container[str]) -> list[ProcessSocket]:
    """Those that are not among the inodes `before`."""
    return [one for one in list_sockets() if one.inode not in before]


def _read_inode(number: int) -> str:
    return os.readlink(f"/proc/self/fd/{number}")


def _is_tcp(end: socket.socket) -> bool:
    return end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM


def normalise_address(name: Sequence[Any]) -> Address:
    """Host and port of a socket's name, without the scope and the rest that IPv6 has; also as JSON brought it."""
    return str(name[0]).partition("%")[0], int(name[1])
