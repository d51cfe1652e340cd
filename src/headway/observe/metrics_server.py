"""HTTP server for one small page, with limits on the time and size of requests and the number of connections.

It is kept instead of prometheus_client's server, which starts a thread for each connection and limits neither the time
of a request nor the number of connections: clients that connect and say nothing would pile up threads in the run.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

LOG = logging.getLogger("headway.observe")

# Seconds from the connection to the end of the answer; slower clients are cut off, however much they have sent.
MAX_REQUEST_S = 2.0
# Request line and headers together.
MAX_REQUEST_BYTES = 8 << 10
# Open at once. One more replaces the oldest, so that clients that connect and say nothing do not keep others out.
MAX_CONNECTIONS = 16
# Seconds that `stop` waits for a page that is being built.
MAX_STOP_S = 1.0
READ_BYTES = 4 << 10


@final
@dataclass(slots=True)
class _Client:
    """A connection.

    Attributes:
        socket: The connection.
        deadline_s: Time at which it is cut off.
        request: Bytes received so far.
        answer: Bytes that are still to be sent; None until the request is complete.
    """

    socket: socket.socket
    deadline_s: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


@final
class MetricsServer:
    """Answers GET requests for one path, in a thread that it starts.

    Args:
        address: IP address of this host; `0.0.0.0` and `::` are all interfaces.
        port: TCP port.
        path: Path of the page.
        content_type: Content-Type of the page.
        page: Returns the page; called in the server's thread.

    Raises:
        OSError: The port cannot be used.
    """

    def __init__(self, address: str, port: int, path: str, content_type: str, page: Callable[[], str]) -> None:
        self._path = path.encode()
        self._content_type = content_type
        self._page = page
        self._listener = socket.create_server((address, port), family=_choose_family(address), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        # One byte into this pair wakes the thread, so that `stop` does not wait for the selector's timeout.
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._clients: dict[socket.socket, _Client] = {}
        self._selector: Final = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the port and the connections. Waits at most MAX_STOP_S for a page that is being built."""
        # In this order: the thread closes the pair once it has seen the flag.
        self._wake_sender.send(b"x")
        self._stopping.set()
        self._thread.join(MAX_STOP_S)
        # The thread may be in the middle of a page, and closes the rest by itself once that is made.
        self._listener.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            ready_keys = self._selector.select(self._compute_timeout())
            now = time.monotonic()
            for key, events in ready_keys:
                if self._stopping.is_set():
                    break
                if key.fileobj is self._listener:
                    self._accept(now)
                elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._serve(client, events)
            for client in [client for client in self._clients.values() if client.deadline_s <= now]:
                self._drop(client)
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        for socket_ in (self._listener, self._wake_sender, self._wake_receiver):
            socket_.close()

    def _compute_timeout(self) -> float | None:
        """Returns the seconds until the next client is cut off; None without a client."""
        if not self._clients:
            return None
        return max(0.0, min(client.deadline_s for client in self._clients.values()) - time.monotonic())

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        # The client has gone, or the process has no file descriptors left.
        except OSError:
            return
        if len(self._clients) == MAX_CONNECTIONS:
            # The first entry of the dict is the oldest connection.
            self._drop(next(iter(self._clients.values())))
        connection.setblocking(False)
        self._clients[connection] = _Client(connection, now + MAX_REQUEST_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(client)
            if client.answer is not None:
                # A slow client takes the answer in pieces.
                client.answer = client.answer[client.socket.send(client.answer) :]
                if not client.answer:
                    self._drop(client)
        # The socket was not ready after all: the selector will say when it is.
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)

    def _read(self, client: _Client) -> None:
        received = client.socket.recv(READ_BYTES)
        if not received:
            raise ConnectionError("the client has left")
        client.request += received
        # Some clients end their headers without carriage returns.
        is_complete = b"\r\n\r\n" in client.request or b"\n\n" in client.request
        if is_complete or len(client.request) > MAX_REQUEST_BYTES:
            client.answer = memoryview(
                self._answer(bytes(client.request)) if is_complete else _build_text_response(431, "Too large.")
            )
            self._selector.modify(client.socket, selectors.EVENT_WRITE)

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _build_text_response(400, "Not a request of HTTP/1.")
        if words[0] != b"GET":
            return _build_text_response(405, "Only GET is answered.")
        if words[1].partition(b"?")[0] != self._path:
            return _build_text_response(404, f"The numbers are at {self._path.decode()}.")
        try:
            return _build_response(200, self._content_type, self._page())
        # The page belongs to the caller: its errors must stop neither the server nor the run.
        except Exception:
            LOG.debug("the page could not be made", exc_info=True)
            return _build_text_response(500, "The page could not be made.")

    def _drop(self, client: _Client) -> None:
        del self._clients[client.socket]
        self._selector.unregister(client.socket)
        with suppress(OSError):
            client.socket.close()


REASON_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def _build_text_response(status: int, text: str) -> bytes:
    return _build_response(status, "text/plain; charset=utf-8", f"{text}\n")


def _build_response(status: int, content_type: str, text: str) -> bytes:
    body = text.encode()
    allow = "Allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {REASON_PHRASES[status]}\r\nServer: Headway\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{allow}Connection: close\r\n\r\n"
    )
    return head.encode() + body


def _choose_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
