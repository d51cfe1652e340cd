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

CHUNK = 1 << 18

PURPOSE = "hvd"

# The longest message: a response that names some hundred thousand tensors.
LIMIT_BYTES = 1 << 28


@final
class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    A forked child closes its copy: otherwise a data loader's worker would keep the connection of a killed rank alive,
    and nobody would notice its death.
    """

    def __init__(self, end: socket.socket, channel: Channel) -> None:
        self._end, self._channel, self._lock = end, channel, threading.Lock()
        _OPEN.add(self)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; does nothing if the other end is gone, which the receiving thread notices."""
        with self._lock, contextlib.suppress(OSError):
            self._end.sendall(self._channel.seal(encode(kind, **fields)))

    def receive(self) -> list[Message] | None:
        """Waits for bytes; returns the messages that are complete now, or None if the other end is gone."""
        try:
            chunk = self._end.recv(CHUNK)
            return [decode(one) for one in self._channel.feed(chunk)] if chunk else None
        except (OSError, ValueError):
            return None

    def __iter__(self) -> Iterator[Message]:
        """Yields messages until the other end is gone."""
        while (messages := self.receive()) is not None:
            yield from messages

    def hang_up(self) -> None:
        """Ends the connection, from any thread; both receivers notice it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def connect_pair(secret: bytes) -> tuple[Connection, Connection]:
    """Makes a connection within this process."""
    ends = socket.socketpair()
    channels = [Channel(secret, PURPOSE, accepts=accepts, limit_bytes=LIMIT_BYTES) for accepts in (True, False)]
    # The handshake of the two channels, without the sockets.
    while not all(channel.ready for channel in channels):
        for channel, other in (channels, channels[::-1]):
            sent = bytes(channel.out)
            channel.out.clear()
            other.feed(sent)
    one, two = (Connection(end, channel) for end, channel in zip(ends, channels, strict=True))
    return one, two


# The connections of this process, for `_close_copies`.
_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)
