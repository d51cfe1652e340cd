"""Training by several processes: the same as by one; faults at moments that the training knows nothing of."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests._support import command, finished, paced, packed_digits, records, slowly, write_recipe

from headway.core.run_folder import IDS_BYTES

NET = """
import hashlib, os, threading
from pathlib import Path
import torch
from torch import nn

class Watched(nn.Module):
    '''Notes, in a file of its process, how often it trained, and a digest of its weights whenever it is evaluated.'''

    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
            nn.Linear(8 * 64, num_classes),
        )
        self.trained, self.file, self.last = 0, None, True

    def forward(self, images):
        if self.training:
            self.trained += 1
        elif self.last and "NOTES" in os.environ:
            whole = b"".join(value.numpy().tobytes() for value in self.state_dict().values())
            line = f"{self.trained} {hashlib.sha256(whole).hexdigest()}\\n"
            with open(Path(os.environ["NOTES"]) / str(os.getpid()), "a") as file:
                file.write(line)
        self.last = self.training
        return self.net(images)

def plain(num_classes):
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, num_classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    packed_digits(folder, per_class=100)
    (folder / "net.py").write_text(NET)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:plain"},
        augment={"translate": 1},
        optimizer={"name": "nag", "lr": 0.02, "clip_norm": 5.0},
        batch=50,
        epochs=4,
        log_every_steps=3,
        log_ids=True,
    )
    return folder


def rows_of(run: Path) -> np.ndarray[Any, Any]:
    """(position, asked, served) of all processes, by position."""
    found = [np.frombuffer(path.read_bytes(), "<i8").reshape(-1, IDS_BYTES // 8) for path in run.glob("ids*.bin")]
    rows = np.concatenate(found)
    return rows[np.argsort(rows[:, 0], kind="stable")]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    said = finished("train", folder / "recipe.yaml", "--run", folder / "alone")
    assert said.status == 0, said.err
    return folder / "alone"


@pytest.mark.parametrize(
    ("procs", "options"),
    [
        (2, ()),
        pytest.param(3, ("micro_batch=7", "comm.algorithm=tree", "comm.bucket_mb=0.01"), marks=pytest.mark.check),
    ],
)
def test_several_processes_train_as_one_does(folder: Path, alone: Path, procs: int, options: tuple[str, ...]) -> None:
    run = folder / f"run-{procs}"
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", run, *options)
    assert said.status == 0, said.err
    assert said.out.count("Trained") == 1
    assert (rows_of(run) == rows_of(alone)).all()
    for kind in ("train", "evaluate"):
        pairs = list(zip(records(alone, kind), records(run, kind), strict=True))
        assert pairs
        for one, several in pairs:
            assert (one["step"], one["position"]) == (several["step"], several["position"])
            assert several["loss"] == pytest.approx(one["loss"], rel=1e-3)
    for name, value in load_file(alone / "weights.safetensors").items():
        torch.testing.assert_close(load_file(run / "weights.safetensors")[name], value, rtol=1e-3, atol=1e-4)
    newest = run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()
    assert len(list(newest.glob("tensors-*.safetensors"))) == procs


def test_a_batch_smaller_than_the_processes_is_refused(folder: Path) -> None:
    said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "no", "batch=1")
    assert said.status == 2
    assert "a batch of 1 cannot be shared by 2 processes" in said.err
    assert "Traceback" not in said.err


def environ_of(process: psutil.Process) -> dict[str, str]:
    """Nothing where it has ended; of one that is just ending, the kernel says that there is no such process."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


class Launched:
    """`headway train --procs` that runs, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], run: Path, notes: Path) -> None:
        self.process, self.run, self.notes = process, run, notes

    def workers(self) -> dict[int, psutil.Process]:
        """Training processes by the number of their place."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            environ = environ_of(child)
            if "HEADWAY_MEMBER" in environ and child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                found[int(environ["RANK"])] = child
        return found

    def wait_for_members(self, count: int) -> None:
        """Returns when so many of the processes that run have trained and taken part in an evaluation."""
        until = time.monotonic() + 150
        while sum(self._is_member(worker.pid) for worker in self.workers().values()) < count:
            assert self.process.poll() is None, self.process.communicate()[1][-3000:]
            assert time.monotonic() < until, f"less than {count} members"
            time.sleep(0.05)

    def _is_member(self, pid: int) -> bool:
        path = self.notes / str(pid)
        return path.exists() and any(not line.startswith("0 ") for line in path.read_text().splitlines())

    def steps(self) -> int:
        """Steps that the log tells of."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def wait_for_step(self, step: int) -> None:
        """Returns when the log tells of a step so high."""
        until = time.monotonic() + 150
        while self.steps() < step:
            assert self.process.poll() is None, self.process.communicate()[1][-3000:]
            assert time.monotonic() < until, f"no step {step}: {self.steps()}"
            time.sleep(0.02)


