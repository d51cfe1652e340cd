"""A sweep that workers join, as real processes: this machine plays all of them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import psutil
from safetensors.torch import load_file
from tests._support import PACE, command, packed_digits, write_recipe

GIVES_UP_S = 400.0
OPTIONS = ("--budget", "2", "--smallest", "1/3", "--seeds", "1")


def prepare(folder: Path) -> None:
    """Writes data, recipe and space; batches take 0.1 s while there is a file `slowly`."""
    packed_digits(folder)
    (folder / "pace.py").write_text(PACE)
    write_recipe(
        folder / "recipe.yaml", device="cpu", epochs=10, transform="pace.py:pace", checkpoint={"every_steps": 3}
    )
    (folder / "space.yaml").write_text("parameters:\n  optimizer.lr: {log: [0.001, 0.5]}\n")


@final
class Machines:
    """Programs that run beside each other, each with its children; at the end of the block none is left."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._logs = folder, dict[subprocess.Popen[bytes], Path]()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._logs:
            send(list_tree(process), signal.SIGKILL)
            process.wait()

    def start(self, *arguments: str, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
        """Starts Headway; `before` is a command that starts it elsewhere."""
        return self.run([*before, *command(*arguments)], **environment)

    def run(self, argv: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a program in the folder; what it says goes to a file."""
        log = self._folder / f"{len(self._logs)}-{secrets.token_hex(4)}.said"
        with log.open("wb") as said:
            process = subprocess.Popen(
                argv, cwd=self._folder, env={**os.environ, **environment}, stdout=said, stderr=said
            )
        self._logs[process] = log
        return process

    def sweep(self, name: str, *more: str, **environment: Any) -> subprocess.Popen[bytes]:
        """Begins a sweep, or continues it if it is there."""
        if (self._folder / name / "sweep.yaml").exists():
            return self.start("sweep", "--resume", name, **environment)
        # Killed before it was a sweep.
        shutil.rmtree(self._folder / name, ignore_errors=True)
        given = ("sweep", "recipe.yaml", "--space", "space.yaml", *OPTIONS, "--out", name, *more)
        return self.start(*given, **environment)

    def join(self, name: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self.start("sweep", "--join", name, "--slots", "1", before=before)

    def read(self, process: subprocess.Popen[bytes]) -> str:
        return self._logs[process].read_text()

    def finish(self, process: subprocess.Popen[bytes], status: int = 0) -> str:
        """Waits for the end of a program; returns what it said."""
        process.wait(GIVES_UP_S)
        said = self.read(process)
        assert process.returncode == status, said
        return said


def list_tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Lists the processes of a machine: the program, and its workers."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    return []


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + GIVES_UP_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def read_decisions(sweep: Path) -> list[str]:
    """The journal without checksums; the order of results is that of their arrival."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (sweep / "decisions.jsonl").read_text().splitlines()]
    return sorted(json.dumps({key: value for key, value in row.items() if key != "crc32"}) for row in rows)


def read_weights(sweep: Path) -> dict[str, list[float]]:
    """Weights of all runs that have some."""
    return {
        str(path.parent.relative_to(sweep)): [
            float(value) for part in load_file(path).values() for value in part.flatten()
        ]
        for path in sorted(sweep.glob("*/*/weights.safetensors"))
    }


def count_steps(sweep: Path, trial: int) -> int:
    path = sweep / "trials" / str(trial) / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0


def expect_no_double_writes(sweep: Path) -> None:
    """Each step of each run is in its log once, and nothing of a lost worker is left."""
    for path in sorted(sweep.glob("*/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert max(Counter((row["kind"], row["step"]) for row in rows).values()) == 1, path
        steps = [row["step"] for row in rows if row["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1)), path
    assert not list((sweep / "leases").iterdir())
    assert not [path for parent in ("trials", "retrained") for path in (sweep / parent).glob(".*")]
