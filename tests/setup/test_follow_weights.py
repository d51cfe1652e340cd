"""Images look to a fine-tuned network as they did when its weights were trained; the recipe's own values come first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests._support import headway, packed_digits, records, refused, write_recipe
from tests.model import _hubs

from headway.api.training import train as train_recipe
from headway.core.recipe import read_recipe
from headway.model import small_net
from headway.setup.recipe import TrainRecipe

NET = {"factory": "headway.model:small_net", "args": {"width": 4}}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose mean, std, size and centre crop are not what its images suggest."""
    folder = tmp_path_factory.mktemp("first")
    packed_digits(folder, per_class=12, split=0.25)
    more = {"size": 10, "crop": {"share": 0.8}}
    recipe = write_recipe(folder / "recipe.yaml", model=NET, augment={"mean": [50.0], "std": [60.0]}, data=more)
    headway("train", recipe, "--run", folder / "run")
    return folder


def train(first: Path, run: Path, *more: str) -> str:
    """Fine-tunes from the first run by a recipe that leaves everything open; returns what it said."""
    recipe = write_recipe(first / "fine.yaml", model=NET)
    return headway("train", recipe, "--run", run, "epochs=1", *more).err


def resolved(run: Path) -> dict[str, tuple[Any, str]]:
    """The values of a run's recipe that weights may set, and where they came from."""
    recipe = read_recipe(run / "recipe.yaml", (), TrainRecipe).recipe
    origins = json.loads((run / "provenance.json").read_text())["origins"]
    values = {
        "augment.mean": recipe.augment.mean,
        "augment.std": recipe.augment.std,
        "data.size": recipe.data.size,
        "data.channels": recipe.data.channels,
        "data.crop.share": recipe.data.crop.share,
    }
    return {key: (value, origins[key]) for key, value in values.items()}


def test_weights_of_a_run_bring_how_its_images_looked(first: Path, tmp_path: Path) -> None:
    weights = first / "run/weights.safetensors"
    said = train(first, tmp_path / "run", f"model.weights={weights}")
    expected = "augment.mean [50], augment.std [60], data.size [10, 10], data.channels 1, data.crop.share 0.8."
    assert f"Images as the weights were trained ({weights}): {expected}" in " ".join(said.split())
    found, why = resolved(tmp_path / "run"), f"auto: of the weights ({weights})"
    assert found == {
        "augment.mean": ((50.0,), why),
        "augment.std": ((60.0,), why),
        "data.size": ((10, 10), why),
        "data.channels": (1, why),
        "data.crop.share": (0.8, why),
    }
    # Evaluated and resumed without the first run's file.
    weights = weights.rename(first / "away")
    try:
        headway("evaluate", tmp_path / "run")
        headway("train", "--resume", tmp_path / "run")
    finally:
        weights.rename(first / "run/weights.safetensors")
    # The chain goes on: these weights carry the same.
    train(first, tmp_path / "third", f"model.weights={tmp_path / 'run/weights.safetensors'}")
    assert {key: value for key, (value, _) in resolved(tmp_path / "third").items()} == {
        key: value for key, (value, _) in found.items()
    }


def test_values_of_the_recipe_come_first(first: Path, tmp_path: Path) -> None:
    weights = f"model.weights={first / 'run/weights.safetensors'}"
    own = ("augment.mean=[100]", "augment.std=[70]", "data.size=8", "data.channels=1", "data.crop={share: 1.0}")
    said = train(first, tmp_path / "all", weights, *own)
    assert "Images as the weights" not in said
    assert {value for _, value in resolved(tmp_path / "all").values()} == {"command line"}
    said = train(first, tmp_path / "some", weights, "augment.mean=[100]", "data.crop=random")
    found = resolved(tmp_path / "some")
    assert (found["augment.mean"][0], found["augment.std"][0]) == ((100.0,), (60.0,))
    assert found["data.crop.share"][0] == 0.8


