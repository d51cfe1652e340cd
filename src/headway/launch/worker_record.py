"""The launcher's record of a worker, with the description of its end."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import final

from headway.comm.coordinator import WorkerSlot


@final
@dataclass
class WorkerRecord:
    """State of a worker, as the launcher knows it.

    Attributes:
        host: name of its host.
        rank: rank that its environment variables give it; a generation may give it another one.
        is_joining: True if it was started to join a run that had begun.
        is_member: True once it was part of a generation of the run.
        how_left: how it left the run (done, stopped, died, silent); None if it has not.
        exit_status: exit status of its process, negative for a signal; None while it runs.
        reason: reason of its end if it could not be started or its host was lost; empty otherwise.
        kill_note: says that the launcher has killed it, and why; empty otherwise.
        replacement_due_s: time (`monotonic`) at which its replacement starts; None if none is planned, `inf` if it was
            started or given up.
    """

    id: str
    slot: WorkerSlot
    host: str
    rank: int
    is_joining: bool
    is_member: bool = False
    how_left: str | None = None
    exit_status: int | None = None
    reason: str = ""
    kill_note: str = ""
    replacement_due_s: float | None = None

    def __str__(self) -> str:
        return f"worker {self.slot[1]} on host {self.host}"

    @property
    def said_farewell(self) -> bool:
        """True if it has left in order."""
        return self.how_left in ("done", "stopped")

    def note_kill(self) -> None:
        """Notes that the launcher kills it."""
        why = ", as it had left the run and did not end" if self.how_left else ""
        self.kill_note = self.kill_note or f"was killed by the launcher{why}"

    def describe_end(self, has_begun: bool) -> str:
        """Describes the end of a worker that has printed no error itself.

        Args:
            has_begun: True if the run has begun.
        """
        if self.reason:
            return self.reason
        if self.how_left == "silent":
            return f"{self} did not respond{'' if has_begun else ' at the start'} and was ended"
        signal_number = -(self.exit_status or 0)
        if self.kill_note and signal_number == signal.SIGKILL:
            return f"{self} {self.kill_note}"
        is_known = signal_number in set(signal.Signals)
        name = signal.Signals(signal_number).name if is_known else f"signal {signal_number}"
        hint = " (as the kernel does if memory is short)" if signal_number == signal.SIGKILL else ""
        return f"{self} was ended by {name}{hint}"


def format_worker_id(slot: WorkerSlot, attempt: int) -> str:
    """Formats HOST.LOCAL.ATTEMPT: a replacement in the same slot has another id."""
    return f"{slot[0]}.{slot[1]}.{attempt}"


def as_exit_status(status: int | None) -> int:
    """Returns an exit status from 0 on: 1 for a process that a signal has ended."""
    return 1 if (status or 0) < 0 else status or 0
