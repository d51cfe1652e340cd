"""Clients that mean harm: others are served meanwhile, and memory stays bounded."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from tests.export._served import WAIT_S, Reply, Served, encode, serving, write_export

HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n"
MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_export(tmp_path_factory.mktemp("hostile") / "export")
    with serving(folder, "--read-timeout", "1", "--body-mb", "1") as found:
        found.predict(encode())
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes; it may close while we still send."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            data += piece
    return data


def say(served: Served, data: bytes) -> bytes:
    with socket.create_connection(served.address, WAIT_S) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        return read_all(client)


def measure(served: Served) -> int:
    return int(psutil.Process(served.process.pid).memory_info().rss)


def test_slow_senders_are_cut_off_and_others_served(served: Served) -> None:
    starts = [
        b"POST /pre",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n" + bytes(50),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + bytes(20),
    ]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(served.address, WAIT_S)) for _ in starts]
        for client, start in zip(clients, starts, strict=True):
            client.sendall(start)
        assert served.predict(encode()).labels == ["red"]
        for client in clients:
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b"connection: close" in answer
    assert served.predict(encode()).labels == ["red"]
    counts = served.read_metrics()
    assert counts["headway_serve_dropped_connections_total:slow sender"] == len(starts)
    assert counts["headway_serve_body_bytes"] == 0


def test_endless_headers_are_refused(served: Served) -> None:
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(HEAD)
        with contextlib.suppress(ConnectionError):
            for number in range(100_000):
                client.sendall(b"X-%d: %b\r\n" % (number, b"a" * 1000))
        # A part of the answer may be lost, as the server closes while we send.
        answer = read_all(client)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    assert served.read_metrics()["headway_serve_dropped_connections_total:head"] == 1


def test_a_flood_of_requests_on_one_connection_is_cut_off(served: Served) -> None:
    before = measure(served)
    flood = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000
    with socket.create_connection(served.address, WAIT_S) as client, contextlib.suppress(ConnectionError):
        client.sendall(flood)
        read_all(client)
    assert served.read_metrics()["headway_serve_dropped_connections_total:pipeline"] == 1
    assert measure(served) - before < 64 * MIB


def test_some_requests_in_a_row_are_all_answered(served: Served) -> None:
    data = encode("blue")
    one = HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data
    # Also with a client that closes its sending side at once.
    assert say(served, one * 8).count(b'"blue"') == 8
    assert say(served, one).count(b'"blue"') == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /predict HTTP/9.9\r\n\r\n",
        b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(served: Served, data: bytes) -> None:
    answer = say(served, data)
    assert not answer or answer[9:12] in (b"400", b"404"), answer


def test_an_upgrade_is_not_made(served: Served) -> None:
    data = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert say(served, data).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_costs_nothing(served: Served) -> None:
    for start in (b"", HEAD, HEAD + b"Content-Length: 100000\r\n\r\n" + bytes(5000)):
        with socket.create_connection(served.address, WAIT_S) as client:
            client.sendall(start)
    assert served.predict(encode()).labels == ["red"]


@pytest.mark.check
def test_a_thousand_idle_connections_disturb_nobody(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    before = measure(served)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                stack.enter_context(socket.create_connection(served.address, WAIT_S))
            counts = served.read_metrics()
            assert counts["headway_serve_connections"] >= 1000
            assert served.predict(encode()).labels == ["red"]
            assert measure(served) - before < 64 * MIB
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.check
def test_memory_is_bounded_while_many_send_much(served: Served) -> None:
    """Forty clients send a megabyte each, slowly, beside bombs; 64 MiB is more than all of them together."""
    before = measure(served)
    bomb = encode("red", "PNG", size=(5000, 4000))
    answers = list[Reply]()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(served.address, WAIT_S))
            client.sendall(HEAD + b"Content-Length: 1048576\r\n\r\n" + bytes(MIB - 1))
        workers = [threading.Thread(target=lambda: answers.append(served.predict(bomb, "image/png"))) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [answer.status for answer in answers] == [200] * 8
        # A decoded bomb has 60 MB, 80 with its alpha; one is decoded at a time.
        assert measure(served) - before < (64 + 160) * MIB
