"""Runs a training script of any kind for a given time, and checks whether it reaches target accuracies."""

from __future__ import annotations

import math
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
from typing import Any, final

import psutil

from headway.core.errors import UsageError
from headway.core.signals import handle_signals
from headway.doctor.accuracy_parser import AccuracyKind, AccuracyParser, AccuracyReading
from headway.doctor.output_lines import OutputLines

# Called with each piece of the script's output; True: it came from standard error.
Echo = Callable[[str, bool], object]

# Seconds between SIGTERM and SIGKILL.
GRACE_S = 10.0
# Seconds to keep reading after the script has ended: its children may still print.
DRAIN_S = 1.0
ACCURACY_NAMES: dict[AccuracyKind, str] = {"train": "training accuracy", "val": "validation accuracy"}
MAY_BE_PERCENT = (
    "headway assess: the targets are reached if these numbers are fractions of 1. They may be percent, so the script"
    " continues. Give --scale fraction to stop it here.\n"
)


@final
@dataclass(frozen=True, kw_only=True)
class AccuracyGoal:
    """Target accuracies, as fractions of 1 or None, and the seconds to reach them, counted from the start of the
    process."""

    train: float | None
    val: float | None
    seconds: float

    @staticmethod
    def from_options(train: float | None, val: float | None, minutes: float) -> AccuracyGoal:
        """Reads targets as a user writes them: 0.9, or 90 for 90 %.

        Raises:
            UsageError: there is no target, a target is not an accuracy, or the time is not above 0.
        """
        if train is None and val is None:
            raise UsageError("there is no target", fix="Give --target-train, --target-val, or both.")
        if not 0 < minutes < float("inf"):
            raise UsageError(
                f"{minutes:g} minutes is not a time limit", where="--minutes", fix="Give a number above 0."
            )
        # 1 itself means 100 %, so only numbers above 1 are percent.
        shares = []
        for name, target in (("train", train), ("val", val)):
            if target is not None and not 0 < target <= 100:
                fix = "Give a fraction such as 0.9, or percent such as 90."
                raise UsageError(f"{target:g} is not an accuracy", where=f"--target-{name}", fix=fix)
            shares.append(target if target is None or target <= 1 else target / 100)
        return AccuracyGoal(train=shares[0], val=shares[1], seconds=60 * minutes)

    def targets(self) -> dict[AccuracyKind, float]:
        """Returns the targets that were given, by kind."""
        both: tuple[tuple[AccuracyKind, float | None], ...] = (("train", self.train), ("val", self.val))
        return {kind: target for kind, target in both if target is not None}


