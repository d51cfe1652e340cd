"""Slots: the processes of a sweep, each on cores or on a GPU of its own, on this machine or on another one."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, final

from headway.core.cpu_count import list_usable_cpus
from headway.core.run_folder import RESUME_COMMAND
from headway.sweep.child import Child
from headway.sweep.cohort import Assignment
from headway.sweep.feed import Ticket
from headway.sweep.sweep_folder import describe_sweep_resume
from headway.sweep.worker import encode_assignment

END_S = 60.0
"""Seconds that a worker has to save its trials before it is killed."""


class Process(Protocol):
    """A worker's process, here or on another machine."""

    def send(self, command: dict[str, Any]) -> None:
        """Sends a command; nothing happens if the process has just ended, of which an event tells."""

    def close(self, patience_s: float) -> int:
        """Ends the process, which saves its trials; kills it if that takes too long. Returns its exit status."""


class JoinedProcess(Process, Protocol):
    """A worker on another machine."""

    host: str


@final
@dataclass(frozen=True)
class Event:
    """An answer of a worker.

    Attributes:
        message: the answer; None: its process has ended.
        joined: a worker on another machine, with its first answer.
    """

    slot: int
    message: dict[str, Any] | None
    joined: JoinedProcess | None = None


@final
class Slot:
    """A worker's process, its share of the machine, and the trials that it holds.

    Args:
        number: number of the slot, from 0.
        folder: folder of the sweep.
        cpus: the processors that it may use.
        gpu: the GPU that it uses; None: the processors.
        events: where its answers go.
        joined: a worker on another machine, for which the slot is made; it ends with this worker.

    Attributes:
        training: the trials that it was told to train, and that have no outcome yet.
        held: the trials that are in its memory.
        host: name of its machine; None: this one.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        cpus: Sequence[int],
        gpu: str | None,
        events: SimpleQueue[Event],
        joined: JoinedProcess | None = None,
    ) -> None:
        self.number, self.training, self.held = number, dict[int, Assignment](), set[int]()
        self._folder, self._cpus, self._gpu, self._events = folder, cpus, gpu, events
        self._process: Process | None = joined
        self.host = None if joined is None else joined.host
        self.is_idle = True
        # Of the processes before this one, and of this one so far.
        self._core_s, self._newest_core_s = 0.0, 0.0

    def train(
        self,
        assignments: Sequence[Assignment],
        ticket: Ticket | None = None,
        choices: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the worker train; starts its process if there is none.

        Args:
            ticket: a feed that has the batches.
            choices: what `list_fuse_choices` returns; None: no trial may be fused.
        """
        self.training = {one.trial: one for one in assignments}
        self.held |= set(self.training)
        self.is_idle = False
        feed = None if ticket is None else ticket.to_json()
        self._send({"train": [encode_assignment(one) for one in assignments], "feed": feed, "fuse": choices})

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
        return start_worker(
            self._folder,
            f"slot-{self.number}",
            self._cpus,
            self._gpu,
            take=lambda message: self._events.put(Event(self.number, message)),
            end=lambda status: self._events.put(Event(self.number, None)),
        )

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


def start_worker(
    folder: Path,
    log: str,
    cpus: Sequence[int],
    gpu: str | None,
    take: Callable[[dict[str, Any]], None],
    end: Callable[[int], None],
    arguments: Sequence[str] = (),
) -> Child:
    """Starts a worker on its share of this machine; see `Child`.

    Args:
        folder: folder of the sweep.
        log: name of its log.
        arguments: more of its command line.
    """
    resume = describe_sweep_resume(folder)
    environment = {"OMP_NUM_THREADS": str(len(cpus)), RESUME_COMMAND: resume}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    path = folder / "logs" / f"{log}.log"
    process = Child("headway.sweep.worker", [str(folder), *arguments], path, environment, take=take, end=end)
    # A process that has just ended has no processors.
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(process.pid, cpus)
    return process


def list_gpus() -> list[str]:
    """Returns the GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    # Without a GPU, torch, which takes a second to load, is not asked.
    if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/dxg"):
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def share_machine(slots: int, gpus: Sequence[str]) -> list[tuple[list[int], str | None]]:
    """Returns the processors and the GPU of each slot; slots beyond the number of processors share them."""
    cpus = list_usable_cpus()
    shares = [cpus[number::slots] or [cpus[number % len(cpus)]] for number in range(slots)]
    return [(share, gpus[number % len(gpus)] if gpus else None) for number, share in enumerate(shares)]
