"""Averages of weights are run folders: they predict, are evaluated and drawn, and do not go on."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tests._support import headway, packed_digits, refused, write_recipe
from tests.training._runs import weights

from headway.api.run import Run
from headway.checkpoint.checkpoints import Checkpoints, read
from headway.data import opening


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with batch norm and all its checkpoints, and two that go on from its weights with other seeds."""
    folder = tmp_path_factory.mktemp("soup")
    packed_digits(folder)
    recipe = write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, checkpoint={"keep": 4})
    headway("train", recipe, "--run", folder / "begun", "epochs=3")
    start = f"model.weights={folder / 'begun/weights.safetensors'}"
    for seed in (1, 2, 3):
        headway("train", recipe, "--run", folder / f"r{seed}", f"seed={seed}", start, "epochs=1")
    return folder


def make(*arguments: str | Path) -> Any:
    return headway("ensemble", *arguments, "--json").json()


def test_the_mean_of_a_run_and_its_copy_is_the_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "r1", tmp_path / "copy")
    found = make(folder / "r1", tmp_path / "copy", "--soup", "uniform", "--out", tmp_path / "soup")
    mine, saved = weights(tmp_path / "soup"), weights(folder / "r1")
    assert mine.keys() == saved.keys()
    assert all(mine[name].equal(saved[name]) for name in saved)
    assert not found["soup"]["recomputed"]


def test_stochastic_weight_averaging(folder: Path, tmp_path: Path) -> None:
    found = make(folder / "begun", "--snapshots", "--soup", "uniform", "--out", tmp_path / "swa")
    states = [read(path).tensors for path in Checkpoints(folder / "begun/checkpoints").paths()]
    mine = weights(tmp_path / "swa")
    names = [name for name in mine if name.endswith(("weight", "bias"))]
    for name in names:
        wanted = sum(state[f"model/{name}"].double() for state in states) / len(states)
        assert mine[name].equal(wanted.float())
    # The statistics of its own activations, over the training set.
    assert found["soup"]["recomputed"]
    with closing(opening.open(folder / "digits.packed/train")) as train:
        files = [folder / "digits" / train.name(place) for place in range(len(train))]
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])[..., None])
    run = Run(tmp_path / "swa")
    with torch.no_grad():
        mean = run.load_model().get_submodule("0")(run.normalise(pixels)).mean((0, 2, 3))
    torch.testing.assert_close(mine["1.running_mean"], mean, atol=1e-5, rtol=1e-5)
    alone = headway("evaluate", tmp_path / "swa", "--json").json()
    assert alone["loss"] == pytest.approx(found["soup"]["metrics"]["loss"], rel=1e-5)
    assert found["soup"]["metrics"]["accuracy"] > 0.5
    about = json.loads((tmp_path / "swa/provenance.json").read_text())
    assert [parent["step"] for parent in about["parents"]] == [6, 12, 18]
    assert "mean of the weights of 3 networks" in repr(Run(tmp_path / "swa"))
    assert headway("predict", tmp_path / "swa", folder / "digits/3/000.png").out.count("\n") == 2
    headway("report", tmp_path / "swa")
    assert "not trained here" in (tmp_path / "swa/report.html").read_text()
    for options in ((), ("epochs=9",), ("--procs", "2")):
        assert "these weights are an average and were not trained here. Start a run from them" in refused(
            "train", "--resume", tmp_path / "swa", *options, status=2
        )
    # The same again has the same bits, statistics included.
    make(folder / "begun", "--snapshots", "--soup", "uniform", "--out", tmp_path / "again")
    assert (tmp_path / "again/weights.safetensors").read_bytes() == (tmp_path / "swa/weights.safetensors").read_bytes()


def test_a_greedy_soup_is_at_least_as_good_as_its_best_member(folder: Path) -> None:
    runs = [folder / name for name in ("r1", "r2", "r3", "begun")]
    said = headway("ensemble", *runs, "--soup", "greedy")
    assert "chose the members of this mean, so its figures there are biased upwards" in said.out
    found = make(*runs, "--soup", "greedy")
    accuracies = {one["name"]: one["metrics"]["accuracy"] for one in found["members"]}
    chosen = found["soup"]["members"]
    assert found["soup"]["metrics"]["accuracy"] >= max(accuracies.values())
    assert accuracies[chosen[0]] == max(accuracies.values())
    # Tried from the best one to the worst one.
    assert [accuracies[name] for name in chosen] == sorted((accuracies[name] for name in chosen), reverse=True)


@pytest.mark.parametrize("primary", ["f1", "loss"])
def test_a_greedy_soup_by_another_metric(folder: Path, tmp_path: Path, primary: str) -> None:
    """A metric of a whole set, or one that is better when lower."""
    runs = [tmp_path / name for name in ("r1", "r2", "r3")]
    for run in runs:
        shutil.copytree(folder / run.name, run)
        tree = yaml.safe_load((run / "recipe.yaml").read_text())
        tree["task"] |= {"metrics": ["f1"], "primary": primary}
        (run / "recipe.yaml").write_text(yaml.safe_dump(tree))
    found = make(*runs, "--soup", "greedy")
    alone = [headway("evaluate", run, "--json").json()[primary] for run in runs]
    value, first = found["soup"]["metrics"][primary], found["soup"]["members"][0]
    best = min(alone) if primary == "loss" else max(alone)
    assert alone[[str(run) for run in runs].index(first)] == best
    assert value <= best + 1e-6 if primary == "loss" else value >= best


def test_what_cannot_be_averaged(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "other", "model.factory=net.py:linear", "epochs=1")
    options = ("--soup", "uniform", "--out", tmp_path / "soup")
    assert "weights of different networks cannot be averaged" in refused(
        "ensemble", folder / "r1", tmp_path / "other", *options, status=2
    )
    assert "there is no soup 'thick'. Set it to uniform or greedy" in refused(
        "ensemble", folder / "r1", folder / "r2", "--soup", "thick", status=2
    )
    assert "this run has 1 checkpoint, and an ensemble needs two or more. Keep more of them" in refused(
        "ensemble", tmp_path / "other", "--snapshots", status=2
    )
    assert not (tmp_path / "soup").exists()
