"""Runs a target with inputs of every kind, until so many were tried or so many seconds are over.

`python -m tests.fuzz.campaign TARGET COUNT SECONDS SEED`: COUNT or SECONDS 0 is no limit. Native targets are those of
native/fuzz, built with sanitizers. The others are files of this folder: their `target(folder)` gives a function of a
random generator, which may raise errors of ours and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz import builds
from tests.fuzz.seeds import write_seeds

from headway.core.errors import HeadwayError

NATIVE = ("decode", "gather", "optimize", "convolve", "changing", "sizes", "fork", "share", "libjpeg")
PYTHON = ("manifest", "columns", "coordinator", "hvd")
GROWTH_BYTES = 256 << 20
"""By which the largest memory of the process may grow."""


def run_native(target: str, count: int, seconds: int, seed: int, real: Path | None, folder: Path) -> int:
    """Runs the driver in a folder, where it leaves the files of a batch that fails. Returns its exit status."""
    driver, name = builds.of(target)
    seeds = folder / "seeds"
    seeds.mkdir()
    write_seeds(seeds, real)
    command = [driver, name, seeds, str(count), str(seconds), str(seed)]
    return subprocess.run(command, cwd=folder, check=False).returncode


def run_python(target: str, count: int, seconds: int, seed: int, folder: Path) -> int:
    """Runs a target of this folder in this process. Returns 1 where an input made it fail, which is told."""
    died: list[str] = []
    before, threading.excepthook = (
        threading.excepthook,
        lambda args: died.append("".join(traceback.format_exception(args.exc_value))),
    )
    done = 0
    try:
        with importlib.import_module(f"tests.fuzz.{target}").target(folder) as one:
            peak, start = _peak_bytes(), time.monotonic()
            while (not count or done < count) and (not seconds or time.monotonic() - start < seconds):
                try:
                    with contextlib.suppress(HeadwayError):
                        one(Random(f"{seed}/{done}"))
                except Exception:
                    died.append(traceback.format_exc())
                if _peak_bytes() - peak > GROWTH_BYTES:
                    died.append(f"it took {(_peak_bytes() - peak) >> 20} MiB")
                if died:
                    print(f"{target}: input {done} of seed {seed}:\n{died[0]}", flush=True)
                    return 1
                done += 1
    finally:
        threading.excepthook = before
    print(f"{done} inputs in {time.monotonic() - start:.0f} s: errors of ours alone, no thread died", flush=True)
    return 0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(target: str, count: str, seconds: str, seed: str) -> int:
    if target not in NATIVE + PYTHON:
        print(f"There is no target {target!r}. TARGET is one of {', '.join(NATIVE + PYTHON)}.")
        return 2
    real = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data") / "imagenet-250"
    folder = Path(tempfile.mkdtemp(prefix="headway-fuzz-"))
    limits = int(count), int(seconds), int(seed)
    if target in PYTHON:
        status = run_python(target, *limits, folder)
    else:
        status = run_native(target, *limits, real if real.is_dir() else None, folder)
    if status:
        print(f"It failed; the files are in {folder}")
    else:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
