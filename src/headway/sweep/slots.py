"""Slots: the processes of a sweep, each on cores or on a GPU of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, final

from headway.core.cpu_count import list_usable_cpus
from headway.sweep.child import Child
from headway.sweep.cohort import Assignment
from headway.sweep.feed import Ticket
from headway.sweep.worker import encode_assignment

END_S = 60.0
"""Seconds that a worker has to save its trials before it is killed."""


@final
@dataclass(frozen=True)
class Event:
    """An answer of a worker; None: its process has ended."""

    slot: int
    message: dict[str, Any] | None


@final
class Slot:
    """A worker's process, its share of the machine, and the trials that it holds.

    Args:
        number: number of the slot, from 0.
        folder: folder of the sweep.
        cpus: the processors that it may use.
        gpu: the GPU that it uses; None: the processors.
        events: where its answers go.

    Attributes:
        training: the trials that it was told to train, and that have no outcome yet.
        held: the trials that are in its memory.
    """

    def __init__(
        self, number: int, folder: Path, cpus: Sequence[int], gpu: str | None, events: SimpleQueue[Event]
    ) -> None:
        self.number, self.training, self.held = number, dict[int, Assignment](), set[int]()
        self._folder, self._cpus, self._gpu, self._events = folder, cpus, gpu, events
        self._process: Child | None = None
        self.is_idle = True
        # Of the processes before this one, and of this one so far.
        self._core_s, self._newest_core_s = 0.0, 0.0

    def train(self, assignments: Sequence[Assignment], ticket: Ticket | None = None) -> None:
        """Makes the worker train; starts its process if there is none.

        Args:
            ticket: a feed that has the batches.
        """
        self.training = {one.trial: one for one in assignments}
        self.held |= set(self.training)
        self.is_idle = False
        feed = None if ticket is None else ticket.to_json()
        self._send({"train": [encode_assignment(one) for one in assignments], "feed": feed})

    def measure(self, assignment: Assignment) -> None:
        """Makes the worker measure what a trial costs; it answers `costs`."""
        self.is_idle = False
        self._send({"measure": encode_assignment(assignment)})

    def end(self, trials: Sequence[int]) -> bool:
        """Makes the worker end trials that it holds. Returns False if it holds none of them."""
        here = [trial for trial in trials if trial in self.held]
        if not here or self._process is None:
            return False
        self.held -= set(here)
        self._send({"end": here})
        return True

    def _send(self, command: dict[str, Any]) -> None:
        if self._process is None:
            self._process = self._start()
        self._process.send(command)

    def _start(self) -> Child:
        environment = {"OMP_NUM_THREADS": str(len(self._cpus))}
        if self._gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu
        process = Child(
            "headway.sweep.worker",
            [str(self._folder)],
            self._folder / "logs" / f"slot-{self.number}.log",
            environment,
            take=lambda message: self._events.put(Event(self.number, message)),
            end=lambda status: self._events.put(Event(self.number, None)),
        )
        # A process that has just ended has no processors.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, self._cpus)
        return process

    @property
    def core_s(self) -> float:
        """Seconds of cores that the slot's processes have taken, as they last said."""
        return self._core_s + self._newest_core_s

    def note_core_s(self, seconds: float) -> None:
        """Notes what the process says that it has taken so far."""
        self._newest_core_s = seconds

    def take_status(self) -> int:
        """Returns the exit status of the process that has ended, and forgets it."""
        assert self._process is not None
        status, self._process = self._process.close(END_S), None
        self.held.clear()
        self.is_idle = True
        self._core_s, self._newest_core_s = self.core_s, 0.0
        return status

    def close(self) -> None:
        """Ends the process: it saves its trials. Its last answers are dropped."""
        if self._process is not None:
            self._process.close(END_S)


def share_machine(slots: int, gpus: Sequence[str]) -> list[tuple[list[int], str | None]]:
    """Returns the processors and the GPU of each slot; slots beyond the number of processors share them."""
    cpus = list_usable_cpus()
    shares = [cpus[number::slots] or [cpus[number % len(cpus)]] for number in range(slots)]
    return [(share, gpus[number % len(gpus)] if gpus else None) for number, share in enumerate(shares)]
