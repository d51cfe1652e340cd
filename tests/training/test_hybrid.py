"""Processes that share fully connected layers train as one does, go on where they stopped, with any number of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, packed_digits, records, refused, write_recipe
from tests.training._runs import cut_back, train, weights

NET = """
from torch import nn


def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 31), nn.ReLU(), nn.Dropout(0.0), nn.Linear(31, num_classes),
    )
"""
HYBRID = "parallel={strategy: hybrid, layers: ['^3$', '^6$']}"
TURNS = "parallel={strategy: hybrid, layers: ['^3$'], scheme: turns}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    packed_digits(folder, per_class=30)
    (folder / "net.py").write_text(NET)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        optimizer={"name": "adamw", "lr": 0.003},
        batch=29,
        epochs=2,
        log_every_steps=3,
        checkpoint={"every_steps": 4, "keep": 9},
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    return train(folder, "alone")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Path:
    return train(folder, "shared", "--procs", "2", HYBRID)


def assert_alike(one: Path, other: Path) -> None:
    for kind in ("train", "evaluate"):
        for left, right in zip(records(one, kind), records(other, kind), strict=True):
            assert right["loss"] == pytest.approx(left["loss"], rel=1e-3)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(other)[name], value, rtol=1e-3, atol=1e-4)


def test_two_processes_train_as_one_does(alone: Path, shared: Path) -> None:
    assert_alike(alone, shared)


@pytest.mark.check
def test_so_do_they_with_layer_wise_rates_and_a_norm_of_all_gradients(folder: Path) -> None:
    options = ("epochs=1", "optimizer={name: lamb, lr: 0.01, clip_norm: 0.5}")
    assert_alike(train(folder, "lamb-alone", *options), train(folder, "lamb-shared", "--procs", "2", HYBRID, *options))


@pytest.mark.check
@pytest.mark.parametrize(("procs", "parallel"), [("2", TURNS), ("3", HYBRID)])
def test_so_do_turns_and_more_processes(folder: Path, alone: Path, procs: str, parallel: str) -> None:
    assert_alike(alone, train(folder, f"more-{procs}", "--procs", procs, parallel))


@pytest.mark.check
def test_resumed_is_uninterrupted_bit_for_bit(shared: Path, tmp_path: Path) -> None:
    cut = cut_back(shared, tmp_path / "cut")
    said = finished("train", "--resume", cut, "--procs", "2")
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(shared).items())


@pytest.mark.parametrize("procs", [1, pytest.param(3, marks=pytest.mark.check)])
def test_any_number_of_processes_goes_on(shared: Path, tmp_path: Path, procs: int) -> None:
    cut = cut_back(shared, tmp_path / "cut")
    said = finished("train", "--resume", cut, *(("--procs", str(procs)) if procs > 1 else ()))
    assert said.status == 0, said.err
    assert_alike(shared, cut)
    said = finished("evaluate", cut)
    assert said.status == 0, said.err


def test_each_process_keeps_its_part_alone(shared: Path) -> None:
    """In the checkpoint, the divided layers lie in two files, and nothing of them in both."""
    (newest,) = (path for path in (shared / "checkpoints").glob("step-*") if path.name == "step-00000004")
    first, second = (load_file(newest / f"tensors-{rank}.safetensors") for rank in (0, 1))
    for name, rows in (("model/3.weight", 31), ("optimizer/3.weight/exp_avg", 31), ("ema/3.bias", 31)):
        assert len(first[name]) + len(second[name]) == rows


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no layer": (("parallel={strategy: hybrid, layers: []}",), "parallel.layers"),
    "another scheme": (("parallel={strategy: hybrid, layers: ['3'], scheme: b}",), "must be 'all' or 'turns'"),
    "an optimizer that needs whole weights": (
        (HYBRID, "optimizer={name: novograd, lr: 1}"),
        "parallel.strategy hybrid does not work with optimizer.name: novograd",
    ),
    "fp16": ((HYBRID, "precision=fp16"), "does not work with precision: fp16"),
    "micro-batches": ((HYBRID, "micro_batch=4"), "does not work with micro_batch"),
    "activations of a compiled network": (
        (HYBRID, "compile=true", "observe.activations=['.']"),
        "does not work with compile with observe.activations",
    ),
    "going on": ((HYBRID, "comm.on_rank_failure=continue"), "does not work with comm.on_rank_failure: continue"),
    "noise": ((HYBRID, "observe.noise_scale=true"), "does not work with observe.noise_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    options, said = REFUSED[name]
    assert said in refused("train", folder / "recipe.yaml", "--run", folder / "no", *options, status=2)


def test_layers_that_do_not_pay_are_not_chosen(folder: Path) -> None:
    """On one host the sums of this network's few gradients take less than the exchange of a divided layer."""
    said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "no", "parallel.strategy=hybrid")
    assert said.status == 2
    assert "it does not pay to divide fully connected layers here: by the measured links (" in said.err
    assert re.search(
        r"\([\d,]+ us and [\d,]+ MB/s between processes, forward and backward pass [\d.]+ ms\), a data", said.err
    )
    assert " ms for its exchange, and one with divided layers (" in said.err
    assert not (folder / "no").exists()


def test_one_process_leaves_the_choice_open(folder: Path) -> None:
    run = train(folder, "one", "epochs=1", "parallel.strategy=hybrid")
    assert "layers: auto" in (run / "recipe.yaml").read_text()


def test_a_layer_that_is_not_there_is_named(folder: Path) -> None:
    options = ("--procs", "2", "--run", folder / "no", "parallel={strategy: hybrid, layers: [fc6]}")
    said = finished("train", folder / "recipe.yaml", *options)
    assert said.status == 2
    assert "'fc6' matches no fully connected layer of this network. Its fully connected layers are 3, 6." in said.err
