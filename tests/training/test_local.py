"""Processes that make steps alone and average their weights: they go on where they stopped, and after a loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, headway, packed_digits, records, refused, write_recipe
from tests.training._runs import cut_back, weights
from tests.training.test_ranks import rows_of

NET = """
from torch import nn


def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, num_classes),
    )


class Double(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, num_classes)).double()

    def forward(self, images):
        return self.layers(images.double())


def double(num_classes):
    return Double(num_classes)
"""
LOCAL = "parallel={strategy: local, every_steps: 3}"
DILOCO = "parallel={strategy: local, every_steps: 3, outer: {lr: 0.7, momentum: 0.9}}"
BATCH = 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    packed_digits(folder, per_class=60)
    (folder / "net.py").write_text(NET)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        optimizer={"name": "adamw", "lr": 0.003},
        batch=BATCH,
        epochs=2,
        log_every_steps=3,
        log_ids=True,
        checkpoint={"every_steps": 8, "keep": 9},
    )
    return folder


def train(folder: Path, run: Path, *options: str, procs: int = 2) -> Path:
    number = ("--procs", str(procs)) if procs > 1 else ()
    said = finished("train", folder / "recipe.yaml", *number, "--run", run, *options)
    assert said.status == 0, said.err
    return run


@pytest.fixture(scope="module")
def diloco(folder: Path) -> Path:
    return train(folder, folder / "diloco", DILOCO)


def saved_tensors(run: Path, step: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, of each of its files."""
    return [load_file(path) for path in sorted((run / "checkpoints" / f"step-{step:08}").glob("tensors-*.safetensors"))]


SGD = ("model={factory: 'net.py:double'}", "optimizer={name: sgd, lr: 0.05}", "batch=32")


@pytest.mark.check
def test_rounds_of_one_step_are_data_parallel(folder: Path, tmp_path: Path) -> None:
    """Weights in fp64; shares of 16 samples, by which the loss in fp32 is divided exactly."""
    data = train(folder, tmp_path / "data", *SGD)
    outer = "parallel={strategy: local, every_steps: 1, from_epoch: 0, outer: {lr: 1, momentum: 0}}"
    local = train(folder, tmp_path / "local", *SGD, outer)
    for name, value in weights(data).items():
        torch.testing.assert_close(weights(local)[name], value, rtol=1e-12, atol=1e-12)
    for kind in ("train", "evaluate"):
        for one, other in zip(records(data, kind), records(local, kind), strict=True):
            assert other["step"] == one["step"]
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_one_process_trains_as_without(folder: Path, tmp_path: Path) -> None:
    every = ("evaluate.every_epochs=2", "checkpoint.every_steps=12", "model.ema=null")
    plain = train(folder, tmp_path / "plain", *every, procs=1)
    local = train(folder, tmp_path / "local", *every, LOCAL, "parallel.from_epoch=0", procs=1)
    assert all(torch.equal(value, weights(local)[name]) for name, value in weights(plain).items())
    assert [record["loss"] for record in records(local, "train")] == [r["loss"] for r in records(plain, "train")]


@pytest.mark.check
def test_a_checkpoint_has_the_common_weights_and_each_rank_s_own_state(diloco: Path) -> None:
    """Step 8 falls into the round that ends with step 9."""
    first, second = saved_tensors(diloco, 9)
    together = {**first, **second}
    assert {name for name in together if name.startswith("outer/")} >= {"outer/0.weight", "outer/6.bias"}
    assert "model/0.weight" in together
    name = "ranks/optimizer/0.weight/exp_avg"
    assert first[name].shape == second[name].shape == (1, 8, 1, 3, 3)
    assert not torch.equal(first[name], second[name])


