"""The agent: what the launcher starts on another host, through a remote shell, to have workers there.

It takes messages on stdin (start, signal, beat) and gives messages on stdout (hello, output, ended, beat). Where stdin
ends, or nothing comes for long, the launcher is gone: it kills its workers and ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.comm.messages import LineDecoder, Message, encode, read_int, read_text
from headway.launch.workers import Workers


def main() -> int:
    """Serves a launcher until it is gone."""
    lock = threading.Lock()

    def tell(kind: str, **fields: Any) -> None:
        # Where stdout is gone, stdin is too, or silent.
        with lock, suppress(BrokenPipeError):
            rest = memoryview(encode(kind, **fields))
            while rest:
                rest = rest[os.write(1, rest) :]

    def leave(number: int, frame: object) -> None:
        raise SystemExit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    workers = Workers(
        lambda worker, stream, lines: tell("output", worker=worker, stream=stream, lines=lines),
        lambda worker, status, why: tell("ended", worker=worker, status=status, why=why),
    )
    try:
        tell("hello")
        _serve(workers, tell)
    finally:
        workers.close()
    return 0


def _serve(workers: Workers, tell: Callable[..., None]) -> None:
    lines, patience_s = LineDecoder(), None
    while select.select([0], [], [], patience_s)[0] and (data := os.read(0, 1 << 16)):
        for message in lines.feed(data):
            if message["kind"] == "start":
                _start(workers, message)
            elif message["kind"] == "signal":
                workers.signal(read_text(message, "worker"), read_int(message, "signal"))
            elif message["kind"] == "beat":
                patience_s = float(message["patience_s"])
                tell("beat")


def _start(workers: Workers, message: Message) -> None:
    workers.start(read_text(message, "worker"), message["command"], message["environ"], inherit=False)


if __name__ == "__main__":
    sys.exit(main())
