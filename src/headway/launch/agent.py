"""The agent: the program that the launcher starts on another host, through a remote shell, to run workers there.

It reads messages on stdin (start, signal, beat) and writes messages to stdout (hello, output, ended, beat). If stdin
ends or stays silent, the launcher is gone: the agent kills its workers and ends.
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
from headway.launch.workers import LocalWorkers


def main() -> int:
    """Serves the launcher until it is gone. Returns the exit status."""
    lock = threading.Lock()

    def send(kind: str, **fields: Any) -> None:
        # Two threads write. Half a line between two halves of another would be no message.
        # If stdout is gone, stdin is gone or silent too, and ends the loop below.
        with lock, suppress(OSError):
            unsent = memoryview(encode(kind, **fields))
            while unsent:
                unsent = unsent[os.write(1, unsent) :]

    def exit_on_signal(signal_number: int, frame: object) -> None:
        raise SystemExit(1)

    # An exit by a signal also kills the workers, in `finally`.
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, exit_on_signal)
    workers = LocalWorkers(
        lambda worker, stream, lines: send("output", worker=worker, stream=stream, lines=lines),
        lambda worker, status, reason: send("ended", worker=worker, status=status, why=reason),
    )
    try:
        send("hello")
        _serve_launcher(workers, send)
    finally:
        workers.close()
    return 0


def _serve_launcher(workers: LocalWorkers, send: Callable[..., None]) -> None:
    """Follows the launcher's messages until stdin ends, or stays silent for too long."""
    decoder = LineDecoder()
    # The first beat of the launcher says how long to wait for the next one.
    timeout_s: float | None = None
    while select.select([0], [], [], timeout_s)[0] and (data := os.read(0, 1 << 16)):
        for message in decoder.feed(data):
            if message["kind"] == "start":
                _start_worker(workers, message)
            elif message["kind"] == "signal":
                workers.signal(read_text(message, "worker"), read_int(message, "signal"))
            elif message["kind"] == "beat":
                timeout_s = float(message["patience_s"])
                send("beat")


def _start_worker(workers: LocalWorkers, message: Message) -> None:
    # The agent's stdout carries messages, so no worker may write to it directly.
    workers.start(read_text(message, "worker"), message["command"], message["environ"], inherit_output=False)


if __name__ == "__main__":
    sys.exit(main())
