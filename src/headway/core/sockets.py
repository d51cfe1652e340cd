"""Which of this process's sockets are a group's. Gloo cannot end what is under way; its connections can be shut down.

Other threads open sockets too while a group connects. A connection is the group's where one of its ends is a port on
which a rank of the group listens; each rank tells the others its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container
from contextlib import suppress
from typing import final

Address = tuple[str, int]
"""IPv4 or IPv6, without scope; and port."""


@final
class Socket:
    """An open socket of this process: a file number that may come to mean another one, and the kernel's own number."""

    def __init__(self, number: int, inode: str) -> None:
        self.number, self.inode = number, inode

    def shut_down(self) -> None:
        """Ends the connection in both directions, where the number still means the same socket."""
        if end := self._opened():
            with end, suppress(OSError):  # it has ended already
                end.shutdown(socket.SHUT_RDWR)

    def listens_on(self) -> Address | None:
        """Where it takes TCP connections; None where it does not."""
        if end := self._opened():
            with end:
                if _inet(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return _address(end.getsockname())
        return None

    def joins(self, own: Container[Address], others: Container[Address]) -> bool:
        """Whether it is a connection that was taken at one of the own addresses, or made to one of the others'."""
        if end := self._opened():
            with end:
                try:
                    return _inet(end) and (_address(end.getpeername()) in others or _address(end.getsockname()) in own)
                except OSError:  # no connection, or none any more
                    pass
        return False

    def _opened(self) -> socket.socket | None:
        """A second handle on it; None where it is closed."""
        try:
            number = os.dup(self.number)
        except OSError:
            return None
        try:
            if _inode(number) == self.inode:
                return socket.socket(fileno=number)
        except OSError:
            pass
        os.close(number)
        return None


def open_sockets() -> list[Socket]:
    """All that this process has now."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = _inode(int(name))
        except OSError:  # the handle of the folder itself
            continue
        if inode.startswith("socket:"):
            found.append(Socket(int(name), inode))
    return found


def sockets_since(before: Container[str]) -> list[Socket]:
    """Those that are not among the inodes `before`."""
    return [one for one in open_sockets() if one.inode not in before]


def _inode(number: int) -> str:
    return os.readlink(f"/proc/self/fd/{number}")


def _inet(end: socket.socket) -> bool:
    return end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM


def _address(name: tuple[str, int]) -> Address:
    return name[0].partition("%")[0], name[1]
