"""What the user sees of the workers' output: rank 0's as it is, of the others what they say on stderr."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from time import monotonic
from typing import final

from headway.launch.workers import OUT

SENTENCE = "headway: "
"""How the sentence of an error begins."""

LAST_WORDS = re.compile(rf"^(?:{SENTENCE}|Traceback \()", re.MULTILINE)
"""How a process begins to say why it ends."""

HOLD_S = 10.0
"""Whoever has not ended so long after that will go on."""

CLEAR_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"
"""Rank 0 may have drawn a bar at the bottom of the terminal: what others say takes its place, and it is drawn anew."""


@final
class Output:
    """Lines of several workers, told apart.

    What ends one rank mostly ends all, and is to be read once. So until the run has begun all lines of the other ranks
    are held back; then their last words are, until it is known what their end means for the run.

    Args:
        ranks: that each worker will have.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks, self._begun = dict(ranks), False
        self._held: dict[str, str] = {}
        self._since_s: dict[str, float] = {}
        self._said = ""
        self._lock = threading.Lock()

    def place(self, ranks: Mapping[str, int]) -> None:
        """From now on these are their ranks; a worker that is lost keeps the one it had."""
        with self._lock:
            self._ranks.update(ranks)

    def show(self, worker: str, stream: int, lines: str) -> None:
        """Lines that a worker has written."""
        with self._lock:
            if self._ranks.get(worker) == 0:
                _write(lines, stream)
                if stream != OUT and SENTENCE in lines:
                    self._said = _sentence(lines)
            elif stream != OUT:
                if self._begun and worker not in self._held:
                    last_words = LAST_WORDS.search(lines)
                    until = last_words.start() if last_words else len(lines)
                    self._tell(worker, lines[:until])
                    lines = lines[until:]
                if lines:
                    self._held[worker] = self._held.get(worker, "") + lines
                    self._since_s.setdefault(worker, monotonic())

    def release(self) -> None:
        """The run has begun: shows what was held back."""
        with self._lock:
            self._begun = True
            self._tell_held(*self._held)

    def ended(self, worker: str) -> None:
        """Shows the last words of a worker whose end is not the run's."""
        with self._lock:
            if self._begun:
                self._tell_held(worker)

    def beat(self) -> None:
        """Called all the time: shows what were no last words."""
        with self._lock:
            if self._begun:
                now = monotonic()
                self._tell_held(*(worker for worker in self._held if now - self._since_s[worker] > HOLD_S))

    def failed(self, statuses: Mapping[str, int], status: int) -> None:
        """Shows why a run has failed, what several workers say alike only once.

        Args:
            statuses: of the workers that failed. status: of the run. Where rank 0 failed with it, or was ended after it
                had said the same, it has said so itself, and if the others agree there is nothing to add.
        """
        with self._lock:
            told = any(self._ranks.get(worker) == 0 and statuses[worker] == status for worker in statuses)
            first: dict[str, str] = {}
            for worker in statuses:
                if lines := self._held.get(worker):
                    first.setdefault(_sentence(lines), worker)
            agreed = told and len(first) == 1
            first.pop(self._said, None)
            if not agreed:
                self._tell_held(*first.values())
            self._held.clear()
            self._since_s.clear()

    def close(self) -> None:
        """Leaves the terminal as it was: whoever drew a bar may have been killed."""
        if sys.stderr.isatty():
            print(SHOW_CURSOR, end="", file=sys.stderr, flush=True)

    def _tell_held(self, *workers: str) -> None:
        for worker in workers:
            self._since_s.pop(worker, None)
            self._tell(worker, self._held.pop(worker, ""))

    def _tell(self, worker: str, lines: str) -> None:
        rank = self._ranks.get(worker)
        mark = "[joining]" if rank is None else f"[rank {rank}]"
        _write("".join(f"{mark} {line}" for line in lines.splitlines(keepends=True)), 2)


def clear_line() -> str:
    """What to write before a line on stderr."""
    return CLEAR_LINE if sys.stderr.isatty() else ""


def _sentence(lines: str) -> str:
    """The error at the end of what a worker has said."""
    return lines[max(0, lines.rfind(SENTENCE)) :]


def _write(lines: str, stream: int) -> None:
    if lines:
        clear = clear_line() if stream != OUT else ""
        print(clear + lines, end="", file=sys.stdout if stream == OUT else sys.stderr, flush=True)
