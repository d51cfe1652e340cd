"""Faults from outside: draws moments, victims and kinds, and watches the run continue. The run does not know of
them."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil

KINDS = {"kill": 0.3, "stop": 0.2, "wake": 0.2, "two": 0.15, "save": 0.15}
"""SIGKILL; SIGSTOP; SIGSTOP and SIGCONT after the others have gone on without it; SIGKILL to two at once, where that
leaves enough; SIGKILL while a checkpoint is written. And how often."""

LEAD = 0.25
"""How often the victim is rank 0."""

LEFT = 2
"""Processes that a fault leaves at least: those before it are replaced in seconds, and it waits for that."""

POLL_S = 0.005
GIVES_UP_S = 120.0


class SoakError(Exception):
    """The run did not go on, or ended before its time."""


@dataclass(frozen=True)
class Fault:
    """What was done to the run, and how it went on.

    Attributes:
        kind: see KINDS. victims: numbers of the processes. lead: whether one was rank 0. step: steps done when it came.
        recovery_s: from its detection to the next step that surely was made without the victim.
    """

    kind: str
    victims: tuple[int, ...]
    lead: bool
    step: int
    recovery_s: float


@final
class Faults:
    """Does harm to a run.

    Args:
        launcher: its process. folder: the run folder. timeout_s: of the run's `comm.timeout_s`.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], folder: Path, timeout_s: float, seed: int) -> None:
        self._launcher, self._folder, self._timeout_s = launcher, folder, timeout_s
        self._chance = random.Random(seed)
        self.done: list[Fault] = []

    def harm(self, faults: int, steps: int) -> None:
        """So many faults, spread over the steps of the run; fewer where the run is at its end before.

        Raises:
            SoakError: it failed, or stood still.
        """
        try:
            while len(self.done) < faults:
                left = faults - len(self.done)
                here = self._step()
                due = here + self._chance.uniform(0, 2 * (steps - here) / (left + 1))
                self._wait(lambda due=due: self._step() >= due, f"step {due:.0f}")
                members = self._members()
                if len(members) > LEFT:
                    time.sleep(self._chance.uniform(0, 0.1))  # anywhere in a step
                    self.done.append(self._strike(members))
        except SoakError:
            if self._launcher.poll() != 0:
                raise

    def _strike(self, members: list[psutil.Process]) -> Fault:
        (kind,) = self._chance.choices(list(KINDS), list(KINDS.values()))
        leads = [member for member in members if self._leads(member)]
        others = [member for member in members if member not in leads]
        victim = self._chance.choice(leads if leads and self._chance.random() < LEAD else others)
        victims = [victim]
        if kind == "two" and len(members) > LEFT + 1:
            victims.append(self._chance.choice([member for member in members if member != victim]))
        elif kind == "save":
            self._wait(self._is_saving, "a checkpoint")
        before, struck, stops = self._step(), time.monotonic(), kind in ("stop", "wake")
        for one in victims:
            with suppress(psutil.NoSuchProcess):  # a busy machine may have made it one that was silent
                one.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
        wakes = struck + self._timeout_s + self._chance.uniform(0.05, 0.45) if kind == "wake" else math.inf

        def went_on() -> bool:
            nonlocal wakes
            if time.monotonic() >= wakes:
                wakes = math.inf
                with suppress(psutil.NoSuchProcess):  # it was replaced, and killed, already
                    victim.send_signal(signal.SIGCONT)
            # One step may still come about: its last message was on the way.
            return self._step() >= before + 2

        self._wait(went_on, f"step {before + 2} after {kind} of {victim.pid}")
        ended = time.monotonic()
        self._wait(lambda: went_on() and wakes == math.inf, "the waking")
        # Silence is noticed after the time-out, which began with the last sign of life, at most 1/8 of it before.
        detected = struck + self._timeout_s * 7 / 8 if stops else struck
        numbers, lead = tuple(one.pid for one in victims), any(one in leads for one in victims)
        return Fault(kind, numbers, lead, before, ended - detected)

    def _members(self) -> list[psutil.Process]:
        """The workers that take part in steps: those that note samples."""
        workers = {worker: self._ids(worker) for worker in self._workers()}
        before = {worker: _size(path) for worker, path in workers.items()}
        step = self._step()
        self._wait(lambda: self._step() >= step + 2, f"step {step + 2}")
        return [worker for worker, path in workers.items() if _size(path) > before[worker]]

    def _workers(self) -> list[psutil.Process]:
        return psutil.Process(self._launcher.pid).children()

    def _ids(self, worker: psutil.Process) -> Path:
        try:
            name = worker.environ().get("HEADWAY_MEMBER", "")
        except psutil.Error:
            name = ""
        return self._folder / f"ids-{name}.bin"

    def _leads(self, worker: psutil.Process) -> bool:
        """Rank 0 has the metrics open."""
        metrics = str((self._folder / "metrics.jsonl").resolve())
        try:
            return any(file.path == metrics for file in worker.open_files())
        except psutil.Error:
            return False

    def _is_saving(self) -> bool:
        """What is written of a checkpoint has a hidden name."""
        return any((self._folder / "checkpoints").glob(".step-*"))

    def _step(self) -> int:
        return steps_of(self._folder)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + GIVES_UP_S
        while not condition():
            if self._launcher.poll() is not None:
                raise SoakError(f"the run has ended with status {self._launcher.returncode} before {what}")
            if time.monotonic() > until:
                raise SoakError(f"{what} did not come within {GIVES_UP_S:.0f} s")
            time.sleep(POLL_S)


def steps_of(folder: Path) -> int:
    """Steps that a run has done, by the last whole line of its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