@final
@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Result of an assessment."""

    # At one moment within the time, the newest accuracy of each kind was at its target or above, and the script did not
    # fail.
    passed: bool
    why: str
    goal: AccuracyGoal
    seconds: float
    # Time until all targets were reached at once; None: never.
    reached_s: float | None
    # Time until each target was reached, whatever the other one was then.
    first_s: dict[AccuracyKind, float | None]
    best: dict[AccuracyKind, float | None]
    last: dict[AccuracyKind, float | None]
    readings: dict[AccuracyKind, int]
    # `itself`, `time` (the time was up), or `reached` (stopped by `--stop`).
    ended: str
    # Exit status of the script; negative: the signal that ended it.
    status: int
    # The first line with an accuracy that does not say whether it is training or validation.
    unclear: str | None
    # `--stop` was given and the script passed, but it was not stopped because the scale was unknown.
    kept_on: bool

    def to_json(self) -> dict[str, Any]:
        """Returns all fields for `--json`."""
        return asdict(self)


@final
@dataclass
class AccuracyHistory:
    """Accuracies read so far: for each line the seconds at which it came."""

    lines: list[tuple[float, list[AccuracyReading]]] = field(default_factory=list)

    def check_goal(
        self, goal: AccuracyGoal, value: Callable[[AccuracyReading], float]
    ) -> tuple[float | None, dict[AccuracyKind, float | None], dict[AccuracyKind, list[float]]]:
        """Returns the seconds until all targets were reached at once, until each was reached, and all values.

        Args:
            value: converts a reading to a fraction of 1: `AccuracyParser.to_fraction` or `to_least_fraction`.
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
    """Builds the command for a script: this Python for a `.py` file, the file or program itself otherwise.

    Raises:
        UsageError: there is no such file or program, or it cannot be run.
    """
    path = Path(script).expanduser()
    if path.is_dir():
        raise UsageError("this is a folder, not a script", where=script, fix="Name the file to run.")
    if path.is_file():
        if path.suffix == ".py":
            return [sys.executable, str(path), *arguments]
        if os.access(path, os.X_OK):
            return [str(path.absolute()), *arguments]
        fix = f"Make it executable: chmod +x {script}. Or name the program that runs it: bash -- {script}."
        raise UsageError("this file is neither a Python file nor executable", where=script, fix=fix)
    if (program := shutil.which(script)) is not None:
        return [program, *arguments]
    what = "there is no such script, and no program of this name on the PATH"
    raise UsageError(what, where=script, fix="Run: headway assess train.py --target-val 0.9 --minutes 10 -- ARGUMENTS.")


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

    The script runs in its own session, without input. To stop it, all of its processes get SIGTERM, and SIGKILL after
    `grace_s`. No process of its session outlives this call, even if the script ends by itself.

    The script passes if, at one moment within the time, the newest training and validation accuracies were both at
    their targets or above, and if it did not fail. Later output does not count, nor does an unfinished progress bar.

    Args:
        stop_when_reached: stop the script once it has passed on any scale. Under the scale `auto`, `0.95` may be 0.95 %
            until a number above 1 appears: then the script continues, and `echo` gets one message.

    Raises:
        UsageError: the command cannot be started.
    """
    output, is_warned = _ScriptOutput(scores, echo), False
    began = time.monotonic()
    process = _start_process(command)
    ended = "itself"
    with _stop_all_processes(process, grace_s) as stop, _OutputPipes(process) as pipes:
        while process.poll() is None:
            left = goal.seconds - (time.monotonic() - began)
            if left <= 0:
                ended = "time"
                break
            known = len(output.history.lines)
            for error, data in pipes.read(min(left, 0.1)):
                now = time.monotonic() - began
                output.feed(error, data, now, counts=now < goal.seconds)
            if not stop_when_reached or len(output.history.lines) == known:
                continue
            if output.history.check_goal(goal, scores.to_least_fraction)[0] is not None:
                ended = "reached"
                break
            if not is_warned and output.history.check_goal(goal, scores.to_fraction)[0] is not None:
                is_warned = True
                echo(MAY_BE_PERCENT, True)
        seconds = time.monotonic() - began
        if ended != "itself":
            stop()
        # Only a script that ended by itself and in time may still add results: the output of one that was stopped is
        # shown, and does not count.
        counts = ended == "itself" and seconds < goal.seconds
        for error, data in _drain(process, pipes, DRAIN_S if ended == "itself" else grace_s):
            output.feed(error, data, time.monotonic() - began, counts=counts, at_most_s=seconds)
        output.end(seconds, goal.seconds, include_unfinished=ended == "itself")
    return _conclude(goal, scores, output.history, ended, seconds, process.returncode, stop_when_reached)


@final
class _ScriptOutput:
    """Shows both outputs of a script, and records the accuracies in them."""

    def __init__(self, scores: AccuracyParser, echo: Echo) -> None:
        self.history, self._scores, self._echo = AccuracyHistory(), scores, echo
        # One decoder for standard output and one for standard error: their lines do not mix.
        self._streams = {False: OutputLines(), True: OutputLines()}

    def feed(self, error: bool, data: bytes, now: float, *, counts: bool, at_most_s: float = math.inf) -> None:
        """Takes bytes of one output; `at_most_s` is the latest time that a line is recorded with."""
        text, lines = self._streams[error].feed(data, now)
        self._echo(text, error)
        if counts:
            self._record([(min(at, at_most_s), line) for at, line in lines])

    def end(self, seconds: float, limit_s: float, *, include_unfinished: bool) -> None:
        """Records lines that have no end of their own."""
        for stream in self._streams.values():
            if include_unfinished or not stream.is_unfinished():
                self._record([(at, line) for at, line in stream.end(seconds) if at <= limit_s])

    def _record(self, lines: Sequence[tuple[float, str]]) -> None:
        for seconds, line in lines:
            if readings := self._scores.read(line):
                self.history.lines.append((seconds, readings))


def _start_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    # Without this Python writes to a pipe in blocks of 8 kB, and accuracies come late.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.Popen(
            command, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True, env=environment, bufsize=0
        )
    except OSError as error:
        fix = "Check that its first line names the program that runs it (#!)."
        raise UsageError(f"this cannot be run ({error.strerror})", where=command[0], fix=fix) from None


@final
class _OutputPipes:
    """Reads both outputs of a process without blocking."""

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
        """Returns True if the process has closed both outputs."""
        return not self._selector.get_map()

    def read(self, seconds: float) -> Iterator[tuple[bool, bytes]]:
        """Yields (is it standard error, bytes) for data that is there or comes within this many seconds."""
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


def _drain(process: subprocess.Popen[bytes], pipes: _OutputPipes, wait_s: float) -> Iterator[tuple[bool, bytes]]:
    """Reads until both outputs are closed, `wait_s` is over, or DRAIN_S after the end of the process."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not pipes.is_closed():
        if process.poll() is not None:
            until = min(until, time.monotonic() + DRAIN_S)
        yield from pipes.read(0.05)


