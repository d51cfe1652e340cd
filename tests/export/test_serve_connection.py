"""Connections and the application in this process: reads come as the test says, and the clock is an argument."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any, cast

import pytest
import uvloop

from headway.export.serve import app as app_module
from headway.export.serve import connection as connection_module
from headway.export.serve.app import App
from headway.export.serve.batching import BRIEF_BYTES, Batcher
from headway.export.serve.connection import MAX_HEADERS, Connection, Connections, Phase
from headway.export.serve.inputs import Payload
from headway.export.serve.jobs import Answer, Job
from headway.export.serve.metrics import ServeMetrics
from headway.export.serve.server import make_protocol_factory, stop_accepting
from headway.export.serve.settings import ServeSettings

WAIT_S = 60.0
READ = 1 << 16
"""Bytes of one read."""
PIXELS = b"POST /predict HTTP/1.1\r\nContent-Type: application/octet-stream\r\nX-Shape: 1,5,5,4\r\n"
"""The head of a request with 100 bytes."""
REFUSED = b"POST /predict HTTP/1.1\r\nContent-Type: text/html\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """In place of a socket: keeps what is sent."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol, self.sent = protocol, b""
        self.is_closed = self.is_half_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_half_closed
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def write_eof(self) -> None:
        self.is_half_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Queue:
    """In place of a `Batcher`: answers at once."""

    def check_room(self, images: int) -> None: ...

    def submit(self, job: Job) -> None:
        job.settle(Answer([{"path": "image 0"}], ()))

    @property
    def model(self) -> Queue:
        return self

    headers = ()


class Host:
    """The server of this process.

    Attributes:
        inner: uvicorn's protocol of the newest connection.
        swap: ends when the test says so.
    """

    def __init__(self, **settings: Any) -> None:
        self.metrics, self.swap = ServeMetrics(), asyncio.Event()
        found = ServeSettings(**settings)
        self.app = App(cast(Batcher, Queue()), found, self.metrics, swap=self.do_swap)
        build = make_protocol_factory(self.app, found)

        def build_inner(state: dict[str, Any]) -> Any:
            self.inner = build(state)
            return self.inner

        self.connections = Connections(found, self.metrics, build_inner)

    async def do_swap(self) -> dict[str, Any]:
        await self.swap.wait()
        return {"unchanged": False}

    def connect(self) -> tuple[Connection, Transport]:
        connection = self.connections.build()
        transport = Transport(connection)
        connection.connection_made(transport)
        return connection, transport


async def feed(connection: Connection, data: bytes) -> None:
    """Some reads, and whatever they lead to; nothing here waits for anything else than the event loop."""
    for low in range(0, len(data), READ):
        connection.data_received(data[low : low + READ])
        for _ in range(10):
            await asyncio.sleep(0)


