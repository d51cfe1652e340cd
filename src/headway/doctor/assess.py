"""Assess: a training script of any kind gets so much time to reach accuracies, and passes or fails."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, final

import psutil

from headway.core.errors import UsageError
from headway.core.signals import answered
from headway.doctor.accuracy_parser import AccuracyKind, AccuracyParser, AccuracyReading
from headway.doctor.output_lines import OutputLines

Echo = Callable[[str, bool], object]
"""Told every piece of the script's output as it comes; True: it went to standard error."""

GRACE_S = 10.0
"""Between asking a script to end and ending it."""
DRAIN_S = 1.0
"""What children of a script that has ended may still say."""
ACCURACY_NAMES: dict[AccuracyKind, str] = {"train": "training accuracy", "val": "validation accuracy"}
MAY_BE_PERCENT = (
    "headway assess: the targets are reached if these numbers are shares; as they might be percent, the script goes on."
    " --scale fraction says that they are, and stops it.\n"
)


@final
@dataclass(frozen=True, kw_only=True)
class AccuracyGoal:
    """What has to be reached: fractions of 1, or None; and the seconds for it, from the start of the process."""

    train: float | None
    val: float | None
    seconds: float

    @staticmethod
    def from_options(train: float | None, val: float | None, minutes: float) -> AccuracyGoal:
        """Targets as a user writes them: 0.9, or 90 for 90 %.

        Raises:
            UsageError: neither target, one that no accuracy can have, or no time.
        """
        if train is None and val is None:
            raise UsageError("there is no target", fix="Give --target-train, --target-val, or both.")
        if not 0 < minutes < float("inf"):
            raise UsageError(f"{minutes:g} minutes are no time", where="--minutes", fix="Give a number above 0.")
        shares = []
        for name, target in (("train", train), ("val", val)):
            if target is not None and not 0 < target <= 100:
                fix = "Give a share such as 0.9, or percent such as 90."
                raise UsageError(f"{target:g} is no accuracy", where=f"--target-{name}", fix=fix)
            shares.append(target if target is None or target <= 1 else target / 100)
        return AccuracyGoal(train=shares[0], val=shares[1], seconds=60 * minutes)

    def targets(self) -> dict[AccuracyKind, float]:
        both: tuple[tuple[AccuracyKind, float | None], ...] = (("train", self.train), ("val", self.val))
        return {kind: target for kind, target in both if target is not None}


@final
@dataclass(frozen=True, kw_only=True)
class Assessment:
    """How it went.

    Attributes:
        passed: at one moment within the time, the newest accuracy of each kind was at its target or above, and the
            script did not fail.
        why: a sentence.
        seconds: that the script ran. reached_s: until all targets were reached at once; None: never.
        first_s: until each target was reached, whatever the other was then.
        ended: `itself`, `time` (it was stopped), or `reached` (stopped, as was asked for).
        status: exit status of the script; negative: the signal that ended it.
        unclear: a line with an accuracy of which it is not said what it is of.
        kept_on: it was to be stopped once it had passed, and was not, as the scale of its numbers was not known.
    """

    passed: bool
    why: str
    goal: AccuracyGoal
    seconds: float
    reached_s: float | None
    first_s: dict[AccuracyKind, float | None]
    best: dict[AccuracyKind, float | None]
    last: dict[AccuracyKind, float | None]
    readings: dict[AccuracyKind, int]
    ended: str
    status: int
    unclear: str | None
    kept_on: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@final
@dataclass
class AccuracyHistory:
    """What was read, line by line, with the seconds at which each line came."""

    lines: list[tuple[float, list[AccuracyReading]]] = field(default_factory=list)

    def check_goal(
        self, goal: AccuracyGoal, value: Callable[[AccuracyReading], float]
    ) -> tuple[float | None, dict[AccuracyKind, float | None], dict[AccuracyKind, list[float]]]:
        """(seconds until all targets were reached at once, until each was, all values).

        Args:
            value: of a reading as a fraction of 1: `Scores.value` or `Scores.to_least_fraction`.
        """
        targets, newest = goal.targets(), dict[AccuracyKind, float]()
        reached: float | None = None
        first: dict[AccuracyKind, float | None] = dict.fromkeys(targets)
        values: dict[AccuracyKind, list[float]] = {"train": [], "val": []}
        for seconds, readings in self.lines:
            for reading in readings:
                newest[reading.kind] = value(reading)
                values[reading.kind].append(newest[reading.kind])
            for kind, target in targets.items():
                if first[kind] is None and newest.get(kind, -1.0) >= target:
                    first[kind] = seconds
            if reached is None and all(newest.get(kind, -1.0) >= target for kind, target in targets.items()):
                reached = seconds
        return reached, first, values


