"""Verification of an export by a program of the user's: it runs in a process group of its own, and prints a number.

The number is compared with that of the accepted network, which the same program has measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, final

import psutil

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, open_regular, read_text, write_atomically
from headway.core.process_group import has_ended, read_start_time, signal_group, wait_for_end
from headway.core.untrusted_json import JsonError, describe_kind, is_any_number, parse_object
from headway.export.manifest import hash_file
from headway.lifecycle.loop.loop_recipe import VerifyRecipe

OUTPUT, ERRORS, PROCESS = "output.txt", "errors.txt", "process.json"
"""Files in the folder of a verification: both outputs of the program, and which process it is."""
END_S = 5.0
"""Seconds that a program has after SIGTERM before its process group is killed."""
LINE_BYTES = 1 << 20
"""Most bytes of the last line of the output."""
_FIX = "Mend the program, and run the same command again: the loop goes on here."


@final
@dataclass(frozen=True, kw_only=True)
class Verification:
    """A number of the program about the export of a round, and that of the accepted network beside it.

    Attributes:
        program: identifies the program; numbers of two programs do not compare.
        metric: name of the number.
        better: which of two numbers is better.
        value: the number.
        against: round of the accepted network; None: there was nothing to compare with.
        before: number of that network.
        allowed: by how much `value` may be worse than `before`.
    """

    program: str
    metric: str
    better: Literal["higher", "lower"]
    value: float
    against: int | None
    before: float | None
    allowed: float

    @property
    def worse(self) -> float | None:
        """By how much the number is worse than that of the accepted network; negative: it is better."""
        if self.before is None:
            return None
        # Subtracted as decimals: 0.7 after 0.8 passes a drop of 0.1, which it would miss by 1e-16 as floats.
        fall = float(Decimal(repr(self.before)) - Decimal(repr(self.value)))
        return fall if self.better == "higher" else -fall

    @property
    def passed(self) -> bool:
        """True if the network may be accepted."""
        return self.worse is None or self.worse <= self.allowed

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self) | {"passed": self.passed}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> Verification:
        """Returns the verification that the journal holds."""
        return Verification(**{name: tree[name] for name in Verification.__dataclass_fields__})

    def describe(self) -> str:
        """Returns a sentence for the terminal."""
        said = f"{self.metric} {self.value:g}"
        if self.before is None:
            return f"{said}; later rounds are compared with it"
        word = "accepted" if self.passed else "refused"
        return f"{word}: {said}, that of round {self.against} {self.before:g}; {self.better} is better"


def find_program(settings: VerifyRecipe, base: Path) -> str:
    """Returns the path of the program. Args: base: folder of LOOP.yaml.

    Raises UsageError if there is none that can be run.
    """
    name = settings.command[0]
    path = shutil.which(base / name if os.sep in name else name)
    if path is None:
        what = f"there is no program {name!r} that can be run"
        fix = "Name one on the PATH, such as [python3, simulate.py], or an executable file, such as [./simulate.sh]."
        raise UsageError(what, where="verify.command", fix=fix)
    return os.path.abspath(path)


def identify_program(settings: VerifyRecipe, base: Path) -> str:
    """Returns a SHA-256 of the command, the name of the number, and the files that the command names.

    Raises UsageError if one of them cannot be read.
    """
    # `Path.is_file` fails for a part that is too long for a name, such as a program behind `-c`.
    files = [path for part in settings.command if os.path.isfile(path := base / part)]
    try:
        tree = [*settings.command, settings.metric, *(hash_file(path) for path in files)]
    except OSError as error:
        what = f"a file of the command cannot be read ({describe_os_error(error)})"
        raise UsageError(what, where=str(error.filename), fix="Make it readable.") from None
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def measure_export(settings: VerifyRecipe, base: Path, export: Path, work: Path) -> float:
    """Runs the program on an export, and returns its number.

    Args:
        base: folder of LOOP.yaml, in which the program runs.
        export: folder of the export.
        work: folder for its output, beside the export in the folder of the round.

    Raises:
        UsageError: the program cannot be run.
        HeadwayError: it fails, takes too long, or prints no such number.
    """
    command = [find_program(settings, base), *settings.command[1:], *map(os.path.abspath, (export, work.parent))]
    _end_forgotten(work / PROCESS)
    # A killed loop may have left a process that still writes into the files of its own.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    status = _run(command, base, work, settings.timeout_s)
    if status != 0:
        ended = f"was ended by {_name_signal(-status)}" if status < 0 else f"has ended with exit status {status}"
        words = _read_last_line(work / ERRORS).decode(errors="replace").strip()[:300]
        what = f"the program of verify.command {ended}" + (f". Its last error line: {words!r}" if words else "")
        raise HeadwayError(what, where=str(work / ERRORS), fix=_FIX)
    return _parse_number(_read_last_line(work / OUTPUT), settings.metric, work / OUTPUT)


def _parse_number(line: bytes, metric: str, path: Path) -> float:
    """Returns the number of a name in a line of JSON."""
    try:
        tree = parse_object(line)
        if metric not in tree:
            names = ", ".join(map(repr, list(tree)[:8])) or "nothing"
            raise JsonError(f"it lacks {metric!r}, and has {names[:300]}")
        if not is_any_number(value := tree[metric]):
            raise JsonError(f"it has {describe_kind(value)} as {metric!r}, not a number")
        # Python reads NaN and Infinity. A whole number of 400 digits is no float.
        if not math.isfinite(number := float(value)):
            raise JsonError(f"its {metric!r} is {number}, not a finite number")
    except (JsonError, OverflowError) as error:
        reason = str(error) if line else "it has printed nothing"
        what = f"the last line that the program of verify.command has printed is not the JSON object wanted: {reason}"
        fix = f"Let its last line be for example {json.dumps({metric: 0.5})}, and run the same command again."
        raise HeadwayError(what, where=str(path), fix=fix) from None
    return number


def _run(command: list[str], base: Path, work: Path, timeout_s: float) -> int:
    """Runs a command to its end, and returns its exit status; whatever it has started ends with it."""
    with (work / OUTPUT).open("xb") as output, (work / ERRORS).open("xb") as errors:
        try:
            process = subprocess.Popen(
                command, cwd=base, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        # An interpreter that a script names and nobody has, or a part of the command with a zero byte.
        except (OSError, ValueError) as error:
            what = f"the program cannot be run ({describe_os_error(error)})"
            raise UsageError(what, where="verify.command", fix=_FIX) from None
    # Ctrl-C and SIGTERM leave the block as well.
    try:
        _note_process(work / PROCESS, process.pid)
        if not wait_for_end(process.pid, timeout_s):
            what = f"the program of verify.command has not ended within {timeout_s:g} s, so it was stopped"
            fix = "Set a longer verify.timeout_s, or let the program do less, and run the same command again."
            raise HeadwayError(what, where=str(work), fix=fix)
    finally:
        try:
            _ask_to_end(process.pid)
        finally:
            signal_group(process.pid, signal.SIGKILL)
            status = process.wait()
    return status


def _ask_to_end(pid: int) -> None:
    """Sends SIGTERM to the group of a process that has not ended, and gives it some seconds."""
    if not has_ended(pid):
        signal_group(pid, signal.SIGTERM)
        wait_for_end(pid, END_S)


def _note_process(path: Path, pid: int) -> None:
    """Notes which process runs, for the loop after a loop that was killed."""
    # A process that has ended already is a zombie, and still has its time.
    write_atomically(path, json.dumps({"pid": pid, "created": read_start_time(pid)}))


def _end_forgotten(path: Path) -> None:
    """Kills the program that a killed loop has left running: two at once may want the same files or devices."""
    with suppress(OSError, JsonError, psutil.Error, KeyError, TypeError, ValueError):
        tree = parse_object(read_text(path))
        process = psutil.Process(tree["pid"])
        # Its number may be that of another process by now, which has another time.
        if read_start_time(process.pid) == tree["created"]:
            signal_group(process.pid, signal.SIGKILL)
            process.wait(END_S)


def _read_last_line(path: Path) -> bytes:
    """Returns the last line of a file that is not empty; at most its last LINE_BYTES."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
        return file.read().rstrip().rpartition(b"\n")[2]


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
