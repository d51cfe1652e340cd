"""headway.train and headway.resume from Python: what is shown, what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import headway as command
from tests._support import packed_digits, write_recipe
from torch import nn

import headway
from headway.core.errors import HeadwayError

WRONG = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


def test_a_recipe_file_gives_what_the_command_gives(folder: Path, tmp_path: Path) -> None:
    run = headway.train(folder / "recipe.yaml", {"epochs": 1, "optimizer.lr": 0.05}, run=tmp_path / "a")
    command("train", folder / "recipe.yaml", "epochs=1", "optimizer.lr=0.05", "--run", tmp_path / "b")
    assert (run.folder / "weights.safetensors").read_bytes() == (tmp_path / "b/weights.safetensors").read_bytes()
    assert run.metrics["accuracy"] == headway.Run(tmp_path / "b").metrics["accuracy"]


def test_a_library_is_silent_unless_asked(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    headway.train(folder / "recipe.yaml", run=tmp_path / "a")
    assert capfd.readouterr() == ("", "")
    headway.train(folder / "recipe.yaml", run=tmp_path / "b", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "accuracy" in err
    assert logging.getLogger("headway").handlers == []


def test_a_stopped_run_is_resumed(folder: Path, tmp_path: Path) -> None:
    whole = headway.train(folder / "recipe.yaml", run=tmp_path / "whole")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    given = headway.train(folder / "recipe.yaml", model=model, run=tmp_path / "given")
    assert given.summary["steps"] == whole.summary["steps"]
    assert headway.resume(given, model=model).finished


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda folder, out: headway.train(3, run=out),
            r"a recipe is a path or a mapping, not int\. Give",
        ),
        (lambda folder, out: headway.train({"data": "x"}, run=out), "model"),
        (
            lambda folder, out: headway.train({"data": object()}, run=out),
            "a recipe holds numbers, texts, lists and mappings",
        ),
        (lambda folder, out: headway.train(folder / "none.yaml", run=out), "the recipe cannot be read"),
        (lambda folder, out: headway.train(folder / "recipe.yaml", {"lrr": 1}, run=out), "lrr"),
        (
            lambda folder, out: headway.train(folder / "recipe.yaml", model=nn.Linear, run=out),
            r"a network is a torch.nn.Module, not type",
        ),
        (
            lambda folder, out: headway.train(
                folder / "recipe.yaml", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), run=out
            ),
            r"10",
        ),
        (lambda folder, out: headway.Run(out), "run folder"),
        (lambda folder, out: headway.resume(out), "run folder"),
    ],
)
def test_mistakes_are_sentences(folder: Path, tmp_path: Path, call: Any, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        call(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8), np.float32), r"not float32 \[8, 8\]\. Give pixels 0 to 255, channels last"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), r"not uint8 \[3, 8, 8\]"),
        (3.5, "a tensor, not float"),
        ("no-such-file.jpg", "there is no such file or folder"),
    ],
)
def test_what_is_no_image_is_refused(folder: Path, tmp_path: Path, image: Any, message: str) -> None:
    run = headway.train(folder / "recipe.yaml", {"epochs": 1}, run=tmp_path / "a")
    with pytest.raises(HeadwayError, match=message):
        run.predict(image)
