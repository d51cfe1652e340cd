"""Arms of a comparison: processes that take turns. While one runs, the others are stopped by SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil

from bench._common import median

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = Path(os.environ.get("HEADWAY_PEERS_PYTHON") or ROOT / ".venv-peers/bin/python")


class ArmError(Exception):
    """An arm has no process (any more); the reason."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an arm did in its turn."""

    images_s: float
    images_core_s: float
    """Images for each second of processor time, of all its threads and processes."""


@final
class Arm:
    """One process that answers `go SECONDS` (bench/_peers/serve.py), and what it did so far.

    Raises:
        ArmError: it cannot be started; by `ready` and `turn`, where it ends.
    """

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.name, self.turns, self.facts = name, list[Turn](), dict[str, float | str]()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ArmError(str(error)) from error

    def ready(self) -> None:
        """Waits until it is, and stops it."""
        about = self._answer()
        self.version, self.kernel = str(about["version"]), str(about["kernel"])
        self._stop()

    def turn(self, seconds: float) -> None:
        """Lets it run for so long."""
        before = self._core_seconds()
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"go {seconds}\n")
        self._process.stdin.flush()
        done = self._answer()
        self._stop()
        used = max(0.01, self._core_seconds() - before)  # the system counts in hundredths
        self.facts = done["facts"]
        self.turns.append(Turn(done["images"] / done["seconds"], (done["images"] + done["drained"]) / used))

    def close(self) -> None:
        """Ends its processes."""
        for which in (signal.SIGCONT, signal.SIGKILL):  # a stopped group would not hear of its end
            try:
                os.killpg(self._process.pid, which)
            except ProcessLookupError:
                break
        self._process.wait()
        close_pipes(self._process)
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise ArmError(said[-1] if said else f"it ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _core_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)


@final
class Comparison:
    """Arms that take turns: every round each of them runs once. A context: its end ends the processes.

    Args:
        folder: where their temporary files go; they are killed, and so leave some.
        only: names of arms; no other is started. None: all are.
    """

    def __init__(self, folder: Path, only: Collection[str] | None = None) -> None:
        self.arms: dict[str, Arm] = {}
        self.names = set[str]()
        """Of all arms, wanted or not."""
        self._folder, self._only = folder, only
        self._stack = ExitStack()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Starts an arm, if it is wanted."""
        self.names.add(name)
        if self._only is not None and name not in self._only:
            return
        try:
            arm = Arm(name, command, {"TMPDIR": str(self._folder), **(env or {})})
        except ArmError as reason:
            self.leave_out(name, str(reason))
            return
        self._stack.callback(arm.close)
        self.arms[name] = arm

    def leave_out(self, name: str, reason: str) -> None:
        """Says that an arm is not here."""
        self.arms.pop(name, None)
        print(f"{name}: not here ({reason})")

    def run(self, rounds: int, seconds: float) -> None:
        """Waits until all are ready, then lets them take turns; each round begins with another arm."""
        for name, arm in list(self.arms.items()):
            try:
                arm.ready()
            except ArmError as reason:
                self.leave_out(name, str(reason))
        arms = list(self.arms.values())
        for number in range(rounds):
            first = number % len(arms) if arms else 0
            for arm in arms[first:] + arms[:first]:
                arm.turn(seconds)

    def ratio(self, mine: str, other: str) -> tuple[float, float, float] | None:
        """(median, low, high) of images/s over those of another arm in the same round; None where one is missing."""
        if mine not in self.arms or other not in self.arms:
            return None
        pairs = zip(self.arms[mine].turns, self.arms[other].turns, strict=True)
        return median([a.images_s / b.images_s for a, b in pairs])

    def fastest(self, names: Sequence[str]) -> str | None:
        """Which of these has the highest median; None where all are missing."""
        here = [name for name in names if name in self.arms]
        return max(here, key=lambda name: median([turn.images_s for turn in self.arms[name].turns])[0], default=None)

    def rows(self) -> list[tuple[str, ...]]:
        """The table: one row an arm."""
        rows: list[tuple[str, ...]] = [("arm", "images/s (95 %)", "a core second", "kernel", "version")]
        for name, arm in self.arms.items():
            middle, low, high = median([turn.images_s for turn in arm.turns])
            core = median([turn.images_core_s for turn in arm.turns])[0]
            rows.append((name, f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]", f"{core:,.0f}", arm.kernel, arm.version))
        return rows

    def facts(self) -> list[tuple[str, str, str]]:
        """(arm, fact, value): what else they say of themselves."""
        return [
            (name, fact, f"{value:.4g}" if isinstance(value, float) else value)
            for name, arm in self.arms.items()
            for fact, value in arm.facts.items()
        ]


def peer(module: str, asked: Mapping[str, object]) -> list[str | Path]:
    """The command of a contestant in .venv-peers."""
    return [PEERS_PYTHON, "-m", f"bench._peers.{module}", json.dumps(asked)]


def ours(module: str, asked: Mapping[str, object]) -> list[str | Path]:
    """The command of one that runs where this bench runs."""
    return [sys.executable, "-m", f"bench._peers.{module}", json.dumps(asked)]


def run_module(name: str, asked: Mapping[str, object]) -> list[str | Path]:
    """The command of an arm that is a module of this bench's own."""
    return [sys.executable, "-m", name, json.dumps(asked)]


def close_pipes(process: subprocess.Popen[Any]) -> None:
    """Those of a process that has ended, and may have left what was written to it unread."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