async def flood(connection: Connection, transport: Transport, most: int = 1 << 23) -> int:
    """Sends short header lines until the server closes; returns how many bytes."""
    sent = 0
    while sent < most and not transport.is_closed:
        await feed(connection, b"ab:cd\r\n" * (READ // 7))
        sent += READ // 7 * 7
    return sent


def test_a_head_after_a_refused_body_is_as_short_as_any() -> None:
    async def scenario() -> None:
        host = Host()
        connection, transport = host.connect()
        await feed(connection, REFUSED + b"Content-Length: 1\r\n\r\n")
        assert transport.sent.startswith(b"HTTP/1.1 415 ")
        await feed(connection, b"xGET /healthz HTTP/1.1\r\n")
        assert await flood(connection, transport) <= READ
        assert b"HTTP/1.1 431 " in transport.sent

    asyncio.run(scenario())


def test_a_head_that_comes_at_once_is_no_longer_either() -> None:
    async def scenario() -> None:
        host = Host()
        for head in (b"ab:cd\r\n" * (MAX_HEADERS + 1), b"a: %b\r\n" % (b"b" * 40_000)):
            connection, transport = host.connect()
            await feed(connection, b"GET /healthz HTTP/1.1\r\n" + head + b"\r\n")
            assert transport.sent.startswith(b"HTTP/1.1 431 ")
            assert transport.is_closed
        connection, transport = host.connect()
        await feed(connection, b"GET /healthz HTTP/1.1\r\n" + b"ab:cd\r\n" * MAX_HEADERS + b"\r\n")
        assert transport.sent.startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())


@pytest.mark.parametrize("trailer", [b"ab:cd\r\n", b"a"])
def test_endless_trailers_are_refused(trailer: bytes) -> None:
    async def scenario() -> None:
        connection, transport = Host().connect()
        await feed(connection, PIXELS + CHUNKED + b"1\r\nx\r\n0\r\n")
        for _ in range(100):
            if not transport.is_closed:
                await feed(connection, trailer * (1000 // len(trailer)))
        assert transport.sent.startswith(b"HTTP/1.1 431 ")

    asyncio.run(scenario())


def test_trailers_of_a_refused_body_are_not_kept() -> None:
    async def scenario() -> None:
        host = Host()
        connection, transport = host.connect()
        await feed(connection, REFUSED + CHUNKED + b"1\r\nx\r\n")
        assert transport.sent.startswith(b"HTTP/1.1 415 ")
        assert b"connection: close" in transport.sent
        # The client may read its answer, while the rest of the body comes.
        assert transport.is_half_closed
        assert not transport.is_closed
        await feed(connection, b"0\r\n")
        await flood(connection, transport, 1 << 20)
        assert len(host.inner.headers) == 2

    asyncio.run(scenario())


def test_a_refused_body_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_DISCARDED_BYTES", 1 << 18)

    async def scenario() -> None:
        host = Host()
        for length in (b"Content-Length: 100000000\r\n\r\n", CHUNKED + b"ffffff\r\n"):
            connection, transport = host.connect()
            await feed(connection, REFUSED + length)
            await feed(connection, bytes(1 << 18))
            assert not transport.is_closed
            await feed(connection, bytes(1))
            assert transport.is_closed
        assert host.metrics.dropped == {"body": 2}

    asyncio.run(scenario())


def test_a_connection_is_idle_after_a_refused_body() -> None:
    async def scenario() -> None:
        host = Host()
        connection, transport = host.connect()
        await feed(connection, REFUSED + b"Content-Length: 100\r\n\r\n" + bytes(50))
        assert host.connections.are_idle()
        await feed(connection, bytes(50))
        assert host.connections.are_idle()
        # Longer than a request may take to come, and not as long as a connection may be idle.
        connection.check_time(time.monotonic() + 20)
        assert not transport.is_closed
        await feed(connection, PIXELS + b"Content-Length: 100\r\n\r\n" + bytes(100))
        assert transport.sent.count(b"HTTP/1.1 200 ") == 1

    asyncio.run(scenario())


def test_a_client_that_closes_after_its_answer_reads_a_refusal_too() -> None:
    async def scenario() -> None:
        connection, transport = Host().connect()
        await feed(connection, REFUSED + b"Connection: close\r\nContent-Length: 100000\r\n\r\n")
        assert transport.sent.startswith(b"HTTP/1.1 415 ")
        assert transport.is_half_closed
        assert not transport.is_closed
        await feed(connection, bytes(100_000))
        connection.eof_received()
        assert connection.phase is Phase.IDLE

    asyncio.run(scenario())


def test_a_swap_may_take_longer_than_a_request_may_take_to_come() -> None:
    async def scenario() -> None:
        host = Host()
        connection, transport = host.connect()
        await feed(connection, b"POST /swap HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        connection.check_time(time.monotonic() + 1000)
        assert not transport.sent
        host.swap.set()
        await feed(connection, b"\r\n")
        assert transport.sent.startswith(b"HTTP/1.1 200 ")
        assert host.metrics.swaps == {"done": 1}

    asyncio.run(scenario())


def test_a_long_body_is_parsed_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[bool]()
    parse_body = app_module.parse_body

    def parse(*arguments: Any, **options: Any) -> Payload:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_body(*arguments, **options)

    monkeypatch.setattr(app_module, "parse_body", parse)

    async def scenario() -> None:
        for length in (BRIEF_BYTES, BRIEF_BYTES + 1):
            connection, transport = Host().connect()
            head = f"{PIXELS.decode()}Content-Length: {length}\r\n\r\n".replace("1,5,5,4", f"1,1,{length},1")
            await feed(connection, head.encode() + bytes(length))
            # The body is complete: how long it takes to read it is not the client's fault.
            connection.check_time(time.monotonic() + 1000)
            while not transport.sent:
                await asyncio.sleep(0)
            assert transport.sent.startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())
    assert threads == [True, False]


def test_the_slowest_sender_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    head = PIXELS + b"Content-Length: 100\r\n\r\n"

    async def scenario() -> None:
        host = Host(body_bytes=100, held_bytes=250)
        clients = [host.connect() for _ in range(4)]
        for connection, _ in clients[:2]:
            await feed(connection, head + bytes(99))
        # Nobody is slow yet.
        connection, transport = clients[2]
        await feed(connection, head + bytes(99))
        assert transport.sent.startswith(b"HTTP/1.1 503 ")
        assert host.app.held_bytes == 198
        monkeypatch.setattr(app_module, "SLOW_S", 0.0)
        connection, transport = clients[3]
        await feed(connection, head + bytes(100))
        assert transport.sent.startswith(b"HTTP/1.1 200 ")
        assert clients[0][1].sent.startswith(b"HTTP/1.1 408 ")
        assert host.app.held_bytes == 99
        # The second one may go on.
        connection, transport = clients[1]
        await feed(connection, bytes(1))
        assert transport.sent.startswith(b"HTTP/1.1 200 ")
        assert host.app.held_bytes == 0

    asyncio.run(scenario())


def test_what_the_kernel_has_accepted_is_answered_after_the_end() -> None:
    async def scenario() -> None:
        loop, host = asyncio.get_running_loop(), Host()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = await loop.create_server(host.connections.build, sock=listener)
            place = listener.getsockname()
            # The event loop does not run meanwhile.
            clients = [socket.create_connection(place, WAIT_S) for _ in range(3)]
            for client in clients:
                client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            await stop_accepting(server, listener, host.connections.build)
            for client in clients:
                client.setblocking(False)
                assert (await loop.sock_recv(client, 1 << 16)).startswith(b"HTTP/1.1 200 ")
                client.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(place, WAIT_S)
            while len(host.connections):
                await host.connections.wait_for_change(WAIT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
