"""A client that keeps some connections busy, as cheaply as Python can: it must not be what a bench measures.

Runs in any virtual environment, in a process of its own: imports the standard library only. It is told what to do by
lines of JSON on stdin, and answers each with one line on stdout.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONNECT_S = 30.0


def build_request(path: str, content_type: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: bench", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    return ("\r\n".join([*lines, *headers]) + "\r\n\r\n").encode() + body


class Line:
    """One connection: sends a request as soon as it has the answer to the one before."""

    def __init__(self, place: tuple[str, int], timeout_s: float = CONNECT_S) -> None:
        self.socket = socket.create_connection(place, timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_s = 0.0
        self._received = b""

    def send(self, request: bytes) -> None:
        self.sent_s = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> tuple[int, bool] | None:
        """Status, and whether the connection ends with it; None where the answer is not complete yet.

        Raises:
            ConnectionError: the connection has ended before the answer.
        """
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return None
        head = head.lower()
        at = head.index(b"content-length:") + 15
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return None
        self._received = b""
        return int(head[9:12]), b"connection: close" in head


def run(place: tuple[str, int], requests: Sequence[bytes], clients: int, seconds: float, most: float) -> dict[str, Any]:
    """Sends requests on so many connections, for so long, and `most` of them at most.

    Returns:
        `answers` by status, `lost`: requests that were sent and got no answer, `unsent`: connections that were refused
        or closed before a request was sent, `seconds`, and `latencies` of the answers 200 in seconds.
    """
    answers, lost, unsent, sent = Counter[int](), 0, 0, 0
    latencies = list[float]()
    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:

        def open_line() -> None:
            nonlocal unsent, sent, lost
            try:
                line = Line(place)
            except OSError:
                unsent += 1
                return
            try:
                line.send(requests[sent % len(requests)])
            except OSError:
                lost += 1
                line.socket.close()
                return
            sent += 1
            selector.register(line.socket, selectors.EVENT_READ, line)

        def close_line(line: Line) -> None:
            selector.unregister(line.socket)
            line.socket.close()

        for _ in range(clients):
            open_line()
        while selector.get_map():
            for key, _ in selector.select():
                line: Line = key.data
                try:
                    answer = line.receive()
                except OSError:
                    lost += 1
                    close_line(line)
                    continue
                if answer is None:
                    continue
                now = time.perf_counter()
                status, is_closed = answer
                answers[status] += 1
                if status == 200:
                    latencies.append(now - line.sent_s)
                is_over = now - started >= seconds or sent >= most
                if is_closed or is_over:
                    close_line(line)
                    if not is_over:
                        open_line()
                    continue
                try:
                    line.send(requests[sent % len(requests)])
                    sent += 1
                except OSError:
                    # The server has closed the connection after an answer that did not say so.
                    lost += 1
                    close_line(line)
    spent = time.perf_counter() - started
    return {"answers": dict(answers), "lost": lost, "unsent": unsent, "seconds": spent, "latencies": latencies}


def main() -> None:
    """Obeys lines like {"place": [HOST, PORT], "file": REQUESTS, "clients": 8, "seconds": 3}."""
    loaded: dict[str, list[bytes]] = {}
    for text in sys.stdin:
        asked = json.loads(text)
        if asked["file"] not in loaded:
            # Requests are stored as texts, since JSON has no bytes.
            stored = json.loads(Path(asked["file"]).read_text())
            loaded[asked["file"]] = [one.encode("latin-1") for one in stored]
        found = run(
            tuple(asked["place"]),
            loaded[asked["file"]],
            asked["clients"],
            asked.get("seconds", float("inf")),
            asked.get("most", float("inf")),
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