@contextmanager
def launched(folder: Path, run: Path, procs: int, *options: str) -> Iterator[Launched]:
    notes = run.with_name(f"{run.name}-notes")
    notes.mkdir()
    environ = {**os.environ, "NOTES": str(notes)}
    arguments = command("train", folder / "recipe.yaml", "--procs", str(procs), "--run", run, *options)
    process = subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Launched(process, run, notes)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.communicate()


LONG = ("model.factory=net.py:Watched", "evaluate.every_epochs=2", "checkpoint.every_steps=13", "comm.timeout_s=2")
EPOCHS = 16
EPOCH = 750


def check_whole(found: Launched, epochs: int, faults: int, err: str) -> None:
    """The run is at its end, positions exactly once, all processes had the same bits, one step a loss was repeated:
    also of a process that a busy machine let lie for longer than its lease."""
    steps = epochs * EPOCH // 50
    losses = max(faults, len(re.findall(r" died| was silent for", err)))
    rows = rows_of(found.run)
    assert (rows[:, 0] == np.arange(steps * 50)).all()
    assert (rows[:, 1] == rows[:, 2]).all()
    logged = [record["step"] for record in records(found.run, "train")]
    assert logged == sorted(set(logged))
    assert logged[-1] == steps
    summary = json.loads((found.run / "summary.json").read_text())
    assert summary["finished"]
    assert summary["accuracy"] > 0.9
    after: dict[str, str] = {}
    compared = 0
    for path in found.notes.iterdir():
        lines = [line.split() for line in path.read_text().splitlines()]
        assert all(int(trained) <= steps + losses for trained, _ in lines)
        digests = [digest for trained, digest in lines if int(trained)]
        digests = [digest for number, digest in enumerate(digests) if not number or digests[number - 1] != digest]
        for one, next_one in pairwise(digests):
            compared += one in after
            assert after.setdefault(one, next_one) == next_one
    assert compared > epochs // 4


@pytest.mark.check
def test_the_run_goes_on_without_a_killed_rank_0(folder: Path, tmp_path: Path) -> None:
    """Part of the network is frozen by then, but not in the process that comes in its place."""
    frozen = "model.freeze_after=[{match: 'net.0', after_epochs: 2}]"
    with launched(folder, tmp_path / "run", 3, *LONG, f"epochs={EPOCHS}", frozen, paced(folder)) as found:
        with slowly(folder):
            found.wait_for_step(40)
            found.workers()[0].send_signal(signal.SIGKILL)
        out, err = found.process.communicate(timeout=200)
        assert found.process.returncode == 0, err
        assert re.search(r"rank 0 \(process \d+ on .*\) died", err), err
        assert "Trained" in out
        check_whole(found, EPOCHS, 1, err)


@pytest.mark.check
def test_a_stopped_process_is_fenced_when_it_wakes(folder: Path, tmp_path: Path) -> None:
    with launched(folder, tmp_path / "run", 3, "--no-respawn", *LONG, f"epochs={EPOCHS}", paced(folder)) as found:
        with slowly(folder):
            found.wait_for_step(40)
            victim = found.workers()[random.Random(time.time_ns()).randrange(3)]
            victim.send_signal(signal.SIGSTOP)
            found.wait_for_step(found.steps() + 20)
            victim.send_signal(signal.SIGCONT)
        _, err = found.process.communicate(timeout=200)
        assert found.process.returncode == 0, err
        assert "was silent for 2 s" in err
        check_whole(found, EPOCHS, 1, err)