def build_command(script: str, arguments: Sequence[str] = ()) -> list[str]:
    """What runs a script: a Python file by this Python, anything else as it is.

    Raises:
        UsageError: there is no such file or program, or it cannot be run.
    """
    path = Path(script).expanduser()
    if path.is_dir():
        raise UsageError("this is a folder, no script", where=script, fix="Name the file to run.")
    if path.is_file():
        if path.suffix == ".py":
            return [sys.executable, str(path), *arguments]
        if os.access(path, os.X_OK):
            return [str(path.absolute()), *arguments]
        fix = f"Make it executable: chmod +x {script}. Or name the program that runs it: bash -- {script}."
        raise UsageError("this file is neither a Python file nor executable", where=script, fix=fix)
    if (found := shutil.which(script)) is not None:
        return [found, *arguments]
    what = "there is no such script, and no program of this name on the PATH"
    raise UsageError(what, where=script, fix="headway assess train.py --target-val 0.9 --minutes 10 -- ARGUMENTS.")


def assess(
    command: Sequence[str],
    goal: AccuracyGoal,
    scores: AccuracyParser,
    *,
    echo: Echo = lambda text, error: None,
    stop_when_reached: bool = False,
    grace_s: float = GRACE_S,
) -> Assessment:
    """Runs a training script, reads the accuracies that it prints, and stops it when its time is up.

    The script runs in a session of its own, without input. To stop it, all of its processes get SIGTERM, and those that
    are still there after `grace_s` SIGKILL. Nothing in its session outlives this call, also where it ends by itself.

    It passes where at one moment within the time the newest training accuracy and the newest validation accuracy were
    both at their targets or above, and where it did not end with an error of its own. What it prints later does not
    count, nor does a progress bar that is not full.

    Args:
        stop_when_reached: stop it once it has passed whatever the scale of its numbers turns out to be: not by `0.95`
            under the scale `auto`, which is a share or less than one percent until a number is above 1. Then `echo` is
            told so at that moment, once.

    Raises:
        UsageError: the command cannot be started.
    """
    history, streams = AccuracyHistory(), {False: OutputLines(), True: OutputLines()}
    began = time.monotonic()
    process = _start_process(command)

    def record_lines(lines: Sequence[tuple[float, str]]) -> None:
        for seconds, line in lines:
            if readings := scores.read(line):
                history.lines.append((seconds, readings))

    ended, told = "itself", False
    with _stop_all_processes(process, grace_s) as stop, _OutputPipes(process) as pipes:
        while process.poll() is None:
            left = goal.seconds - (time.monotonic() - began)
            if left <= 0:
                ended = "time"
                break
            known = len(history.lines)
            for error, data in pipes.read(min(left, 0.1)):
                now = time.monotonic() - began
                text, lines = streams[error].feed(data, now)
                echo(text, error)
                if now < goal.seconds:
                    record_lines(lines)
            if stop_when_reached and len(history.lines) > known:
                if history.check_goal(goal, scores.to_least_fraction)[0] is not None:
                    ended = "reached"
                    break
                if not told and history.check_goal(goal, scores.to_fraction)[0] is not None:
                    told = True
                    echo(MAY_BE_PERCENT, True)
        seconds = time.monotonic() - began
        until = time.monotonic() + DRAIN_S
        if ended != "itself":
            stop()
            until += grace_s - DRAIN_S
        while time.monotonic() < until and not pipes.is_closed():
            if process.poll() is not None:
                until = min(until, time.monotonic() + DRAIN_S)
            for error, data in pipes.read(0.05):
                text, lines = streams[error].feed(data, time.monotonic() - began)
                echo(text, error)
                if ended == "itself" and seconds < goal.seconds:
                    record_lines([(min(at, seconds), line) for at, line in lines])
        for stream in streams.values():
            if ended == "itself" or not stream.is_unfinished():
                record_lines([(at, line) for at, line in stream.end(seconds) if at <= goal.seconds])
    return _conclude(goal, scores, history, ended, seconds, process.returncode, stop_when_reached)


def _start_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # lines as they are printed, not 8 kB later
    try:
        return subprocess.Popen(
            command, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True, env=environment, bufsize=0
        )
    except OSError as error:
        fix = "Does its first line name the program that runs it?"
        raise UsageError(f"this cannot be run ({error.strerror})", where=command[0], fix=fix) from None