def test_weights_that_do_not_tell_are_said(first: Path, tmp_path: Path) -> None:
    """From a `.pth` with a prefix, as from a `.safetensors`: the same network, whose normalisation is measured."""
    state = load_file(first / "run/weights.safetensors")
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "w.pth")
    said = train(first, tmp_path / "run", f"model.weights={tmp_path / 'w.pth'}")
    text = " ".join(said.split())
    assert "w.pth: the weights in 'model' are used." in text
    assert "w.pth does not tell its normalisation, so it is measured on your images." in text
    assert "(ImageNet's usual: mean [123.675, 116.28, 103.53], std [58.395, 57.12, 57.375])" in text
    assert resolved(tmp_path / "run")["augment.mean"][1].endswith("training images")
    said = train(first, tmp_path / "own", f"model.weights={tmp_path / 'w.pth'}", "augment={mean: [50], std: [60]}")
    assert "does not tell" not in said


def test_a_wrong_file_ends_before_the_run(first: Path, tmp_path: Path) -> None:
    recipe = write_recipe(first / "fine.yaml", model=NET)
    torch.save({"3.weight": torch.ones(1)}, tmp_path / "w.pth")
    sentence = refused("train", recipe, f"model.weights={tmp_path / 'w.pth'}", "--run", tmp_path / "run", status=2)
    assert "no name is the same: the file has '3.weight'; the network has 'layer1.conv.weight'" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("factory", "args", "mean"),
    [
        ("timm:create_model", {"model_name": "tiny", "pretrained": True}, (127.5,) * 3),
        ("torchvision.models:tiny", {"weights": "IMAGENET1K_V1"}, (123.675, 116.28, 103.53)),
    ],
)
def test_a_factory_that_brings_weights(
    factory: str, args: dict[str, Any], mean: Any, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, evaluated and resumed with stand-ins of timm and torchvision. Gray images get three channels."""
    _hubs.write_packages(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    try:
        recipe = write_recipe(first / "fine.yaml", model={"factory": factory, "args": args})
        said = headway("train", recipe, "--run", tmp_path / "run", "epochs=1", "optimizer.layer_decay=0.5").err
        library = factory.partition(":")[0].partition(".")[0]
        assert f"Images as the weights were trained ({library}'s " in " ".join(said.split())
        found = resolved(tmp_path / "run")
        assert (found["augment.mean"][0], found["data.size"][0], found["data.channels"][0]) == (mean, (24, 24), 3)
        assert found["data.crop.share"][0] == 0.75
        assert "Layer-wise learning rates: 2 layers, from 0.5 to 1 times optimizer.lr." in " ".join(said.split())
        headway("evaluate", tmp_path / "run")
        headway("train", "--resume", tmp_path / "run")
        assert len(sys.modules[f"{library}.models"].FETCHED) == 1
        assert records(tmp_path / "run", "evaluate")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]


def test_synthetic_images_are_normalised_too(first: Path, tmp_path: Path) -> None:
    more = ("data={train: synthetic, synthetic: {samples: 60, channels: 1, size: [8, 8]}}", "epochs=1")
    weights = f"model.weights={first / 'run/weights.safetensors'}"
    headway("train", write_recipe(first / "fine.yaml", model=NET), "--run", tmp_path / "run", weights, *more)
    assert read_recipe(tmp_path / "run/recipe.yaml", (), TrainRecipe).recipe.augment.mean == (50.0,)


def test_a_network_that_a_program_gives(first: Path, tmp_path: Path) -> None:
    """timm's networks tell of themselves how they were trained; their size is not taken."""
    model = small_net(10, in_channels=3)
    model.pretrained_cfg = {"mean": [0.5] * 3, "std": [0.25] * 3, "input_size": [3, 224, 224]}  # type: ignore[assignment]
    recipe = write_recipe(first / "fine.yaml", model=None, epochs=1)
    train_recipe(recipe, model=model, run=tmp_path / "run")
    found = resolved(tmp_path / "run")
    assert found["augment.mean"] == ((127.5,) * 3, "auto: of the weights (the network's pretrained_cfg)")
    assert (found["data.size"][0], found["data.channels"][0]) == ((8, 8), 3)
