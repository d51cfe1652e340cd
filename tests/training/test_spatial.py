"""Processes that share each image train as one does, go on where they stopped, and refuse what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests._support import finished, headway, packed_digits, records, refused, write_recipe
from tests.training._runs import cut_back, weights
from tests.training.test_ranks import rows_of

from headway.page.panel import Panel

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


def train(folder: Path, name: str, procs: int, *options: str) -> Path:
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", folder / name, *options)
    assert said.status == 0, said.err
    return folder / name


def expect_exchanges(run: Path) -> None:
    """Each record says how long it waited for what, and so do summary and report."""
    told = [*records(run, "train"), json.loads((run / "summary.json").read_text())]
    for one in told:
        assert one["exchange"].keys() == {"halos", "samples of a place", "statistics"}
        assert one["exchange_share"] == pytest.approx(sum(one["exchange"].values()))
        assert 0 < one["exchange_share"] < 1
    headway("report", run)
    cards, waits, stages, ranks = (
        Panel.from_json((run / f"panels/{name}.json").read_text()).data
        for name in ("result", "curve-wait", "stage-table", "ranks")
    )
    shown = {card["label"]: card["value"] for card in cards["cards"]}
    assert shown["waiting for other processes"] == f"{told[-1]['exchange_share']:.1%}"
    assert waits["series"][1]["y"] == pytest.approx([100 * one["exchange_share"] for one in told[:-1]])
    assert {row[0] for row in stages["rows"]} >= told[-1]["exchange"].keys()
    assert "exchange" in {stack["name"] for stack in ranks["stacks"]}
    assert "curve-exchange_share" not in {path.stem for path in (run / "panels").iterdir()}


@pytest.mark.parametrize(
    ("procs", "parallel"),
    [
        (2, SPATIAL),
        # Layer 3 halves the four rows of a process.
        pytest.param(2, "parallel={strategy: spatial, ranks: 2, until: auto}", marks=pytest.mark.check),
        pytest.param(2, "parallel={strategy: spatial, ranks: 2, grid: [1, 2]}", marks=pytest.mark.check),
        pytest.param(4, "parallel={strategy: spatial, ranks: 4, grid: [2, 2]}", marks=pytest.mark.check),
        pytest.param(3, "parallel={strategy: spatial, ranks: 3}", marks=pytest.mark.check),
    ],
)
def test_one_place_trains_as_one_process_does(folder: Path, alone: Path, procs: int, parallel: str) -> None:
    """Batch norm has the statistics of all samples; each position is served once, to one rank."""
    run = train(folder, f"run-{procs}-{len(parallel)}", procs, parallel)
    assert (rows_of(run) == rows_of(alone)).all()
    if parallel == SPATIAL:
        expect_exchanges(run)
    chosen = yaml.safe_load((run / "recipe.yaml").read_text())["parallel"]["until"]
    assert chosen == ("3" if "auto" in parallel else None)
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
    cut = cut_back(whole, tmp_path / "cut")
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
    "another strategy": (
        ("parallel={strategy: rows}",),
        "not 'rows'. Did you mean 'towers'?",
    ),
    "ranks of data": (("parallel={strategy: data, ranks: 2}",), "'parallel.ranks'"),
    "compiled": ((SPATIAL, "compile=true"), "parallel.strategy spatial does not work with compile"),
    "micro-batches": ((SPATIAL, "micro_batch=4"), "does not work with micro_batch"),
    "activations": ((SPATIAL, "observe.activations=['.']"), "does not work with observe.activations"),
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


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((SPATIAL, "model.factory=net.py:unknown"), "Unknown: Tensor.cumsum has no rule for images that are split"),
        (("parallel={strategy: spatial, until: fc}",), "parallel.until: 'fc' is no layer of the network"),
    ],
)
def test_a_network_that_cannot_be_split_is_refused(folder: Path, options: tuple[str, ...], what: str) -> None:
    """Before the first step: the network is tried on shapes."""
    said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "unknown", *options)
    assert said.status == 2, said.err
    assert what in said.err
    assert "Traceback" not in said.err
    assert not (folder / "unknown").exists()


@pytest.mark.check
def test_each_rank_decodes_its_own_samples(folder: Path, alone: Path) -> None:
    """Not those of the place: half of the work each."""
    run = folder / f"run-2-{len(SPATIAL)}"
    if not run.exists():
        run = train(folder, "shares", 2, SPATIAL)
    counts = [len(np.frombuffer(path.read_bytes(), "<i8")) for path in run.glob("ids*.bin")]
    assert len(counts) == 2
    assert max(counts) - min(counts) <= max(counts) // 10
