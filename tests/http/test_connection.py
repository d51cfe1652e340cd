"""Connections in this process: heads, trailers and bodies that have no end, clients that leave, and the last ones."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
import uvloop
from tests.http._host import CHUNKED, PIXELS, READ, REFUSED, Host, feed, flood

from headway.http import connection as connection_module
from headway.http.connection import MAX_HEADERS, Phase
from headway.http.listening import stop_accepting

WAIT_S = 60.0


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
