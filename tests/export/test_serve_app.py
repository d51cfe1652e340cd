"""The application behind connections in this process: what is slow, and what takes memory."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.http._host import PIXELS, Host, feed

from headway.export.serve import app as app_module
from headway.export.serve.batching import BRIEF_BYTES
from headway.export.serve.inputs import Payload


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
