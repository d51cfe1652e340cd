"""Asynchronous training: one worker is SGD, a killed one loses no sample, and the log of several replays the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests._support import (
    damage,
    finished,
    headway,
    paced,
    packed_digits,
    records,
    refused,
    running,
    slowly,
    workers_of,
    write_recipe,
)
from tests.training.test_ranks import rows_of

from headway.parallel.update_log import ROW_BYTES, UpdateLog, read_updates

NET = """
from torch import nn


def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(DROPOUT),
        nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )


def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
ASYNC = "parallel={strategy: async}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async")
    packed_digits(folder, per_class=60)
    (folder / "net.py").write_text(NET.replace("DROPOUT", "0.1"))
    (folder / "plain.py").write_text(NET.replace("DROPOUT", "0.0"))
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        augment={"translate": 1},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.001, "clip_norm": 2.0},
        batch=24,
        epochs=4,
        log_every_steps=7,
        log_ids=True,
    )
    return folder


def same(one: Path, other: Path) -> bool:
    first, second = (load_file(run / "weights.safetensors") for run in (one, other))
    return all(torch.equal(value, second[name]) for name, value in first.items())


def train(folder: Path, run: Path, procs: int, *options: str) -> Path:
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", run, *options)
    assert said.status == 0, said.err
    return run


@pytest.fixture(scope="module")
def three(folder: Path) -> Path:
    """Three workers and two servers, with several meetings, and a weight that is not trained."""
    options = (
        "parallel={strategy: async, servers: 2}",
        "checkpoint={every_steps: 20, keep: 9}",
        "model.freeze=['^0.bias']",
        "log_every_steps=13",
    )
    return train(folder, folder / "three", 3, *options)


SHORT = ("model.factory=plain.py:build", "epochs=2")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    """What one process trains without workers."""
    headway("train", folder / "recipe.yaml", "--run", folder / "plain", *SHORT)
    return folder / "plain"