@pytest.mark.check
@pytest.mark.timeout(1800)
def test_faults_at_random_moments(folder: Path, tmp_path: Path) -> None:
    """Whatever the run is at: forward, a bucket under way, the optimizer, a checkpoint, an evaluation."""
    seed = time.time_ns()
    draw, epochs = random.Random(seed), 70
    kinds = (signal.SIGKILL, signal.SIGHUP, signal.SIGSTOP)
    # Rank 0 once, the others by chance; bench.soak does many more.
    faults = list(zip(draw.sample(kinds, 3), (0, draw.randint(1, 3), draw.randint(0, 3)), strict=True))
    patient = (
        *LONG[:-1],
        "comm.timeout_s=5",
    )  # which only the victims are silent for, if late
    with launched(folder, tmp_path / "run", 4, *patient, f"epochs={epochs}", paced(folder)) as found:
        for number, (kind, rank) in enumerate(faults):
            with slowly(folder):
                found.wait_for_members(3)  # a fault takes one, and one may just be on its way
            found.wait_for_step(found.steps() + draw.randint(10, 60))
            time.sleep(draw.uniform(0, 0.2))
            workers = found.workers()
            victim = workers.get(rank) or draw.choice(list(workers.values()))
            print(f"seed {seed}, fault {number}: {kind.name} to {victim.pid} near step {found.steps()}")
            victim.send_signal(kind)
        _, err = found.process.communicate(timeout=1200)
        assert found.process.returncode == 0, err
        check_whole(found, epochs, len(faults), err)


STUCK = """
import os, signal, time

steps = 0

def stuck(images, labels, keys):
    global steps
    steps += 1
    if os.environ["RANK"] == "1" and steps == 20 and os.environ.get("HEADWAY_JOINING") != "1":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits half a minute before it kills
        time.sleep(120)
    return images, labels
"""


@pytest.fixture
def stuck(folder: Path) -> list[str]:
    (folder / "stuck.py").write_text(STUCK)
    return [str(folder / "recipe.yaml"), "transform=stuck.py:stuck", "comm.timeout_s=2", "comm.stall_s=4"]


@pytest.mark.check
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_rank_that_is_alive_and_does_not_come_is_named(tmp_path: Path, stuck: list[str], algorithm: str) -> None:
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    arguments = [*torchrun, "headway", "train", *stuck, f"comm.algorithm={algorithm}", "--run-folder", str(run)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, err = process.communicate(timeout=100)
        finally:
            for child in psutil.Process().children(recursive=True):
                if "RANK" in environ_of(child):
                    child.kill()
    assert process.returncode == 1
    assert re.search(r"'step 20, bucket \d: .*', which never came from rank 1 \(last: step 19, bucket", err), err


@pytest.mark.check
def test_the_others_go_on_without_a_stuck_one(folder: Path, tmp_path: Path, stuck: list[str]) -> None:
    said = finished("train", *stuck, "--procs", "3", "--no-respawn", "--run", tmp_path / "run")
    assert said.status == 0, said.err
    assert "did not come to the operation" in said.err
    assert (rows_of(tmp_path / "run")[:, 0] == np.arange(3000)).all()


@pytest.mark.check
def test_after_a_restart_all_go_on_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    options = (*LONG, "comm.on_rank_failure=restart", f"epochs={EPOCHS}")
    with launched(folder, tmp_path / "run", 3, *options, paced(folder)) as found:
        with slowly(folder):
            found.wait_for_step(40)
            found.workers()[1].send_signal(signal.SIGKILL)
        _, err = found.process.communicate(timeout=200)
        assert found.process.returncode == 0, err
        assert "All workers are started again" in err
        assert re.search(rf"Resumed at step \d+ of {EPOCHS * EPOCH // 50}\b", err), err
    assert (rows_of(tmp_path / "run")[:, 0] == np.arange(EPOCHS * EPOCH)).all()


@pytest.mark.check
def test_torchrun_starts_all_again_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "headway", "train", str(folder / "recipe.yaml"), "epochs=100", "checkpoint.every_steps=13"]
    arguments = [*torchrun, "--max-restarts", "1", *train, "--run-folder", str(run)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = Launched(process, run, tmp_path)
    try:
        found.wait_for_step(60)
        victim = next(child for child in psutil.Process(process.pid).children() if environ_of(child).get("RANK") == "1")
        victim.kill()
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert re.search(r"Resumed at step \d+ of 1500", err), err
    finally:
        process.kill()
    assert (rows_of(run)[:, 0] == np.arange(100 * EPOCH)).all()
