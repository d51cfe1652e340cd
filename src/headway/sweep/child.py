"""A process of a sweep that is told what to do, and answers, by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from headway.core.messages import show_messages


@final
class Child:
    """A module of ours that runs as a process of its own, in a group of its own: Ctrl-C is for the parent alone.

    Args:
        module: the module, which calls `take_output` first.
        arguments: its command line.
        log: file to which its messages are appended.
        environment: variables besides those of this process.
        take: called with each answer, in a thread.
        end: called with the exit status after the last answer, in the same thread.
        descriptors: descriptors that it inherits.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        take: Callable[[dict[str, Any]], None],
        end: Callable[[int], None],
        descriptors: Sequence[int] = (),
    ) -> None:
        self._take, self._end = take, end
        with open(log, "ab") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env={**os.environ, **environment},
                pass_fds=descriptors,
                process_group=0,
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"headway-{log.stem}")
        self._reader.start()

    def _read(self) -> None:
        """Passes on the answers until the process ends."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                # A killed process may leave half a line.
                if line.endswith(b"\n"):
                    self._take(json.loads(line))
        self._end(self._process.wait())

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def send(self, command: Mapping[str, Any]) -> None:
        """Sends a command; nothing happens if the process has just ended, of which `end` tells."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def close(self, patience_s: float) -> int:
        """Ends the input, which ends the process; kills it if that takes too long. Returns its exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._reader.join()
        return status


def take_output() -> int:
    """Returns a descriptor for answers; whatever this process prints from now on goes to its log.

    Standard output is the protocol's alone, and a user's own code may print.
    """
    out = os.dup(1)
    os.dup2(2, 1)
    show_messages()
    return out


def answer(out: int, message: Mapping[str, Any]) -> bool:
    """Writes an answer; returns False if the parent is gone, which the end of the input says too."""
    try:
        os.write(out, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        return False
    return True
