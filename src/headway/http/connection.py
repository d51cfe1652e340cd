"""Connections: uvicorn's HTTP/1.1 protocol within limits of time, size and number.

uvicorn reads a request for as long as its client sends one, and keeps headers of any length. Here, every connection is
in one phase, each phase has its longest time, and one timer looks at all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, final

from headway.http.limits import ConnectionLimits
from headway.http.problems import MEDIA_TYPE, ProblemError

MAX_HEAD_BYTES, MAX_HEADERS = 32 << 10, 128
"""Most bytes of a request's line and headers, and most headers: each takes some 200 bytes of memory, however short."""
MAX_PIPELINED = 16
"""Most requests that a client may send before it has the answer to the first."""
MAX_DISCARDED_BYTES = 64 << 20
"""Most bytes of a refused body that are read and dropped, so that the client gets to read why it was refused."""
SEND_S = 15.0
"""Seconds that a client may take to read an answer, which is a few kilobytes."""
SWEEP_S = 0.5

InnerProtocol = Any
"""uvicorn's HttpToolsProtocol: `cycle` is its newest request, `pipeline` those that wait for an answer before them."""


class Phase(Enum):
    """State of a connection."""

    IDLE = auto()
    """No byte of a request has come."""
    HEAD = auto()
    """A request's headers come."""
    BODY = auto()
    """The headers are complete, the body comes."""
    ANSWER = auto()
    """The request is complete, and is computed."""
    SEND = auto()
    """The answer is sent."""


