"""What the user sees of the workers' output: rank 0's as it is, of the others what they say on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from typing import final

from headway.train.workers import OUT

SENTENCE = "headway: "
"""How the sentence of an error begins."""


@final
class Output:
    """Lines of several workers, told apart.

    Until the run has begun the lines of other ranks are held back: what fails at the start mostly fails on all of them,
    and is to be read once.

    Args:
        ranks: that each worker will have.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)
        self._held: dict[str, str] | None = {}
        self._lock = threading.Lock()

    def place(self, ranks: Mapping[str, int]) -> None:
        """From now on these are their ranks; a worker that is lost keeps the one it had."""
        with self._lock:
            self._ranks.update(ranks)

    def show(self, worker: str, stream: int, lines: str) -> None:
        """Lines that a worker has written."""
        with self._lock:
            rank = self._ranks.get(worker)
            if rank == 0:
                _write(lines, stream)
            elif stream != OUT and self._held is not None:
                self._held[worker] = self._held.get(worker, "") + lines
            elif stream != OUT:
                self._tell(rank, lines)

    def release(self) -> None:
        """Shows what was held back, and holds nothing back any more."""
        with self._lock:
            held, self._held = self._held or {}, None
            for worker, lines in held.items():
                self._tell(self._ranks.get(worker), lines)

    def failed(self, workers: Iterable[str], *, told: bool) -> None:
        """Shows what workers that failed at the start have said, the same only once.

        Args:
            told: rank 0 failed like them, and has said so itself: where they agree there is nothing to add.
        """
        with self._lock:
            first: dict[str, tuple[str, str]] = {}
            for worker in workers:
                if lines := (self._held or {}).get(worker):
                    first.setdefault(_sentence(lines), (worker, lines))
            if not (told and len(first) == 1):
                for worker, lines in first.values():
                    self._tell(self._ranks.get(worker), lines)
            self._held = {}

    def _tell(self, rank: int | None, lines: str) -> None:
        mark = "[joining]" if rank is None else f"[rank {rank}]"
        _write("".join(f"{mark} {line}" for line in lines.splitlines(keepends=True)), 2)


def _sentence(lines: str) -> str:
    """The error at the end of what a worker has said."""
    return lines[max(0, lines.rfind(SENTENCE)) :]


def _write(lines: str, stream: int) -> None:
    print(lines, end="", file=sys.stdout if stream == OUT else sys.stderr, flush=True)
