"""A web server over a folder that answers ranges, and does what networks do; and packs to put there."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
from tests.data._packs import picture

from headway.data.pack import pack


class Asked(NamedTuple):
    """One request: bytes [start, end) of a file."""

    name: str
    start: int
    end: int


Fault = str | int | None
"""What becomes of a request. An int: the connection is cut after so many bytes; "drop": before the answer; "stall":
half of it comes, then nothing; "503", "404"...: that status; "whole": the range is not looked at; "to ADDRESS": a
redirection; None: it is answered."""


class Server:
    """Serves a folder at `uri`. `fault` is asked about every request, with those before it in `asked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[Asked] = []
        self.rights: set[str | None] = set()
        self.connections = 0
        self.fault: Callable[[Asked], Fault] = lambda asked: None
        self.tag: Callable[[Path], str] = lambda path: f'"{path.stat().st_mtime_ns}-{path.stat().st_size}"'
        self.ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            timeout = 20

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that goes away while it is answered is what the tests are about."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="test-server")
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()  # joins the threads of its connections

    def served(self, name: str) -> int:
        """Bytes of files of this ending that were asked for."""
        return sum(asked.end - asked.start for asked in self.asked if asked.name.endswith(name))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = unquote(request.path.lstrip("/").partition("?")[0])
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"]).groups()  # type: ignore[union-attr]
        asked = Asked(name, int(first), int(last) + 1)
        fault = self.fault(asked)
        self.rights.add(request.headers["Authorization"])
        self.asked.append(asked)
        path = self.folder / name
        if fault == "drop":
            request.close_connection = True
            return
        if isinstance(fault, str) and fault.startswith("to "):
            request.send_response(302)
            request.send_header("Location", fault[3:])
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if (isinstance(fault, str) and fault.isdecimal()) or not path.is_file():
            request.send_error(int(fault) if isinstance(fault, str) else 404)
            return
        data = path.read_bytes()
        part = data if fault == "whole" else data[asked.start : asked.end]
        if not part:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(data)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(200 if fault == "whole" else 206)
        request.send_header("Content-Length", str(len(part)))
        request.send_header("ETag", self.tag(path))
        if fault != "whole":
            request.send_header("Content-Range", f"bytes {asked.start}-{asked.start + len(part) - 1}/{len(data)}")
        request.end_headers()
        if fault == "stall":
            request.wfile.write(part[: len(part) // 2])
            request.wfile.flush()
            self.ended.wait(120)
            request.close_connection = True
            return
        request.wfile.write(part[:fault] if isinstance(fault, int) else part)
        if isinstance(fault, int):
            request.close_connection = True


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()


def make_pack(root: Path, count: int = 60, size: tuple[int, int] = (40, 30), **options: object) -> Path:
    """A pack of random images of one size in two classes, in several shards; its folder."""
    for number in range(count):
        path = root / "images" / ("cat", "dog")[number % 2] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, size=size, quality=95))
    options.setdefault("shard_bytes", 40_000)
    pack(root / "images", root / "pack", **options)  # type: ignore[arg-type]
    return root / "pack"


def wait_until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Returns once something has become true, and fails where it does not in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def batches(n: int, size: int) -> list[np.ndarray]:
    return [np.arange(low, min(n, low + size)) for low in range(0, n, size)]
