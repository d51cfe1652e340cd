"""Connections and an application in this process: reads come as the test says, and the clock is an argument."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from headway.export.serve.app import App
from headway.export.serve.batching import Batcher
from headway.export.serve.jobs import Answer, Job
from headway.export.serve.metrics import ServeMetrics
from headway.export.serve.settings import ServeSettings
from headway.http.connection import Connection, Connections
from headway.http.listening import make_protocol_factory

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

        self.connections = Connections(found, self.metrics.dropped, build_inner)

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
