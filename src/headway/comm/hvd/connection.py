"""Messages between a rank and the negotiator, over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final

from headway.comm.messages import Lines, Message, encode

CHUNK = 1 << 18

LIMIT_BYTES = 1 << 28
"""The longest message: a response that names some hundred thousand tensors."""


@final
class Connection:
    """One end. Any thread may send; one thread receives.

    A forked child closes its copy: otherwise a data loader's worker would keep the connection of a killed rank alive,
    and nobody would notice its death.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lines, self._lock = end, Lines(LIMIT_BYTES), threading.Lock()
        _OPEN.add(self)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Where the other end is gone nothing happens: whoever receives here is told."""
        with self._lock, contextlib.suppress(OSError):
            self._end.sendall(encode(kind, **fields))

    def receive(self) -> list[Message] | None:
        """Waits for bytes; the messages that are whole now, or None where the other end is gone."""
        try:
            found = self._end.recv(CHUNK)
            return self._lines.feed(found) if found else None
        except (OSError, ValueError):
            return None

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone."""
        while (messages := self.receive()) is not None:
            yield from messages

    def hang_up(self) -> None:
        """Ends the connection; whoever receives here or at the other end is told so. From any thread."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)