@contextmanager
def _stop_all_processes(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[Callable[[], None]]:
    """Yields a function that asks all processes of a script to end, and ends all that remain when the block is left.
    SIGTERM to this process leaves the block as Ctrl-C does."""
    known: dict[int, psutil.Process] = {}

    def send(number: signal.Signals) -> None:
        with suppress(psutil.Error):
            # Children may have started sessions of their own, for example through `setsid`.
            parent = psutil.Process(process.pid)
            known.update({child.pid: child for child in parent.children(recursive=True)})
        for one in psutil.process_iter():
            # If the script ended before its children, only the session id still connects them to it.
            with suppress(psutil.Error, OSError):
                if os.getsid(one.pid) == process.pid:
                    known[one.pid] = one
        for one in known.values():
            with suppress(psutil.Error):
                one.send_signal(number)

    with handle_signals(signal.default_int_handler, signal.SIGTERM):
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
    # No value at all has another cause than a low accuracy: a pattern may be wrong.
    elif silent := [ACCURACY_NAMES[kind] for kind in targets if not values[kind]]:
        why = f"the script showed no {' and no '.join(silent)}"
    else:
        below = [ACCURACY_NAMES[kind] for kind in targets if first[kind] is None]
        what = (
            f"the {' and the '.join(below)} did not reach its target"
            if below
            else "the targets were not reached at once"
        )
        why = what if ended == "time" else f"{what} in {seconds:.1f} s, when the script ended"
    if ended == "time":
        why += f"; the time was up, and the script was stopped after {seconds:.1f} s"
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


def format_assessment(assessment: Assessment) -> str:
    """Formats the verdict and a line for each target."""
    lines = [f"{'PASS' if assessment.passed else 'FAIL'}: {assessment.why}."]
    for kind, target in assessment.goal.targets().items():
        best, last, first = assessment.best[kind], assessment.last[kind], assessment.first_s[kind]
        if best is None or last is None:
            lines.append(f"  {ACCURACY_NAMES[kind]}: target {target:.4g}, no value seen")
            continue
        when = "not reached" if first is None else f"reached after {first:.1f} s"
        lines.append(f"  {ACCURACY_NAMES[kind]}: target {target:.4g}, {when}; best {best:.4g}, last {last:.4g}")
    if assessment.kept_on:
        lines.append("  The script was not stopped: its numbers may be percent. If not, give --scale fraction.")
    if assessment.unclear is None and (
        silent := [kind for kind in assessment.goal.targets() if not assessment.readings[kind]]
    ):
        cures = " and ".join(f"--{kind}-pattern '{kind.upper()}=([\\d.]+)'" for kind in silent)
        lines.append(f"  Give its pattern, with the number in brackets. For '{silent[0].upper()}=0.9': {cures}")
    if assessment.unclear is not None and not all(assessment.readings[kind] for kind in assessment.goal.targets()):
        fix = "Give --train-pattern or --val-pattern"
        lines.append(
            f"  A line has an accuracy, but not whether it is training or validation. {fix}: {assessment.unclear[:120]}"
        )
    return "\n".join(lines)
