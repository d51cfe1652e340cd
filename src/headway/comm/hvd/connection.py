"""Messages between a rank and the negotiator, over a socket. Between processes a Channel seals them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final

from headway.comm.messages import Message, decode, encode
from headway.core.channel import Channel

RECEIVE_BYTES = 1 << 18

HVD_PURPOSE = "hvd"

# A response may name some hundred thousand tensors.
MAX_HVD_MESSAGE_BYTES = 1 << 28


@final
class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    A forked child closes its copy: otherwise a data loader's worker would keep the connection of a killed rank alive,
    and nobody would notice its death.
    """

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self._socket, self._channel, self._lock = sock, channel, threading.Lock()
        _open_connections.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; does nothing if the other end is gone, which the receiving thread notices."""
        # Sealed and sent under one lock: the other end expects messages in the order of their seals.
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(self._channel.seal(encode(kind, **fields)))

    def receive(self) -> list[Message] | None:
        """Waits for bytes; returns the messages that are complete now, or None if the other end is gone."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
            return [decode(line) for line in self._channel.feed(data)] if data else None
        except (OSError, ValueError):
            return None

    def __iter__(self) -> Iterator[Message]:
        """Yields messages until the other end is gone."""
        while (messages := self.receive()) is not None:
            yield from messages

    def hang_up(self) -> None:
        """Ends the connection, from any thread; both receivers notice it."""
        # Unlike `close`, it wakes a thread that waits in `recv`.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect_pair(secret: bytes) -> tuple[Connection, Connection]:
    """Returns both ends of a connection within this process."""
    limit = MAX_HVD_MESSAGE_BYTES
    channels = [Channel(secret, HVD_PURPOSE, accepts=accepts, limit_bytes=limit) for accepts in (True, False)]
    # The handshake of the two channels, without the sockets.
    while not all(channel.ready for channel in channels):
        for sender, receiver in (channels, channels[::-1]):
            data = bytes(sender.out)
            sender.out.clear()
            receiver.feed(data)
    first, second = map(Connection, socket.socketpair(), channels)
    return first, second


# The connections of this process, for `_close_copies`.
_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)
