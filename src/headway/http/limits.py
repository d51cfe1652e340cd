"""Limits of connections: the part of a server's settings that this room reads."""

from __future__ import annotations

from typing import Protocol


class ConnectionLimits(Protocol):
    """Limits of time and number, which the settings of each server have."""

    @property
    def read_s(self) -> float:
        """Seconds that a client may take to send a request, or the next part of a long one."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds after which a connection without a request is closed."""
        ...

    @property
    def connections(self) -> int:
        """Most open connections. Beyond, the one that has been idle longest is closed."""
        ...

    @property
    def linger_s(self) -> float:
        """Seconds that a server which stops still waits for requests on connections that are open and idle."""
        ...

    @property
    def drain_s(self) -> float:
        """Seconds after which a server that stops drops what is still unanswered."""
        ...
