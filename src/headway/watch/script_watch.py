"""Watches a user's own training script as it runs, without changing it: `headway doctor --script train.py`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.core.signals import handle_signals
from headway.doctor.loop_observation import LoopObservation

# Default limits of the watch: whichever is reached first.
STEPS, SECONDS = 200, 60.0
# Seconds that a script has to end after the watch, for its `finally` blocks.
GRACE_S = 20.0
POLL_S = 0.1


def watch_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    steps: int | None = None,
    seconds: float | None = None,
    to_stderr: bool = False,
) -> LoopObservation:
    """Runs a Python file in its own process and watches its first training loop over a torch DataLoader or a
    `headway.Loader`.

    After the watch the script is ended from inside of its loop, as by an exception that it does not catch. Its output
    is shown unchanged.

    Args:
        steps, seconds: length of the watch after warm-up, whichever ends first. Neither: 200 steps or 60 s.
        to_stderr: send the script's output to standard error, because standard output is for a result.

    Raises:
        UsageError: there is no such Python file, or nothing to watch. UserCodeError: the script failed; its traceback
            is on standard error. HeadwayError: the script has no such loop.
    """
    path = Path(script).expanduser()
    if path.is_dir() or not path.is_file() or path.suffix != ".py":
        what = (
            "this is a folder"
            if path.is_dir()
            else "this is not a Python file"
            if path.is_file()
            else "there is no file"
        )
        raise UsageError(what, where=str(script), fix="Run: headway doctor --script train.py -- ARGUMENTS.")
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} steps cannot be watched", where="--steps", fix="Give 1 or more.")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"{seconds:g} seconds cannot be watched", where="--seconds", fix="Give a number above 0.")
    if steps is None and seconds is None:
        steps, seconds = STEPS, SECONDS
    with tempfile.TemporaryDirectory(prefix="headway-doctor-") as folder:
        result = Path(folder) / "observed.json"
        limits = json.dumps({"steps": steps, "seconds": seconds})
        # -P keeps the current folder off sys.path; the child adds the folder of the script, as Python does.
        module = "headway.watch.script_child"
        command = [sys.executable, "-P", "-m", module, str(result), limits, str(path), *arguments]
        status = _wait_for_result(command, result, 2 if to_stderr else None)
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "observed" in answer:
        return LoopObservation.model_validate(answer["observed"])
    if "missing" in answer:
        fix = "Wrap the loader of your loop yourself: headway.watch.watch(loader, model, optimizer)."
        raise HeadwayError(answer["missing"], where=str(script), fix=fix)
    if "failed" in answer:
        raise UserCodeError(answer["failed"], where=str(script))
    way = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise UserCodeError(f"it ended {way} before it was watched", where=str(script))


def _wait_for_result(command: Sequence[str], result: Path, stdout: int | None) -> int:
    """Returns the exit status of the child, which is ended if it goes on after it has written its result."""
    # SIGTERM raises KeyboardInterrupt, so the `finally` below ends the child in both cases.
    with handle_signals(signal.default_int_handler, signal.SIGTERM):
        process = subprocess.Popen(command, stdout=stdout)
        told_s: float | None = None
        try:
            while process.poll() is None:
                if told_s is None and result.exists():
                    told_s = time.monotonic()
                if told_s is not None and time.monotonic() - told_s > GRACE_S:
                    break
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                # Asked first, so that the script can clean up; a script that ignores it is killed.
                process.terminate()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
    return process.returncode
