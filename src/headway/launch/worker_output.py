"""Shows the output of several workers: rank 0's unchanged, and the stderr of the other ranks with their number."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import final

from headway.launch.workers import STDERR, STDOUT

# Prefix of the message of an error.
ERROR_PREFIX = "headway: "

# Beginning of the last words of a process that fails.
LAST_WORDS_PATTERN = re.compile(rf"^(?:{ERROR_PREFIX}|Traceback \()", re.MULTILINE)

# Held lines are shown after this time: a process that is still alive then did not write its last words.
MAX_HOLD_S = 10.0

# Rank 0 may have drawn a progress bar on the last line: other output overwrites it, and rank 0 draws it again.
CLEAR_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"


@final
class WorkerOutput:
    """Prints the lines of several workers, each marked with its rank.

    An error that ends one rank mostly ends all of them, and should be read once. So all lines of the other ranks are
    held back until the run has begun. After that only their last words are, until it is known if the whole run ends.

    Args:
        ranks: rank by worker id.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks, self._has_begun = dict(ranks), False
        self._held: dict[str, str] = {}
        self._held_since_s: dict[str, float] = {}
        self._last_error = ""
        self._lock = threading.Lock()

    def set_ranks(self, ranks: Mapping[str, int]) -> None:
        """Sets the ranks of a new generation. A lost worker keeps its old rank."""
        with self._lock:
            # `update`, since a lost worker may still print its last words.
            self._ranks.update(ranks)

    def show(self, worker: str, stream: int, lines: str) -> None:
        """Prints or holds lines that a worker wrote to `stream`, STDOUT or STDERR."""
        with self._lock:
            if self._ranks.get(worker) == 0:
                write(lines, stream)
                if stream != STDOUT and ERROR_PREFIX in lines:
                    self._last_error = _extract_error(lines)
            # Only rank 0 prints results: stdout of the other ranks is dropped.
            elif stream != STDOUT:
                if self._has_begun and worker not in self._held:
                    last_words = LAST_WORDS_PATTERN.search(lines)
                    end = last_words.start() if last_words else len(lines)
                    self._show_lines(worker, lines[:end])
                    lines = lines[end:]
                if lines:
                    self._held[worker] = self._held.get(worker, "") + lines
                    self._held_since_s.setdefault(worker, monotonic())

    def release(self) -> None:
        """Prints all held lines: the run has begun."""
        with self._lock:
            self._has_begun = True
            self._show_held(*self._held)

    def show_last_words(self, worker: str) -> None:
        """Prints the last words of a worker whose end does not end the run."""
        with self._lock:
            if self._has_begun:
                self._show_held(worker)

    def beat(self) -> None:
        """Prints lines that were held for too long to be last words. Called in every beat."""
        with self._lock:
            if self._has_begun:
                now = monotonic()
                self._show_held(*(worker for worker in self._held if now - self._held_since_s[worker] > MAX_HOLD_S))

    def show_failure(self, status_by_worker: Mapping[str, int], status: int) -> None:
        """Prints why the run failed; a message that several workers share is printed once.

        Args:
            status_by_worker: exit statuses of the workers that failed.
            status: exit status of the run.
        """
        with self._lock:
            worker_by_error: dict[str, str] = {}
            for worker in status_by_worker:
                if lines := self._held.get(worker):
                    worker_by_error.setdefault(_extract_error(lines), worker)
            # Rank 0 prints its own message. If it failed with the same status and all others agree, nothing is added.
            lead_failed = any(
                self._ranks.get(worker) == 0 and code == status for worker, code in status_by_worker.items()
            )
            is_known = lead_failed and len(worker_by_error) == 1
            worker_by_error.pop(self._last_error, None)
            if not is_known:
                self._show_held(*worker_by_error.values())
            # The rest repeats these messages, or comes from workers that were ended with the run.
            self._held.clear()
            self._held_since_s.clear()

    def close(self) -> None:
        """Shows the cursor again: a killed rank 0 may have hidden it for its bar."""
        if sys.stderr.isatty():
            _print(SHOW_CURSOR, STDERR)

    def _show_held(self, *workers: str) -> None:
        """Prints the held lines of some workers."""
        for worker in workers:
            self._held_since_s.pop(worker, None)
            self._show_lines(worker, self._held.pop(worker, ""))

    def _show_lines(self, worker: str, lines: str) -> None:
        """Prints lines of a worker, each with its mark."""
        rank = self._ranks.get(worker)
        mark = "[joining]" if rank is None else f"[rank {rank}]"
        write("".join(f"{mark} {line}" for line in lines.splitlines(keepends=True)), STDERR)


def clear_line() -> str:
    """Returns the characters that clear a progress bar before a line on stderr; empty if stderr is not a terminal."""
    return CLEAR_LINE if sys.stderr.isatty() else ""


def write(lines: str, stream: int) -> None:
    """Writes lines to STDOUT or STDERR, on stderr in place of a progress bar.

    If that fails, as after the reader of a pipe has ended or on a full disk, the stream goes to the null device from
    then on: a run does not end with the reader of its output.
    """
    if lines:
        _print(lines if stream == STDOUT else clear_line() + lines, stream)


def _extract_error(lines: str) -> str:
    """Returns the error message at the end of a worker's lines."""
    return lines[max(0, lines.rfind(ERROR_PREFIX)) :]


def _print(text: str, stream: int) -> None:
    file = sys.stdout if stream == STDOUT else sys.stderr
    try:
        print(text, end="", file=file, flush=True)
    # A stream without a descriptor raises another OSError below, and drops this text alone.
    except OSError:
        with suppress(OSError), open(os.devnull, "wb") as null:
            # What the stream still holds goes there too, and so do workers that inherit the stream later.
            os.dup2(null.fileno(), file.fileno())
