"""Runs torch's profiler, and TraceML if it is installed, on the same cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench._arms import ROOT
from bench._doctor import plain
from bench._doctor.around import Place
from bench._doctor.jobs import Job
from bench._doctor.measure import bring

STEPS, SECONDS = 20, 2.0
"""That the profiler looks at: so many steps, or as many as come in so many seconds; of a step with ten thousands of
operations each second fills a gigabyte."""
WATCHED_STEPS, WATCHED_SECONDS = 200, 30.0
"""That TraceML looks at: it wants more, to be sure."""
LIMIT_S = 180.0
PLAIN = Path(plain.__file__)


def asked(job: Job, place: Place, folder: Path) -> dict[str, str]:
    """(peer -> what it says) of a job, in a folder that is not there yet."""
    folder.mkdir(parents=True)
    job.write(folder / "recipe.yaml", place.train, place.held_out)
    return {"profiler": profiled(job, place, folder), "traceml": traced(job, place, folder)}


def profiled(job: Job, place: Place, folder: Path) -> str:
    """The largest item of the profiler's summary, by the processor time of its own, and its share."""
    out = folder / "profiler.json"
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.procs}"] if job.procs > 1 else []
    command = place.command(*many, "-m", "bench._doctor.plain")
    _run(command, job, place, folder, out=str(out), steps=STEPS, seconds=SECONDS, watched=False)
    if not out.exists():
        return "it failed"
    found = json.loads(out.read_text(encoding="utf-8"))
    return f"{found['largest'][:40]} ({found['share']:.0%})"


def traced(job: Job, place: Place, folder: Path) -> str:
    """TraceML's diagnosis at the end of a run."""
    program = Path(sys.executable).with_name("traceml")
    if not any(map(find_spec, plain.PACKAGES)) or not program.exists():
        return "not here"
    many = [f"--nproc-per-node={job.procs}"] if job.procs > 1 else []
    options = ["--mode=summary", "--logs-dir", str(folder), "--run-name", "traced", *many]
    command = [*place.prefix, str(program), "run", str(PLAIN), *options]
    found = folder / "traced/final_summary.json"
    _run(command, job, place, folder, out=str(found), steps=WATCHED_STEPS, seconds=WATCHED_SECONDS, watched=True)
    try:
        summary = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return "it failed"
    return diagnosis(summary)


def diagnosis(summary: Mapping[str, Any]) -> str:
    """Of TraceML's final summary; older ones have no diagnosis of the whole."""
    found = summary.get("primary_diagnosis") or summary.get("step_time", {}).get("diagnosis") or {}
    return str(found.get("status") or "nothing")


def _run(command: Sequence[str], job: Job, place: Place, folder: Path, **what: Any) -> None:
    """Runs bench/_doctor/plain.py to its end, or for so long. Args: what: it is asked, but for the recipe."""
    bring(job, place)
    told = {"recipe": str(folder / "recipe.yaml"), **what}
    environ = {**os.environ, **job.environ, plain.ASKED: json.dumps(told), "GLOO_SOCKET_IFNAME": "lo"}
    with (
        (folder / "said.txt").open("ab") as said,
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=said, start_new_session=True) as process,
    ):
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