@final
class _OutputPipes:
    """Both outputs of a process, read as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._selector, self._process = selectors.DefaultSelector(), process
        for error, stream in ((False, process.stdout), (True, process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, error)

    def __enter__(self) -> _OutputPipes:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def is_closed(self) -> bool:
        return not self._selector.get_map()

    def read(self, seconds: float) -> Iterator[tuple[bool, bytes]]:
        """(whether it is standard error, bytes) of what has come, or comes within so many seconds."""
        if self.is_closed():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if data:
                yield key.data, data
            else:
                self._selector.unregister(key.fileobj)


@contextmanager
def _stop_all_processes(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[Callable[[], None]]:
    """Gives what asks all processes of a script to end. At the end of the block none of them is left. SIGTERM to this
    process ends the block as Ctrl-C does."""
    known: dict[int, psutil.Process] = {}

    def send(number: signal.Signals) -> None:
        with suppress(psutil.Error):  # its children, also those in sessions of their own
            parent = psutil.Process(process.pid)
            known.update({child.pid: child for child in parent.children(recursive=True)})
        for one in psutil.process_iter():  # its session, also where it has ended before its children
            with suppress(psutil.Error, OSError):
                if os.getsid(one.pid) == process.pid:
                    known[one.pid] = one
        for one in known.values():
            with suppress(psutil.Error):
                one.send_signal(number)

    with answered(_raise_interrupt, signal.SIGTERM):
        try:
            yield lambda: send(signal.SIGTERM)
        except BaseException:
            send(signal.SIGTERM)
            raise
        finally:
            until = time.monotonic() + grace_s
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            send(signal.SIGKILL)
            process.wait()
            known.pop(process.pid, None)
            psutil.wait_procs(known.values(), timeout=DRAIN_S)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _conclude(
    goal: AccuracyGoal,
    scores: AccuracyParser,
    history: AccuracyHistory,
    ended: str,
    seconds: float,
    status: int,
    to_stop: bool,
) -> Assessment:
    reached, first, values = history.check_goal(goal, scores.to_fraction)
    failed = ended == "itself" and status != 0
    passed = reached is not None and not failed
    kinds: tuple[AccuracyKind, ...] = ("train", "val")
    targets = goal.targets()
    if passed:
        why = f"the targets were reached after {reached:.1f} s of {goal.seconds:.0f} s"
    elif failed:
        way = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        why = f"the script ended {way} after {seconds:.1f} s"
    elif silent := [ACCURACY_NAMES[kind] for kind in targets if not values[kind]]:
        why = f"the script showed no {' and no '.join(silent)}"
    else:
        below = [ACCURACY_NAMES[kind] for kind in targets if first[kind] is None]
        what = f"the {' and the '.join(below)} did not get there" if below else "the targets were not reached at once"
        why = what if ended == "time" else f"{what} in {seconds:.1f} s, when the script ended"
    if ended == "time":
        why += f"; its time was up, and the script was stopped after {seconds:.1f} s"
    return Assessment(
        passed=passed,
        why=why,
        goal=goal,
        seconds=seconds,
        reached_s=reached,
        first_s=first,
        best={kind: max(values[kind], default=None) for kind in kinds},
        last={kind: values[kind][-1] if values[kind] else None for kind in kinds},
        readings={kind: len(values[kind]) for kind in kinds},
        ended=ended,
        status=status,
        unclear=scores.unclear,
        kept_on=to_stop and passed and history.check_goal(goal, scores.to_least_fraction)[0] is None,
    )


def format_assessment(found: Assessment) -> str:
    """The verdict, and a line for each target."""
    lines = [f"{'PASS' if found.passed else 'FAIL'}: {found.why}."]
    for kind, target in found.goal.targets().items():
        best, last, first = found.best[kind], found.last[kind], found.first_s[kind]
        if best is None or last is None:
            lines.append(f"  {ACCURACY_NAMES[kind]}: target {target:.4g}, none seen")
            continue
        when = "not reached" if first is None else f"reached after {first:.1f} s"
        lines.append(f"  {ACCURACY_NAMES[kind]}: target {target:.4g}, {when}; best {best:.4g}, last {last:.4g}")
    if found.kept_on:
        lines.append("  It was not stopped: its numbers might have been percent. If they are shares: --scale fraction")
    if found.unclear is None and (silent := [kind for kind in found.goal.targets() if not found.readings[kind]]):
        cures = " and ".join(f"--{kind}-pattern '{kind.upper()}=([\\d.]+)'" for kind in silent)
        lines.append(
            f"  Say how it is printed, with the number in brackets; for example of '{silent[0].upper()}=0.9': {cures}"
        )
    if found.unclear is not None and not all(found.readings[kind] for kind in found.goal.targets()):
        fix = "say what it is with --train-pattern or --val-pattern"
        lines.append(f"  A line names an accuracy, but not of what; {fix}: {found.unclear[:120]}")
    return "\n".join(lines)
