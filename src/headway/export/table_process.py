"""One row of an inference table in one round: a process that opens an engine, times it, and answers with one line.

`python -m headway.export.table_process JOB`, JOB as JSON. The process is the row's own, so that its peak memory is that
of the row, and nothing that another row has loaded or set up helps it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError
from headway.core.messages import show_messages
from headway.export.table_engines import ENGINES, PipelineSource, open_session
from headway.export.targets.openvino import import_openvino
from headway.export.targets.target import Session

MAX_CALLS = 20_000
COMPARE_BATCH = 32
"""Batch in which outputs are compared."""

SLOW_CALL_FACTOR = 10.0
"""A call that would take more than so many times the time of its cell is not made."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a row's process.

    Attributes:
        engine: name of the row.
        folder: the export.
        source: of the pipeline, as JSON.
        pixels: .npy file of images.
        threads: numbers of threads, one after the other.
        batches: batches, ascending.
        cell_s: seconds of measuring for each number of threads and batch; batch 1 gets twice as long.
        outputs: .npy file to write the outputs of all images to, with the last number of threads; None: none.
    """

    engine: str
    folder: str
    source: str
    pixels: str
    threads: tuple[int, ...]
    batches: tuple[int, ...]
    cell_s: float
    outputs: str | None = None

    def to_json(self) -> str:
        """Returns it as one argument of a command line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Timing:
    """Calls with one number of threads and one batch: seconds of each, and CPU seconds of all of them together."""

    threads: int
    batch: int
    wall_s: tuple[float, ...]
    cpu_s: float


def run_job(job: Job) -> dict[str, Any]:
    """Does a job in this process; returns what the parent reads."""
    engine = next(one for one in ENGINES if one.name == job.engine)
    source = PipelineSource(**json.loads(job.source))
    pixels = np.load(job.pixels, mmap_mode="r")
    # The import of libraries takes seconds for some rows, and is no part of loading a network.
    import_library(engine.runtime)
    timings, skipped = list[Timing](), list[str]()
    load_s, first_bytes, peak_bytes, peak_batch = 0.0, 0, 0, 0
    for number, threads in enumerate(job.threads):
        began = time.perf_counter()
        session = open_session(engine, Path(job.folder), source, threads)
        session.run(np.array(pixels[:1]))
        if not number:
            load_s = time.perf_counter() - began
        for batch in job.batches:
            found = time_batch(session, pixels, threads, batch, job.cell_s, timings)
            if isinstance(found, str):
                skipped.append(found)
                continue
            timings.append(found)
            if not number:
                peak_bytes, peak_batch = read_peak_bytes(), batch
                first_bytes = first_bytes or peak_bytes
        if job.outputs is not None and threads == job.threads[-1]:
            np.save(job.outputs, compute_all(session, pixels))
        session.close()
    return {
        "timings": [asdict(one) for one in timings],
        "skipped": skipped,
        "load_s": load_s,
        "first_bytes": first_bytes or read_peak_bytes(),
        "peak_bytes": peak_bytes or read_peak_bytes(),
        "peak_batch": peak_batch or 1,
    }


def import_library(runtime: str) -> None:
    """Imports what an engine needs; opening a session says if it is missing."""
    # PyTorch's rows load a run, and that imports much of Headway.
    names = {"torch": "headway.training.runs", "aoti": "torch"}
    with suppress(ImportError):
        if runtime == "openvino":
            import_openvino()
        else:
            importlib.import_module(names.get(runtime, runtime))


def time_batch(
    session: Session,
    pixels: NDArray[np.uint8],
    threads: int,
    batch: int,
    cell_s: float,
    before: Sequence[Timing],
) -> Timing | str:
    """Times a batch, after one call that is left out unless it takes the cell's whole time.

    Returns:
        The times; or why a batch is too slow to be measured.
    """
    smaller = [one for one in before if one.threads == threads]
    if smaller:
        last = smaller[-1]
        expected_s = min(last.wall_s) * batch / last.batch
        if expected_s > SLOW_CALL_FACTOR * cell_s:
            return f"batch {batch} with {threads} threads would take about {expected_s:.1f} s a call"
    # Copied, so that the process's memory does not count the mapped file; as many as there are, again and again.
    images = np.array(pixels[np.arange(batch) % len(pixels)])
    limit_s = cell_s * (2 if batch == 1 else 1)
    first = time_call(session, images)
    if first[0] > cell_s:
        return Timing(threads, batch, (first[0],), first[1])
    walls, cpu_s, spent = list[float](), 0.0, 0.0
    while spent < limit_s and len(walls) < MAX_CALLS:
        wall, cpu = time_call(session, images)
        walls.append(wall)
        cpu_s += cpu
        spent += wall
    return Timing(threads, batch, tuple(walls), cpu_s)


def time_call(session: Session, images: NDArray[np.uint8]) -> tuple[float, float]:
    """Returns seconds and CPU seconds, of all threads, of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    session.run(images)
    return time.perf_counter() - wall, time.process_time() - cpu


def compute_all(session: Session, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Computes the outputs of all images."""
    starts = range(0, len(pixels), COMPARE_BATCH)
    return np.concatenate([session.run(np.array(pixels[low : low + COMPARE_BATCH])) for low in starts])


def read_peak_bytes() -> int:
    """Returns the peak resident memory of this process so far.

    Not `ru_maxrss`: it begins with the size of the process that started this one.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def main() -> None:
    """Does the job of the command line, and writes the answer to standard output, which is the parent's alone."""
    given = json.loads(sys.argv[1])
    job = Job(**{**given, "threads": tuple(given["threads"]), "batches": tuple(given["batches"])})
    # A user's network may print.
    out = os.dup(1)
    os.dup2(2, 1)
    show_messages()
    try:
        answer = run_job(job)
    except HeadwayError as error:
        answer = {"error": str(error)}
    os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
