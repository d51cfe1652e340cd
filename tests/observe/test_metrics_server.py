"""Clients that mean harm, over real sockets: they get in by no other address and hold nobody up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests._support import free_port
from tests.observe.test_prometheus import get, parsed

from headway.observe.metrics_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from headway.observe.prometheus import DEFAULT_ADDRESS, PrometheusEndpoint

WAIT_S = 60.0
NUMBERS = {"step": 1.0}


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def served(port: int, address: str = DEFAULT_ADDRESS) -> Iterator[None]:
    with PrometheusEndpoint(address, port, lambda: NUMBERS, {}):
        yield


def connected(stack: ExitStack, port: int, host: str = "127.0.0.1") -> socket.socket:
    return stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S))


@contextmanager
def dripping(port: int, clients: int) -> Iterator[None]:
    """Clients that send one more byte of a header again and again, and never its end."""
    over = threading.Event()
    with ExitStack() as stack:
        some = [connected(stack, port) for _ in range(clients)]
        for one in some:
            one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")

        def drip() -> None:
            while not over.wait(0.2):
                for one in list(some):
                    try:
                        one.send(b"a")
                    except OSError:
                        some.remove(one)

        thread = threading.Thread(target=drip)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield


def test_other_hosts_do_not_reach_it_unless_the_recipe_says_so(port: int) -> None:
    with ExitStack() as stack:
        with served(port), pytest.raises(ConnectionRefusedError):
            connected(stack, port, "127.0.0.2")
        with served(port, "0.0.0.0"):
            connected(stack, port, "127.0.0.2")


def test_requests_that_do_not_end_hold_nobody_up(port: int) -> None:
    with served(port), dripping(port, 3):
        assert parsed(get(port)[2]) == {"headway_step": 1}


def test_requests_that_do_not_end_do_not_hold_up_the_end_of_a_run(port: int) -> None:
    ended = threading.Event()
    with ExitStack() as stack:
        own = stack.enter_context(ExitStack())
        own.enter_context(served(port))
        stack.enter_context(dripping(port, 1))
        thread = threading.Thread(target=lambda: (own.close(), ended.set()))
        thread.start()
        assert ended.wait(30.0)
        thread.join()


def test_a_request_that_takes_too_long_is_cut_off(port: int) -> None:
    with ExitStack() as stack:
        stack.enter_context(served(port))
        silent = connected(stack, port)
        assert silent.recv(1) == b""


def test_a_request_without_an_end_is_refused_by_its_size(port: int) -> None:
    with ExitStack() as stack:
        stack.enter_context(served(port))
        endless = connected(stack, port)
        endless.sendall(b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * (MAX_REQUEST_BYTES // 6))
        assert endless.recv(100).startswith(b"HTTP/1.1 431 ")
        assert parsed(get(port)[2]) == {"headway_step": 1}


def test_many_silent_connections_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        stack.enter_context(served(port))
        silent = [connected(stack, port) for _ in range(3 * MAX_CONNECTIONS)]
        assert parsed(get(port)[2]) == {"headway_step": 1}
        # The oldest had to go, long before their time was over.
        for one in silent[: 2 * MAX_CONNECTIONS]:
            one.setblocking(False)
            assert one.recv(1) == b""


def test_who_does_not_read_the_answer_holds_nobody_up(port: int) -> None:
    many = {f"number_{number}": 1.0 for number in range(100_000)}
    with ExitStack() as stack:
        stack.enter_context(PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: many, {}))
        deaf = socket.socket()
        stack.enter_context(deaf)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert get(port, "/nothing")[0] == 404


def test_a_page_that_is_never_made_does_not_hold_up_the_end_of_a_run(port: int) -> None:
    asked, release = threading.Event(), threading.Event()

    def gauges() -> dict[str, float]:
        asked.set()
        release.wait(WAIT_S)
        return NUMBERS

    with ExitStack() as stack:
        begun = time.monotonic()
        with PrometheusEndpoint(DEFAULT_ADDRESS, port, gauges, {}):
            client = connected(stack, port)
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert asked.wait(WAIT_S)
        assert time.monotonic() - begun < WAIT_S / 2
        with pytest.raises(ConnectionRefusedError):
            connected(stack, port)
        release.set()
        for thread in threading.enumerate():
            if thread.name == "headway-page":
                thread.join()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"GET /metrics SPDY/3", 400),
        (b"\xff\xfe", 400),
        (b"", 400),
        (b"GET //metrics HTTP/1.1", 404),
    ],
)
def test_other_requests_are_refused(port: int, request_line: bytes, status: int) -> None:
    with ExitStack() as stack:
        stack.enter_context(served(port))
        client = connected(stack, port)
        client.sendall(request_line + b"\r\n\r\n")
        assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_an_error_in_making_the_page_is_told_and_the_server_goes_on(port: int) -> None:
    found = iter([KeyError("no number"), None])

    def gauges() -> dict[str, float]:
        if (error := next(found)) is not None:
            raise error
        return NUMBERS

    with PrometheusEndpoint(DEFAULT_ADDRESS, port, gauges, {}):
        assert get(port)[0] == 500
        assert get(port)[0] == 200