@pytest.mark.parametrize("compensate", ["none", "constant", "adaptive"])
def test_one_worker_is_sgd_bit_for_bit(folder: Path, plain: Path, tmp_path: Path, compensate: str) -> None:
    alone = f"parallel={{strategy: async, compensate: {compensate}}}"
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "async", alone, *SHORT)
    assert same(plain, tmp_path / "async")
    for kind in ("train", "evaluate"):
        for one, other in zip(records(plain, kind), records(tmp_path / "async", kind), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert other["step"] == one["step"]


@pytest.mark.check
def test_each_step_is_made_once_and_the_log_replays_the_run(three: Path) -> None:
    updates = read_updates(three / "updates.bin")
    steps = len(updates)
    assert sorted(update.step for update in updates) == list(range(steps))
    assert len({update.worker for update in updates}) == 3
    assert (rows_of(three)[:, 0] == np.arange(steps * 24)).all()
    # Also behind a meeting, such as that of step 40, which is one more than a multiple of 13.
    recorded = [record["step"] for record in records(three, "train")]
    assert recorded == sorted({*recorded, 20, 40, 60, steps})
    assert min(record["images_s"] for record in records(three, "train")) > 0
    found = headway("replay", three, "--json").json()
    assert found["updates"] == steps
    assert found["first_difference"] == ""
    assert found["equal_steps"] == [20, 40, 60, steps]
    headway("report", three)
    said = (three / "report.html").read_text()
    assert "not reproducible, but replayable" in said
    assert "Correction for delay" in said
    # The batch of the next step, whatever the recipe says.
    assert "for the next batch; 1 batch ahead" in said


def test_a_changed_log_is_caught(three: Path, tmp_path: Path) -> None:
    run = tmp_path / "changed"
    shutil.copytree(three, run)
    content = bytearray((run / "updates.bin").read_bytes())
    content[5 * ROW_BYTES + 3] ^= 1
    (run / "updates.bin").write_bytes(content)
    assert "update 6 is not what was written" in refused("replay", run, status=1)
    # A log that was written anew, with sums that fit, is another run.
    updates = read_updates(three / "updates.bin")
    place = next(place for place, update in enumerate(updates) if update.staleness > 1)
    updates[place] = updates[place]._replace(read=updates[place].read + 1)
    (run / "updates.bin").unlink()
    log = UpdateLog(run / "updates.bin", 0)
    for update in updates:
        log.write(update)
    log.close()
    said = headway("replay", run, status=1)
    assert "differs from that in the checkpoint of step" in said.out


@pytest.mark.check
def test_a_run_goes_on_from_a_drained_checkpoint_with_other_workers(three: Path, tmp_path: Path) -> None:
    run = tmp_path / "cut"
    shutil.copytree(three, run)
    for step in sorted((run / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(step)
    (run / "checkpoints/latest").write_text("step-00000020\n")
    (run / "summary.json").unlink()
    said = finished("train", "--resume", run, "--procs", "2")
    assert said.status == 0, said.err
    before, after = read_updates(three / "updates.bin"), read_updates(run / "updates.bin")
    assert after[:20] == before[:20]
    assert {update.worker for update in after[20:]} <= {0, 1}
    assert (rows_of(run)[:, 0] == np.arange(len(after) * 24)).all()
    assert headway("replay", run, "--json").json()["first_difference"] == ""


@pytest.mark.check
def test_the_mean_delay_is_one_less_than_the_workers(folder: Path, tmp_path: Path) -> None:
    run = train(
        folder, tmp_path / "run", 3, ASYNC, "epochs=40", "evaluate.every_epochs=40", "checkpoint.every_epochs=40"
    )
    updates = read_updates(run / "updates.bin")
    assert np.mean([update.staleness for update in updates]) == pytest.approx(2, abs=0.05)


@pytest.mark.check
def test_a_compiled_network_trains(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", 2, ASYNC, "compile=true", "epochs=1")


def count_updates(run: Path) -> int:
    path = run / "updates.bin"
    return path.stat().st_size // ROW_BYTES if path.exists() else 0


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@contextlib.contextmanager
def reading(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """The lines that a command writes on stderr, as they come."""
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lines
    finally:
        # The pipe ends with the last of its processes, and one that is stopped does not end by itself.
        if process.poll() is None:
            for one in (*workers_of(process.pid), process):
                one.kill()
        thread.join()


@pytest.mark.parametrize(
    ("servers", "losses"),
    [
        pytest.param(2, [(2, signal.SIGKILL)], marks=pytest.mark.check),
        pytest.param(2, [(2, signal.SIGSTOP)], marks=pytest.mark.check),
        # Both in one segment.
        pytest.param(1, [(2, signal.SIGKILL), (1, signal.SIGSTOP)], marks=pytest.mark.check),
        # With a server weights are lost: the others go back to the last checkpoint.
        pytest.param(2, [(0, signal.SIGKILL)], marks=pytest.mark.check),
        pytest.param(2, [(1, signal.SIGKILL)], marks=pytest.mark.check),
        # It wakes up while the others train, and must not write into their log.
        pytest.param(1, [(0, signal.SIGSTOP)], marks=pytest.mark.check),
    ],
)
def test_the_others_go_on_after_a_loss(
    folder: Path, tmp_path: Path, servers: int, losses: list[tuple[int, signal.Signals]]
) -> None:
    run = tmp_path / "run"
    every = 2 if losses[0][0] < servers else 8
    options = (
        f"parallel={{strategy: async, servers: {servers}}}",
        *("epochs=8", "evaluate.every_epochs=8", f"checkpoint={{every_epochs: {every}, keep: 9}}", "comm.timeout_s=2"),
        paced(folder),
    )
    with (
        running("train", folder / "recipe.yaml", "--procs", "3", "--run", run, "--no-respawn", *options) as process,
        reading(process) as lines,
    ):
        with slowly(folder):
            until(process, lambda: count_updates(run) >= 25)
            workers = {int(worker.environ()["RANK"]): worker for worker in workers_of(process.pid)}
            for rank, how in losses:
                workers[rank].send_signal(how)
                at = count_updates(run)
                # A lost worker ends nothing: updates come before the ranks have met again, which the lead would say.
                if rank >= servers:
                    until(process, lambda at=at: count_updates(run) >= at + 3)  # type: ignore[misc]
                    assert not any(re.search("died|was silent", line) for line in lines), lines
            for rank, how in losses:
                if how == signal.SIGSTOP:
                    until(process, lambda: any("was silent" in line for line in lines))
                    # The others may have given it up and ended it already.
                    with contextlib.suppress(psutil.NoSuchProcess):
                        workers[rank].send_signal(signal.SIGCONT if rank < servers else signal.SIGKILL)
        process.wait(timeout=120)
    assert process.returncode == 0, lines
    for rank, _ in losses:
        dropped = f"The connection to rank {rank} ended, and the others go on without it.\n"
        assert (dropped in lines) == (rank >= servers), lines
    updates = read_updates(run / "updates.bin")
    assert sorted(update.step for update in updates) == list(range(len(updates)))
    assert (rows_of(run)[:, 0] == np.arange(len(updates) * 24)).all()
    assert headway("replay", run, "--json").json()["first_difference"] == ""


SLOW = """
import os
import time

calls = 0


def wait(images, labels, keys):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 3:
        time.sleep(5)
    return images, labels
"""


def test_a_slow_process_is_waited_for(folder: Path, tmp_path: Path) -> None:
    """Longer than the ranks wait for each other in a collective: its server, and the fast process that is ahead."""
    (folder / "slow.py").write_text(SLOW)
    run = train(
        *(folder, tmp_path / "run", 2, "parallel={strategy: async, servers: 2, ahead: 2}", "transform=slow.py:wait"),
        *("comm={timeout_s: 3, stall_s: 3}", "epochs=1", "data.eval=null"),
    )
    workers = [update.worker for update in read_updates(run / "updates.bin")]
    assert abs(workers.count(0) - workers.count(1)) <= 3


BREAKING = """
import os

import torch

calls = 0


def fail(*arguments):
    raise RuntimeError("broken on purpose")


def break_server(images, labels, keys):
    global calls
    calls += 1
    # The compensation of its server needs it.
    if os.environ["RANK"] == "1" and calls == 3:
        torch.sqrt = fail
    return images, labels
"""


@pytest.mark.check
def test_the_error_of_a_server_ends_the_run_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "breaking.py").write_text(BREAKING)
    said = finished(
        *("train", folder / "recipe.yaml", "--procs", "2", "--run", tmp_path / "run", "--no-respawn", "epochs=8"),
        *("parallel={strategy: async, servers: 2}", "transform=breaking.py:break_server", "evaluate.every_epochs=8"),
        "comm.on_rank_failure=restart",
    )
    assert said.status != 0
    assert "broken on purpose" in said.err, said.err


SPOIL = """
import os

calls = 0


def spoil(images, labels, keys):
    global calls
    calls += 1
    return images * (float(os.environ["SPOIL"]) if calls > 10 else 1), labels
"""


@pytest.mark.parametrize(
    ("factor", "options", "message"),
    [
        ("nan", (), "the loss is not finite at step"),
        pytest.param(
            "1e4",
            ("observe.on_divergence=stop", "model.factory=net.py:linear"),
            "The run (diverges|lost its progress)",
            marks=pytest.mark.check,
        ),
    ],
)
def test_all_ranks_stop_when_the_loss_blows_up(
    folder: Path, tmp_path: Path, factor: str, options: tuple[str, ...], message: str
) -> None:
    """At the next records, and not where they would have met: at the end of 750 steps."""
    (folder / "spoil.py").write_text(SPOIL)
    meetings = ("epochs=40", "evaluate.every_epochs=40", "checkpoint.every_epochs=40")
    said = finished(
        *("train", folder / "recipe.yaml", "--procs", "2", "--run", tmp_path / "run", *meetings),
        # However slow rank 0 is, which records, the other one is no more than a few steps ahead of it.
        *("parallel={strategy: async, ahead: 3}", "transform=spoil.py:spoil", *options),
        env={**os.environ, "SPOIL": factor},
    )
    assert said.status == 1
    assert re.search(message, said.err), said.err
    assert "Traceback" not in said.err
    assert count_updates(tmp_path / "run") < 100


DYING = """
import os
import signal
import time
from pathlib import Path

calls = 0


def die(images, labels, keys):
    global calls
    calls += 1
    once = Path(__file__).with_name("died")
    if os.environ.get("RANK") == "1" and calls == 8 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    # The run goes on until the new process has come.
    if os.environ["HEADWAY_MEMBER"].endswith(".0") and calls > 20 and not Path(__file__).with_name("joined").exists():
        time.sleep(0.1)
    return images, labels
"""


@pytest.mark.check
def test_a_new_process_joins_a_run_with_damaged_samples(tmp_path: Path) -> None:
    """The segment that it ends has no record of its own; the samples are exchanged all the same."""
    packed = packed_digits(tmp_path, per_class=60)
    damage(packed / "train", *range(0, 400, 50))
    (tmp_path / "net.py").write_text(NET.replace("DROPOUT", "0.0"))
    (tmp_path / "dying.py").write_text(DYING)
    write_recipe(
        tmp_path / "recipe.yaml", data={"max_bad_share": 0.1}, model={"factory": "net.py:build"}, batch=24, epochs=8,
        log_every_steps=7, log_ids=True,
    )  # fmt: skip
    run = tmp_path / "run"
    long = ("evaluate.every_epochs=8", "checkpoint.every_epochs=8")
    with running(
        *("train", tmp_path / "recipe.yaml", "--procs", "2", "--run", run, "--respawn", ASYNC, *long),
        "transform=dying.py:die",
    ) as process:
        # The new process has logged the samples of its first step.
        until(process, lambda: bool(list(run.glob("**/*0.1.1*"))))
        (tmp_path / "joined").touch()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    updates = read_updates(run / "updates.bin")
    assert sorted(update.step for update in updates) == list(range(len(updates)))
    rows = rows_of(run)
    assert (rows[:, 0] == np.arange(len(updates) * 24)).all()
    listed = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    replaced = rows[rows[:, 1] != rows[:, 2], 0]
    assert len(replaced) > 20
    # What the lost process had not told yet is missing.
    assert set(replaced) - {one["position"] for one in listed} <= set(replaced[: 24 * 20])


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "lars": (("optimizer={name: lars, lr: 1}",), "optimizer lars is for large batches"),
    "lamb": (("optimizer={name: lamb, lr: 0.01}",), "optimizer lamb is for large batches"),
    "muon": (("optimizer={name: muon, lr: 0.01}",), "optimizer muon is for large batches"),
    "dcasgd": (("optimizer={name: dcasgd, lr: 0.1}",), "parallel: {strategy: async, compensate: constant}"),
    "batch growth": (("batch_growth={milestones_epochs: [1], factor: 2}",), "does not work with batch_growth"),
    "batch per device": (("batch={per_device: 24}",), "write batch: 24"),
    "noise scale": (("observe.noise_scale=true",), "does not work with observe.noise_scale"),
    "layer rates": (("observe.layer_rates=true",), "does not work with observe.layer_rates"),
    "freezing": (("model.freeze_after=[{match: '^0', after_epochs: 1}]",), "does not work with model.freeze_after"),
    "16-bit wire": (("comm.wire=bf16",), "does not work with comm.wire: bf16"),
    "algorithm": (("comm.algorithm=ring",), "does not work with comm.algorithm: ring"),
    "rails": (("comm.rails=2",), "does not work with comm.rails"),
    "buckets": (("comm.bucket_mb=4",), "does not work with comm.bucket_mb"),
    "interfaces": (("comm.interface=[lo, eth0]",), "does not work with several interfaces in comm.interface"),
    "own optimizer": (
        ("parallel.servers=2", "optimizer={name: own, factory: 'net.py:build', lr: 1}"),
        "does not work with optimizer.factory with several servers",
    ),
    "synchronised batch norm": (("comm.batch_norm=sync",), "does not work with comm.batch_norm: sync"),
    "fp16": (("precision=fp16", "device=auto"), "fp16 scales the loss"),
    "16-bit weights": (("half_weights=true", "precision=bf16"), "does not work with half_weights"),
    "graphs": (("compile=graphs", "device=auto"), "does not work with compile: graphs"),
    "lookahead": (("optimizer.lookahead={}",), "does not work with optimizer.lookahead"),
    "callbacks": (("callbacks=[net.py:build]",), "does not work with callbacks"),
    "a strength of nothing": (("parallel.compensate=none", "parallel.strength=1"), "remove strength"),
    "a decay of nothing": (("parallel.compensate=constant", "parallel.decay=0.5"), "remove decay"),
    "more servers than processes": (("parallel.servers=2",), "2 servers need as many processes, and there is 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    assert message in refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", ASYNC, *options, status=2)


def test_other_runs_are_not_replayed(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=1")
    assert "only runs of parallel.strategy async" in refused("replay", tmp_path / "run", status=2)
