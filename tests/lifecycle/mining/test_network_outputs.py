"""Outputs of networks: the probabilities of `headway predict`, and features from which the last layer makes them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests._support import damage, headway, packed_digits, write_recipe
from torch import nn

from headway.core.errors import UsageError
from headway.data import opening
from headway.lifecycle.mining.network_outputs import _capture_features, compute_outputs, load_networks
from headway.lifecycle.mining.scores import compute_entropy

MEMBERS = {"a": (), "b": ("seed=5", "model.factory=net.py:wide"), "c": ("evaluate.flip=true",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    packed_digits(folder)
    recipe = write_recipe(folder / "recipe.yaml", model={"factory": "net.py:wide"})
    for name, options in MEMBERS.items():
        headway("train", recipe, "--run", folder / name, *options)
    headway("ensemble", folder / "a", folder / "b", "--out", folder / "two")
    return folder


@pytest.mark.check
def test_probabilities_are_those_of_predict(folder: Path) -> None:
    """Of a run with views, too; and an ensemble counts as its members."""
    files = [folder / "digits" / str(label) / "000.png" for label in range(10)]
    with load_networks([folder / "two", folder / "c"]) as setup, closing(opening.open(folder / "digits")) as pool:
        assert len(setup.members) == 3
        found = compute_outputs(setup, pool)
        names = [pool.name(sample) for sample in range(len(pool))]
        classes = setup.target.classes
    assert found.samples.tolist() == list(range(240))
    assert found.features is None
    members = []
    for name in MEMBERS:
        lines = headway("predict", folder / name, *files, "--top", "10", "--json").out.splitlines()
        rows = [json.loads(line) for line in lines]
        endings = ["", *(f"_{number}" for number in range(2, 11))]
        tables = [{row[f"label{end}"]: row[f"probability{end}"] for end in endings} for row in rows]
        members.append([[table[one] for one in classes] for table in tables])
    places = [names.index(f"{label}/000.png") for label in range(10)]
    assert found.probabilities[places] == pytest.approx(np.mean(members, axis=0), abs=2e-6)
    entropies = compute_entropy(np.array(members)).mean(axis=0)
    assert found.mean_entropy[places] == pytest.approx(entropies, abs=1e-4)


def test_the_last_layer_makes_the_outputs_of_the_features(folder: Path) -> None:
    with load_networks([folder / "a"]) as setup, closing(opening.open(folder / "digits.packed/eval")) as dataset:
        seen: list[tuple[int, int]] = []
        found = compute_outputs(
            setup, dataset, with_features=True, progress=lambda done, total: seen.append((done, total))
        )
        head = setup.model[-1]
        assert found.features is not None
        assert found.features.shape == (60, 600)
        with torch.no_grad():
            made = head(torch.from_numpy(found.features)).softmax(dim=1).numpy()
        assert not head._forward_pre_hooks
    assert found.probabilities == pytest.approx(made, abs=1e-5)
    assert seen[-1] == (60, 60)


def test_damaged_images_are_left_out(folder: Path, tmp_path: Path) -> None:
    headway("pack", folder / "digits", tmp_path / "pack", "--mode", "keep")
    damage(tmp_path / "pack", 7, 8)
    with load_networks([folder / "a"]) as setup, closing(opening.open(tmp_path / "pack")) as dataset:
        found = compute_outputs(setup, dataset)
    assert found.damaged == 2
    assert found.samples.tolist() == [sample for sample in range(240) if sample not in (7, 8)]


def test_features_of_other_last_layers() -> None:
    images = torch.rand(2, 3, 4, 5)
    convolution = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 7, 1))
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(20, 6))
    with _capture_features(convolution) as captured, torch.no_grad():
        convolution(images)
    assert captured[0].shape == (2, 3)
    assert torch.allclose(captured[0], images.mean(dim=(2, 3)))
    with _capture_features(tokens) as captured, torch.no_grad():
        tokens(images)
    assert captured[0].shape == (2, 20)
    with (
        pytest.raises(UsageError, match="last layer '1' is a BatchNorm1d"),
        _capture_features(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    ):
        pass


def test_runs_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a trained network"), load_networks([]):
        pass
    with pytest.raises(UsageError, match="named twice"), load_networks([folder / "a", folder / "a"]):
        pass
    with pytest.raises(UsageError, match="no such run folder"), load_networks([tmp_path / "none"]):
        pass
