"""Processes that share each image train as one does, go on where they stopped, and refuse what they cannot do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, packed_digits, records, refused, write_recipe
from tests.training.test_ranks import rows_of

NET = """
from torch import nn


def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.GELU(), nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(12, num_classes),
    )


def unknown(num_classes):
    return Unknown(num_classes)


class Unknown(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, num_classes)

    def forward(self, x):
        return self.head(self.body(x).cumsum(2).flatten(1))
"""
SPATIAL = "parallel={strategy: spatial, ranks: 2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spatial")
    packed_digits(folder, per_class=60)
    (folder / "net.py").write_text(NET)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build"},
        augment={"translate": 1},
        optimizer={"name": "nag", "lr": 0.05},
        batch=47,
        epochs=2,
        log_every_steps=3,
        log_ids=True,
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    said = finished("train", folder / "recipe.yaml", "--run", folder / "alone")
    assert said.status == 0, said.err
    return folder / "alone"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "weights.safetensors")


def train(folder: Path, name: str, procs: int, *options: str) -> Path:
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", folder / name, *options)
    assert said.status == 0, said.err
    return folder / name


@pytest.mark.parametrize(
    ("procs", "parallel"),
    [
        (2, SPATIAL),
        pytest.param(2, "parallel={strategy: spatial, ranks: 2, grid: [1, 2]}", marks=pytest.mark.check),
        pytest.param(4, "parallel={strategy: spatial, ranks: 4, grid: [2, 2]}", marks=pytest.mark.check),
        pytest.param(3, "parallel={strategy: spatial, ranks: 3}", marks=pytest.mark.check),
    ],
)
def test_one_place_trains_as_one_process_does(folder: Path, alone: Path, procs: int, parallel: str) -> None:
    """Batch norm has the statistics of all samples; each position is served once, to one rank."""
    run = train(folder, f"run-{procs}-{len(parallel)}", procs, parallel)
    assert (rows_of(run) == rows_of(alone)).all()
    for kind in ("train", "evaluate"):
        for one, several in zip(records(alone, kind), records(run, kind), strict=True):
            assert several["loss"] == pytest.approx(one["loss"], rel=1e-3)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.check
def test_a_batch_of_fewer_images_than_processes_is_trained(folder: Path) -> None:
    """Of one image at a time: one rank has it, the other has half of its rows."""
    short = ("batch=1", "epochs=0.05", "optimizer.lr=0.001", "data.eval=null", "log_every_steps=1")
    said = finished("train", folder / "recipe.yaml", "--run", folder / "one", *short)
    assert said.status == 0, said.err
    run = train(folder, "one-shared", 2, SPATIAL, *short)
    pairs = list(zip(records(folder / "one", "train"), records(run, "train"), strict=True))
    assert len(pairs) > 10
    for one, shared in pairs:
        assert shared["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert "accuracy" not in shared or shared["accuracy"] == one["accuracy"]


@pytest.mark.check
def test_two_places_of_two_are_data_parallel_between_them(folder: Path) -> None:
    """Without batch norm over samples of others there is no difference to two processes; here it is per place."""
    places = train(folder, "places", 4, SPATIAL)
    two = train(folder, "two", 2)
    for name, value in weights(two).items():
        torch.testing.assert_close(weights(places)[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.check
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_is_uninterrupted_bit_for_bit(folder: Path, tmp_path: Path, precision: str) -> None:
    options = (SPATIAL, f"precision={precision}", "checkpoint={every_steps: 4, keep: 9}")
    whole = train(folder, f"whole-{precision}", 2, *options)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for step in sorted((cut / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(step)
    (cut / "checkpoints/latest").write_text("step-00000004\n")
    said = finished("train", "--resume", cut, "--procs", "2")
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(whole).items())
    # The checkpoint is one like any other: a process alone evaluates it.
    said = finished("evaluate", cut)
    assert said.status == 0, said.err


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "one process": ((SPATIAL,), "2 processes share each image, and there is 1. Start a multiple of 2"),
    "another grid": (
        ("parallel={strategy: spatial, ranks: 2, grid: [2, 2]}",),
        "a grid of 2 x 2 is one of 4",
    ),
    "one rank": (("parallel={strategy: spatial, ranks: 1}",), "parallel.ranks must be at least 2, not 1"),
    "another strategy": (("parallel={strategy: rows}",), "must be 'data' or 'spatial', not 'rows'"),
    "ranks of data": (("parallel={strategy: data, ranks: 2}",), "'parallel.ranks'"),
    "compiled": ((SPATIAL, "compile=true"), "parallel.strategy spatial does not work with compile"),
    "micro-batches": ((SPATIAL, "micro_batch=4"), "does not work with micro_batch"),
    "going on": ((SPATIAL, "comm.on_rank_failure=continue"), "does not work with comm.on_rank_failure: continue"),
    "synchronised": ((SPATIAL, "comm.batch_norm=sync"), "does not work with comm.batch_norm: sync"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    options, said = REFUSED[name]
    assert said in refused("train", folder / "recipe.yaml", "--run", folder / "no", *options, status=2)


def test_three_processes_are_no_places_of_two(folder: Path) -> None:
    said = finished("train", folder / "recipe.yaml", "--procs", "3", "--run", folder / "no", SPATIAL)
    assert said.status == 2
    assert "2 processes share each image, and there are 3. Start a multiple of 2" in said.err


def test_a_function_without_a_rule_ends_the_run_with_its_layer(folder: Path) -> None:
    said = finished(
        "train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "unknown", SPATIAL,
        "model.factory=net.py:unknown",
    )  # fmt: skip
    assert said.status != 0
    assert "Tensor.cumsum has no rule for images that are split over ranks" in said.err
    assert "Traceback" not in said.err


def test_each_rank_decodes_its_own_samples(folder: Path, alone: Path) -> None:
    """Not those of the place: half of the work each."""
    run = folder / f"run-2-{len(SPATIAL)}"
    if not run.exists():
        run = train(folder, "shares", 2, SPATIAL)
    counts = [len(np.frombuffer(path.read_bytes(), "<i8")) for path in run.glob("ids*.bin")]
    assert len(counts) == 2
    assert max(counts) - min(counts) <= max(counts) // 10
