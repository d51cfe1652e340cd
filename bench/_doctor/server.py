"""A web server over a folder. It answers range requests, with BYTES_S bytes per second for all connections together.

python -m bench._doctor.server FOLDER BYTES_S      prints its port; ends with its parent process

Imports the standard library only, so that it starts at once.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import final
from urllib.parse import unquote

PIECE_BYTES = 16 << 10
BURST_S = 0.02
"""What may go at once after a pause, in seconds of the rate."""


@final
class Bucket:
    """Tokens for bytes; threads take them in the order in which they come."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s, self._lock = bytes_s, threading.Lock()
        self._due = -BURST_S

    def due(self, count: int, now: float) -> float:
        """When so many bytes may have gone, asked for at `now`; both in seconds of the same clock."""
        with self._lock:
            self._due = max(self._due, now - BURST_S) + count / self._bytes_s
            return self._due

    def take(self, count: int) -> None:
        """Waits until they may."""
        now = time.monotonic()
        time.sleep(max(0.0, self.due(count, now) - now))


def serve(folder: Path, bytes_s: float) -> None:
    """Serves a folder on a free port of the loopback, for ever."""
    bucket, root = Bucket(bytes_s), folder.resolve()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = (root / unquote(self.path.partition("?")[0].lstrip("/"))).resolve()
            if root not in path.parents or not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            first = int(asked[1]) if asked else 0
            end = min(size, int(asked[2]) + 1) if asked and asked[2] else size
            if first >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(end - first))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}-{size}"')
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                for begin in range(first, end, PIECE_BYTES):
                    piece = file.read(min(PIECE_BYTES, end - begin))
                    bucket.take(len(piece))
                    self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            """Says nothing of requests."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Whoever reads may go away while it is answered."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