@pytest.mark.check
def test_resumed_is_uninterrupted_bit_for_bit(diloco: Path, tmp_path: Path) -> None:
    cut = cut_back(diloco, tmp_path / "cut", 9)
    said = finished("train", "--resume", cut, "--procs", "2")
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(diloco).items())
    last = max(record["step"] for record in records(diloco, "train"))
    for one, other in zip(saved_tensors(diloco, last), saved_tensors(cut, last), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("procs", [1, pytest.param(3, marks=pytest.mark.check)])
def test_any_number_of_processes_goes_on(diloco: Path, tmp_path: Path, procs: int) -> None:
    cut = cut_back(diloco, tmp_path / "cut", 9)
    said = finished("train", "--resume", cut, *(("--procs", str(procs)) if procs > 1 else ()))
    assert said.status == 0, said.err
    assert (rows_of(cut)[:, 0] == np.arange(len(rows_of(diloco)))).all()
    assert records(cut, "evaluate")[-1]["loss"] == pytest.approx(records(diloco, "evaluate")[-1]["loss"], rel=0.2)


def test_records_tell_how_far_the_ranks_were_apart(diloco: Path, tmp_path: Path) -> None:
    """Records come at the ends of rounds, and each position was served once."""
    train_records = records(diloco, "train")
    assert all(record["ranks_apart"] > 0 for record in train_records)
    last = train_records[-1]["step"]
    assert [record["step"] for record in train_records][:3] == [3, 6, 9]
    assert (rows_of(diloco)[:, 0] == np.arange(last * BATCH)).all()
    headway("report", diloco)
    assert "Distance of the ranks" in (diloco / "report.html").read_text()


@pytest.mark.check
def test_post_local_is_data_parallel_before(folder: Path, tmp_path: Path) -> None:
    """By default the rounds begin at half of the run."""
    run = train(folder, tmp_path / "run", LOCAL, "log_every_steps=1")
    data = train(folder, tmp_path / "data", "log_every_steps=1")
    apart = {record["step"]: "ranks_apart" in record for record in records(run, "train")}
    steps = max(apart)
    first = min(step for step, is_known in apart.items() if is_known) - 3
    assert abs(first - steps / 2) <= 1
    for one, other in zip(records(run, "train")[:first], records(data, "train"), strict=False):
        assert one["loss"] == other["loss"]


@pytest.mark.check
def test_16_bit_weights_are_averaged_in_fp32(folder: Path, tmp_path: Path) -> None:
    run = train(folder, tmp_path / "run", DILOCO, "half_weights=true", "precision=bf16", "model.ema=null")
    assert all(value.dtype == torch.float32 for value in weights(run).values() if value.is_floating_point())
    assert records(run, "train")[-1]["loss"] < records(run, "train")[0]["loss"]


DYING = """
import os
import signal
from pathlib import Path

calls = 0


def die(images, labels, keys):
    global calls
    calls += 1
    once = Path(__file__).with_name(os.environ["DIES_ONCE"])
    # The second step of the third round.
    if os.environ["RANK"] == os.environ["DIES"] and calls == 8 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return images, labels
"""


@pytest.mark.parametrize(
    ("rank", "more"),
    # The last has a new process that takes its place at a meeting.
    [(1, "--no-respawn"), (0, "--no-respawn"), (1, "--respawn")],
)
@pytest.mark.check
def test_the_others_go_on_after_a_loss(folder: Path, tmp_path: Path, rank: int, more: str) -> None:
    """What the lost rank has trained since the last meeting is lost; all else is served once."""
    (folder / "dying.py").write_text(DYING)
    run = tmp_path / "run"
    said = finished(
        *("train", folder / "recipe.yaml", "--procs", "3", "--run", run, more, DILOCO, "epochs=4"),
        *("comm.timeout_s=2", "transform=dying.py:die"),
        env={**os.environ, "DIES": str(rank), "DIES_ONCE": f"died{rank}{more}"},
    )
    assert said.status == 0, said.err
    last = records(run, "train")[-1]["step"]
    positions = rows_of(run)[:, 0]
    assert len(set(positions)) == len(positions)
    missing = set(range(last * BATCH)) - set(positions.tolist())
    # The lost rank's part of the round of three steps: the others end it, and none of them takes over.
    part = range(rank * BATCH // 3, (rank + 1) * BATCH // 3)
    assert missing == {step * BATCH + place for step in (6, 7, 8) for place in part}
    assert records(run, "evaluate")[-1]["loss"] < records(run, "evaluate")[0]["loss"]


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "long rounds": (
        ("parallel.every_steps=5",),
        "parallel.every_steps: 5 steps of 28 samples are more than a quarter of an epoch (450 samples). Set it to at"
        " most 4.",
    ),
    "no rounds": (("parallel.from_epoch=2",), "parallel.from_epoch has 2, and the run ends at epoch 2"),
    "noise scale": (("observe.noise_scale=true",), "does not work with observe.noise_scale"),
    "batch growth": (("batch_growth={milestones_epochs: [1], factor: 2}",), "does not work with batch_growth"),
    "synchronised batch norm": (("comm.batch_norm=sync",), "does not work with comm.batch_norm: sync"),
    "fp16": (("precision=fp16", "device=auto"), "does not work with precision: fp16"),
    "own optimizer": (
        ("optimizer={name: own, factory: 'net.py:build', lr: 1}",),
        "does not work with optimizer.factory",
    ),
    "lookahead": (("model.ema=null", "optimizer.lookahead={}"), "does not work with optimizer.lookahead"),
    "a sparse average": (("model.ema.every_steps=2",), "does not work with model.ema.every_steps"),
    "no steps": (("parallel.every_steps=0",), "parallel.every_steps"),
    "an outer momentum of 1": (("parallel.outer={momentum: 1}",), "parallel.outer.momentum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    said = refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", LOCAL, *options, status=2)
    assert message in " ".join(said.split())