@final
class Connections:
    """All open connections of a server.

    Args:
        dropped: counts connections that are closed early, by reason.
        build_inner: builds uvicorn's protocol; called with the state that a request's scope carries.
    """

    def __init__(
        self, limits: ConnectionLimits, dropped: Counter[str], build_inner: Callable[[dict[str, Any]], InnerProtocol]
    ) -> None:
        self.limits, self.dropped = limits, dropped
        self.build_inner = build_inner
        self._open = set[Connection]()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def build(self) -> Connection:
        """Builds the protocol of one connection."""
        return Connection(self)

    def admit(self, connection: Connection) -> None:
        """Adds a connection; over the limit, the one that has been idle longest is closed."""
        if len(self._open) >= self.limits.connections:
            # A server that all clients keep busy closes the new one instead.
            idle = [one for one in self._open if one.phase in (Phase.IDLE, Phase.HEAD)]
            min(idle, key=lambda one: one.since_s, default=connection).drop("limit")
        self._open.add(connection)

    def forget(self, connection: Connection) -> None:
        """Removes a connection that is closed."""
        self._open.discard(connection)
        self._changed.set()

    def sweep(self) -> None:
        """Closes connections whose phase has taken too long."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.check_time(now)

    def are_idle(self) -> bool:
        """Returns True if no connection has a request that is unanswered."""
        return all(connection.phase is Phase.IDLE for connection in self._open)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Waits until a connection is closed, but not longer than the time-out."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    def drop_all(self, reason: str) -> int:
        """Closes all connections; returns how many had an unanswered request."""
        unanswered = sum(connection.phase is not Phase.IDLE for connection in self._open)
        for connection in list(self._open):
            connection.drop(reason)
        return unanswered


@final
class Connection(asyncio.Protocol):
    """One connection: passes everything on to uvicorn's protocol, and keeps the time and counts the bytes.

    Attributes:
        phase, since_s: see `Phase`, and when it began (`time.monotonic`).
        is_lost: True after the client has left.
    """

    def __init__(self, table: Connections) -> None:
        self._table = table
        self._inner = table.build_inner({"connection": self})
        self._transport: Any = None
        self.phase, self.since_s = Phase.IDLE, time.monotonic()
        self.is_lost = False
        # When the application stopped to ask for bytes of the body.
        self._paused_s: float | None = None
        # Bytes since the last complete head or piece of a body: a head that is still open, trailers, a refused body.
        self._loose_bytes = 0
        self._is_ended, self._is_lingering = False, False

    @property
    def has_waiting(self) -> bool:
        """True if the client has sent further requests, which wait for the answer to this one."""
        return bool(self._inner.pipeline)

    @property
    def has_rest(self) -> bool:
        """True if a part of the body of the request that is answered is still to come."""
        return not self._inner.pipeline and self._inner.cycle.more_body

    @property
    def _is_head_open(self) -> bool:
        """True if a request has begun whose headers are not complete."""
        cycle = self._inner.cycle
        # uvicorn makes a scope with the first byte of a request, and its cycle with the last one of its headers.
        return self._inner.scope is not (None if cycle is None else cycle.scope)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the new connection."""
        self._transport = transport
        self._inner.connection_made(transport)
        self._table.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends with the connection."""
        self.is_lost = True
        self._table.forget(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on, unless they are the rest of a body after which the connection ends."""
        if self._is_lingering:
            self._loose_bytes += len(data)
            self._check_discarded()
            return
        inner = self._inner
        cycle, scope = inner.cycle, inner.scope
        body_bytes = 0 if cycle is None else len(cycle.body)
        # The request has its answer, and its body still comes: uvicorn drops it.
        is_refused = cycle is not None and cycle.response_complete and cycle.more_body and not self._is_head_open
        inner.data_received(data)
        has_begun = inner.scope is not scope
        if has_begun and self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        # Bytes of a body are not counted: uvicorn stops reading beyond 64 KiB that the application has not taken.
        is_body = cycle is not None and len(cycle.body) > body_bytes
        if is_body or inner.cycle is not cycle or (is_refused and has_begun):
            self._loose_bytes = 0
        else:
            self._loose_bytes += len(data)
        if self._is_head_long(len(data)) or (not is_refused and self._loose_bytes > MAX_HEAD_BYTES):
            self.refuse(431, "the headers are too large", "head")
        self._check_discarded()
        if len(inner.pipeline) > MAX_PIPELINED:
            self.drop("pipeline")

    def eof_received(self) -> bool:
        """Closes the connection; with an unanswered request, after the answer: clients may still want to read it."""
        self._is_ended = True
        cycle = self._inner.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def pause_writing(self) -> None:
        """Passes on that the client reads too slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Passes on that the client reads again."""
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """Notes that the application has the headers of a request."""
        # The time that the headers took counts for the body too.
        if self.phase is Phase.HEAD:
            self.phase = Phase.BODY
        else:
            self._enter(Phase.BODY)

    def note_progress(self) -> None:
        """Gives the phase its whole time again: a long body or answer moves, and may take longer than one phase."""
        self.since_s = time.monotonic()

    def pause_clock(self) -> None:
        """Notes that the application asks for no bytes: what it does meanwhile is not the client's time."""
        self._paused_s = time.monotonic()

    def resume_clock(self) -> None:
        """Notes that the application waits for bytes of the body."""
        if self._paused_s is not None:
            self.since_s += time.monotonic() - self._paused_s
            self._paused_s = None

    def take_rest(self) -> bytes:
        """Returns what has come of a body before the connection was cut: uvicorn keeps it to itself then."""
        cycle = self._inner.cycle
        if cycle is None or cycle.response_complete or self._inner.pipeline:
            return b""
        rest, cycle.body = bytes(cycle.body), bytearray()
        return rest

    def begin_answer(self) -> None:
        """Notes that the request is complete."""
        self._enter(Phase.ANSWER)

    def begin_send(self) -> None:
        """Notes that the answer is sent."""
        self._enter(Phase.SEND)

    def linger(self) -> None:
        """Keeps a connection that ends with this answer open while the rest of a refused body comes.

        Closed at once, it would be reset by those bytes, and the client might lose the answer. Call it between head and
        body of the answer.
        """
        cycle = self._inner.cycle
        if self.has_rest and not cycle.keep_alive:
            # uvicorn closes a connection that is not kept alive.
            self._is_lingering = cycle.keep_alive = True

    def end_request(self) -> None:
        """Notes that the answer is sent; what is left of an unread body is dropped as it comes."""
        is_idle = self._inner.cycle.response_complete and not self._is_head_open
        self._enter(Phase.IDLE if is_idle else Phase.HEAD)
        if self._is_ended and is_idle:
            self._transport.close()
        elif self._is_lingering and not self._transport.is_closing():
            self._transport.write_eof()

    def check_time(self, now: float) -> None:
        """Closes the connection if its phase has taken too long."""
        limits, spent_s = self._table.limits, now - self.since_s
        if self.phase is Phase.IDLE:
            if spent_s > limits.idle_s:
                self.drop("idle")
        elif self.phase is Phase.SEND:
            if spent_s > SEND_S:
                self.drop("slow reader")
        elif self.phase is not Phase.ANSWER and self._paused_s is None and spent_s > limits.read_s:
            self.refuse(408, f"the request was not complete within {limits.read_s:g} s", "slow sender")

    def drop(self, reason: str) -> None:
        """Closes the connection at once, without an answer."""
        if not self._transport.is_closing():
            self._table.dropped[reason] += 1
            self._transport.abort()

    def refuse(self, status: int, what: str, reason: str) -> None:
        """Answers without the application, which has not seen the request, or waits for the rest of it; then closes."""
        if self._transport.is_closing():
            return
        self._table.dropped[reason] += 1
        fix = {408: "Send it again, faster.", 431: "Send fewer and shorter ones."}[status]
        more = {"detail": f"{what[0].upper()}{what[1:]}. {fix}"}
        body = ProblemError(status, what, fix, more=more).to_json()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE.decode()}\r\n"
            f"x-content-type-options: nosniff\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        self._transport.close()

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since_s, self._paused_s = phase, time.monotonic(), None

    def _is_head_long(self, read_bytes: int) -> bool:
        """Returns True if the newest request has too many headers, trailers included, or they are too long.

        Args:
            read_bytes: bytes of the last read. Only a long one can hold a whole head that is too long.
        """
        headers = self._inner.headers or ()
        if len(headers) > MAX_HEADERS:
            return True
        if read_bytes <= MAX_HEAD_BYTES or self._inner.scope is None:
            return False
        return len(self._inner.url) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES

    def _check_discarded(self) -> None:
        # The sender has its answer already.
        if self._loose_bytes > MAX_DISCARDED_BYTES:
            self.drop("body")
