"""Runs one piece in a process of its own, within its time limit, and reads its results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from bench._gpu.pieces import ROOT, Piece, fill_command

OUTPUT_CHARACTERS = 20_000
"""Of what a piece printed, in its record: the end, where the table stands."""


def run_piece(piece: Piece, out: Path, seconds: float, *, dry: bool) -> dict[str, Any]:
    """Runs a piece, and kills it after so many seconds.

    Returns:
        `status` (`done`, `failed` or `timed out`), `seconds`, `machine`, `claims` and the end of its `output`.
    """
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-bench-gpu-") as name:
        found, log = Path(name) / "found", Path(name) / "log"
        command = [sys.executable, "-m", *fill_command(piece.dry if dry else piece.command, out)]
        command += [f"--junitxml={found}", "-o", "junit_family=xunit2"] if piece.is_tests else ["--json", str(found)]
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if dry:
            # Another card must not be used by chance, and two threads wait for each other on busy cores.
            environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (
            log.open("wb") as said,
            subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            status = _wait(process, seconds)
        output = log.read_text(encoding="utf-8", errors="replace")
        record = {"status": status, "seconds": round(monotonic() - begun, 1)}
        record |= _tests_in(found) if piece.is_tests else _claims_in(found)
        return {**record, "command": " ".join(command[1:-2]), "output": output[-OUTPUT_CHARACTERS:]}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        return "done" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        # Its own processes end with it (bench._family); those of pytest are in its session.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _claims_in(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"claims": []}
    return {"machine": found["machine"], "claims": found["claims"]}


def _tests_in(path: Path) -> dict[str, Any]:
    """The counts of pytest as claims."""
    try:
        suite = ElementTree.parse(path).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, AssertionError, KeyError):
        return {"claims": []}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    values = {"passed": passed, "failed": counts["failures"] + counts["errors"], "skipped": counts["skipped"]}
    how = f"of {counts['tests']} tests"
    return {
        "claims": [{"name": f"tests_{name}", "value": value, "unit": "", "how": how} for name, value in values.items()]
    }
