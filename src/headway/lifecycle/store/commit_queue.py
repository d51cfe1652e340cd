"""Queue of changes of one process: changes of a data set that wait at the same time are committed as one group.

A commit takes as long as the disk needs to write everything down, however much that is. So whoever comes first commits
for all who came meanwhile, and eight callers get eight versions in the time of one. There is no thread for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar, final

P = TypeVar("P")
R = TypeVar("R")


@final
@dataclass(eq=False)
class _Ticket(Generic[P, R]):
    """A proposal that waits. Attributes: result: None until it is known."""

    proposal: P
    result: R | Exception | None = None


@final
@dataclass(eq=False)
class _Line(Generic[P, R]):
    """The proposals for one data set. Attributes: turn: held by who commits, list_lock: by who changes the list."""

    turn: Lock = field(default_factory=Lock)
    list_lock: Lock = field(default_factory=Lock)
    waiting: list[_Ticket[P, R]] = field(default_factory=list)


@final
class CommitQueue(Generic[P, R]):
    """Groups the proposals of several threads.

    Args:
        commit: gets the name of a data set and proposals for it, in the order in which they came; it returns the result
            or the error of each of the first ones, and of at least one.
    """

    def __init__(self, commit: Callable[[str, Sequence[P]], Sequence[R | Exception]]) -> None:
        self._commit = commit
        self._lock = Lock()
        self._lines: dict[str, _Line[P, R]] = {}

    def submit(self, name: str, proposal: P) -> R:
        """Waits until a proposal is committed, and returns its result. Raises its error."""
        line = self._find_line(name)
        ticket = _Ticket[P, R](proposal)
        with line.list_lock:
            line.waiting.append(ticket)
        try:
            while ticket.result is None:
                with line.turn:
                    # Somebody may have committed it while this thread waited for its turn.
                    if ticket.result is None:
                        self._serve(name, line)
        finally:
            # After an interrupt nobody waits for the result.
            with line.list_lock:
                if ticket in line.waiting:
                    line.waiting.remove(ticket)
        if isinstance(ticket.result, Exception):
            raise ticket.result
        return ticket.result

    def _find_line(self, name: str) -> _Line[P, R]:
        with self._lock:
            return self._lines.setdefault(name, _Line())

    def _serve(self, name: str, line: _Line[P, R]) -> None:
        """Commits the proposals that wait now."""
        with line.list_lock:
            group = list(line.waiting)
        try:
            results = self._commit(name, [ticket.proposal for ticket in group])
        # What fails as a whole fails for everybody.
        except Exception as error:
            results = [error] * len(group)
        with line.list_lock:
            for ticket, result in zip(group, results, strict=False):
                ticket.result = result
            line.waiting = [ticket for ticket in line.waiting if ticket.result is None]
