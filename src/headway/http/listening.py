"""Listening: an address, its socket, and uvicorn's protocol behind `Connections`."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error
from headway.http.connection import SWEEP_S, Connections
from headway.http.limits import ConnectionLimits

BACKLOG = 2048
DEFAULT_PORT = 8080
# Files that are open beside connections: shared libraries, models, pipes.
SPARE_FILES = 128


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address that a server listens on.

    Attributes:
        host: IP address or name.
        port: TCP port; 0: any free one.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    @staticmethod
    def parse(text: str) -> Address:
        """Parses `HOST:PORT`, `[IPv6]:PORT`, or `HOST`. Raises UsageError if it is none."""
        host, colon, port = text.rpartition(":")
        # A bare IPv6 address has colons, and no port behind its last one.
        if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
            host, port = text, str(DEFAULT_PORT)
        if not colon and text.isdigit():
            raise UsageError(f"{text!r} is a port alone", where="--bind", fix=f"Write for example 127.0.0.1:{text}.")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"{text!r} is no address", where="--bind", fix="Write for example 127.0.0.1:8080.")
        return Address(host=host, port=int(port))

    @property
    def url_host(self) -> str:
        """The host as a URL has it."""
        return f"[{self.host}]" if ":" in self.host else self.host


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches the address. Names other than localhost never count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(address: Address) -> socket.socket:
    """Returns a socket that is bound, and does not listen yet. Raises UsageError if the address cannot be used."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # Without it, a restarted server would have to wait for connections of the one before.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        what = f"{address.url_host}:{address.port} cannot be used ({describe_os_error(error)})"
        raise UsageError(
            what, where="--bind", fix="Choose another address or port, for example --bind 127.0.0.1:8081."
        ) from error
    # A name such as localhost may mean an address that other machines reach.
    if is_loopback(address.host) and not ipaddress.ip_address(place[0]).is_loopback:
        listener.close()
        raise UsageError(f"{address.host} means {place[0]} here", where="--bind", fix="Write 127.0.0.1.")
    return listener


def make_protocol_factory(app: Any, limits: ConnectionLimits) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that builds uvicorn's protocol of one connection."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # A client's malformed requests are no news.
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        # `Connections` closes idle connections earlier.
        timeout_keep_alive=int(limits.idle_s) + 60,
    )
    config.load()
    state = ServerState()
    return lambda app_state: HttpToolsProtocol(config, state, app_state)


def watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns two events: SIGTERM or SIGINT has come; and it has come again, since the user does not want to wait."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def handle_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle_signal)
    return stop, hurry


async def sweep(connections: Connections) -> None:
    """Closes connections that take too long, until it is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        connections.sweep()


async def stop_accepting(
    server: asyncio.Server, listener: socket.socket, build: Callable[[], asyncio.Protocol]
) -> None:
    """Closes a listening socket, and accepts the connections that have come to it: the kernel would reset them.

    Their requests may have been sent already.
    """
    waiting = list[socket.socket]()
    # The last error says that there is none, or that no file can be opened any more.
    with suppress(OSError):
        while True:
            waiting.append(listener.accept()[0])
    server.close()
    for client in waiting:
        # One that has left meanwhile.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(build, client)


async def drain(connections: Connections, limits: ConnectionLimits, hurry: asyncio.Event) -> int:
    """Waits until every request is answered, and clients have had time to send what was on its way.

    Every answer closes its connection now. A client that is about to send a request on an idle connection does not know
    yet, so idle ones stay open for a moment.

    Returns:
        number of requests that were not answered in time.
    """
    started = time.monotonic()
    while len(connections) and not hurry.is_set():
        spent_s = time.monotonic() - started
        if spent_s >= limits.drain_s or (spent_s >= limits.linger_s and connections.are_idle()):
            break
        await connections.wait_for_change(0.05)
    return connections.drop_all("stop")


def raise_file_limit(connections: int) -> int:
    """Raises the limit of open files, and returns how many of so many connections it allows.

    The usual limit of 1,024 is too low for 1,000 idle connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - SPARE_FILES))
