"""`headway init`: what it proposes loads, and trains."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tests._support import digits, files, headway, records, refused
from tests.model import _hubs

from headway.core.recipe import read_recipe
from headway.setup.propose import SourceFindings, format_recipe, inspect_source
from headway.setup.recipe import TrainRecipe

QUICK = ("batch=8", "epochs=0.01", "schedule={name: constant}", "device=cpu", "evaluate={every_epochs: 9, batch: 8}")


def trains(recipe: Path, run: Path) -> None:
    """One step of the proposal as it stands, with a small batch."""
    headway("train", recipe, "--run", run, *QUICK)
    assert records(run)[0]["step"] == 1
    assert len(records(run, "evaluate")) == 1


def commands(text: str) -> list[list[str]]:
    """The commands that a user is told to type next."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  headway ")]


def colour(folder: Path, sizes: list[tuple[int, int]], ending: str, classes: tuple[str, ...] = ("a", "b")) -> Path:
    chance = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number, (width, height) in enumerate(sizes):
            pixels = chance.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.{ending}")
    return folder


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gray images; the commands it prints are typed as they stand."""
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "digits", per_class=10)
    said = headway("init", "digits")
    assert said.out.startswith("Wrote digits.yaml. Next:\n")
    assert commands(said.out) == [["pack", "digits", "digits.packed", "--split", "0.1"], ["train", "digits.yaml"]]
    text = (tmp_path / "digits.yaml").read_text()
    assert "# Proposed by headway init: 100 images, 10 classes, gray, all 8 x 8." in text
    for key in ("factory", "flip", "translate", "lr", "batch", "epochs", "label_smoothing"):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:") or f"{{{key}:" in line)
        assert "  # " in line, f"{key} has no comment that says why"
    proposed = read_recipe(Path("digits.yaml"), (), TrainRecipe).recipe
    assert (proposed.model.factory, proposed.augment.flip) == ("headway.model:small_net", False)
    headway(*commands(said.out)[0])
    headway(*commands(said.out)[1], *QUICK)
    assert records(Path("runs/digits"), "evaluate")


def test_colour_images_of_32_pixels(tmp_path: Path) -> None:
    colour(tmp_path / "src", [(32, 32)] * 10, "jpg")
    headway("init", tmp_path / "src", "--out", tmp_path / "r.yaml")
    headway("pack", tmp_path / "src", tmp_path / "src.packed", "--split", "0.1")
    recipe = read_recipe(tmp_path / "r.yaml", (), TrainRecipe).recipe
    assert (recipe.model.factory, recipe.augment.flip, recipe.augment.translate) == (
        "headway.model:cifar_net",
        True,
        2,
    )
    assert recipe.data.size is None
    trains(tmp_path / "r.yaml", tmp_path / "run")


@pytest.mark.check
def test_photographs_of_many_sizes(tmp_path: Path, data_root: Path) -> None:
    photos = sorted((data_root / "imagenet-250").glob("*.JPEG"))[:8]
    for place, path in enumerate(photos):
        (tmp_path / "src" / f"class-{place % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "src" / f"class-{place % 2}")
    headway("init", tmp_path / "src", "--out", tmp_path / "r.yaml")
    recipe = read_recipe(tmp_path / "r.yaml", (), TrainRecipe).recipe
    assert (recipe.model.factory, recipe.data.size) == ("headway.model:resnet18", 128)
    assert (recipe.model.zero_init, recipe.data.crop.name) == (True, "random")
    assert ", of different sizes." in (tmp_path / "r.yaml").read_text()
    headway("pack", tmp_path / "src", tmp_path / "src.packed", "--split", "0.25")
    run = tmp_path / "run"
    headway("train", tmp_path / "r.yaml", "--run", run, *QUICK, "batch=4", "evaluate.batch=2")
    assert records(run, "evaluate")[0]["step"] == 1


@pytest.mark.parametrize(
    ("libraries", "factory", "args"),
    [
        (("timm", "torchvision"), "timm:create_model", {"model_name": "resnet18", "pretrained": True}),
        (("torchvision",), "torchvision.models:resnet18", {"weights": "IMAGENET1K_V1"}),
        # timm cannot be imported without torchvision.
        (("timm",), "headway.model:resnet18", {}),
    ],
    ids=["timm", "torchvision", "timm alone"],
)
def test_few_photographs_are_fine_tuned_where_weights_can_be_had(
    libraries: tuple[str, ...],
    factory: str,
    args: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By stand-ins of the libraries; the proposal is trained as it stands, but for its length and size."""
    colour(tmp_path / "src", [(150, 130)] * 3, "jpg")
    _hubs.write_packages(tmp_path / "packages", *libraries)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    try:
        headway("init", tmp_path / "src", "--out", tmp_path / "r.yaml")
        text = (tmp_path / "r.yaml").read_text()
        recipe = read_recipe(tmp_path / "r.yaml", (), TrainRecipe).recipe
        assert (recipe.model.factory, recipe.model.args) == (factory, args)
        assert recipe.data.crop.name == "random"
        if args:
            assert f"{libraries[0]} fetches the weights (45 MB) when training begins, and keeps them." in text
            assert (recipe.optimizer.layer_decay, recipe.data.size) == (0.75, 224)
            headway("pack", tmp_path / "src", tmp_path / "src.packed", "--split", "0.3")
            headway("train", tmp_path / "r.yaml", "--run", tmp_path / "run", *QUICK, "data.size=32", "batch=2")
            assert records(tmp_path / "run", "evaluate")
        else:
            assert "Fine-tuning would be far\n# better: install timm" in text
            assert (recipe.optimizer.layer_decay, recipe.data.size) == (1, 128)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]


def test_many_photographs_begin_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hubs.write_packages(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    photographs = SourceFindings(
        samples=2001, held_out=True, packed=True, kind="class", outputs=2, sizes=[(500, 375)], gray=False
    )
    assert "headway.model:resnet18  #" in format_recipe(photographs, "photos", Path("photos"))
    assert "timm:create_model" in format_recipe(replace(photographs, samples=2000), "photos", Path("photos"))
    for samples, kind, advises in ((39_999, "class", False), (40_000, "class", True), (40_000, "value", False)):
        text = format_recipe(replace(photographs, samples=samples, kind=kind), "photos", Path("photos"))
        assert ("recipes/large-batch.yaml" in text) is advises
    few = yaml.safe_load(format_recipe(replace(photographs, samples=300, kind="value"), "photos", Path("photos")))
    assert "task" not in few, "label smoothing is for classes"
    assert (few["epochs"], few["batch"], few["optimizer"]["lr"]) == (27, 32, 0.0001)
    assert yaml.safe_load(format_recipe(replace(photographs, samples=40), "p", Path("p")))["epochs"] == 30


@pytest.mark.parametrize("several", [False, True])
def test_numbers_from_a_list(tmp_path: Path, several: bool) -> None:
    colour(tmp_path, [(20, 20)] * 12, "png", ("a",))
    header = "path,value_x,value_y" if several else "path,value"
    rows = [f"a/{number}.png,{number / 2}" + (f",{-number}" if several else "") for number in range(12)]
    (tmp_path / "list.csv").write_text("\n".join([header, *rows]) + "\n")
    headway("init", tmp_path / "list.csv", "--out", tmp_path / "r.yaml")
    headway("pack", tmp_path / "list.csv", tmp_path / "list.packed", "--split", "0.2")
    recipe = read_recipe(tmp_path / "r.yaml", (), TrainRecipe).recipe
    assert recipe.task.args == {}
    trains(tmp_path / "r.yaml", tmp_path / "run")
    assert "absolute_error" in records(tmp_path / "run", "evaluate")[0]


def test_several_labels_from_a_list(tmp_path: Path) -> None:
    colour(tmp_path, [(40, 40)] * 12, "png", ("a",))
    rows = [f"a/{number}.png,{'red;round' if number % 2 else 'red'}" for number in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
    headway("init", tmp_path / "list.csv", "--out", tmp_path / "r.yaml")
    headway("pack", tmp_path / "list.csv", tmp_path / "list.packed", "--split", "0.2")
    trains(tmp_path / "r.yaml", tmp_path / "run")


def test_a_folder_with_an_evaluation_set_is_not_split(tmp_path: Path) -> None:
    for part in ("train", "test"):
        digits(tmp_path / "src" / part, per_class=3)
    said = headway("init", tmp_path / "src", "--out", tmp_path / "r.yaml")
    assert commands(said.out)[0] == ["pack", str(tmp_path / "src"), str(tmp_path / "src.packed")]
    headway(*commands(said.out)[0])
    trains(tmp_path / "r.yaml", tmp_path / "run")


def test_a_packed_folder(tmp_path: Path) -> None:
    digits(tmp_path / "src", per_class=6)
    headway("pack", tmp_path / "src", tmp_path / "both.packed", "--split", "0.2")
    headway("pack", tmp_path / "src", tmp_path / "one.packed")
    said = headway("init", tmp_path / "both.packed", "--out", tmp_path / "both.yaml")
    assert commands(said.out) == [["train", str(tmp_path / "both.yaml")]]
    assert read_recipe(tmp_path / "both.yaml", (), TrainRecipe).recipe.data.eval == "both.packed/eval"
    trains(tmp_path / "both.yaml", tmp_path / "run")
    found = headway("init", tmp_path / "one.packed", "--out", tmp_path / "one.yaml", "--json").json()
    assert found["samples"] == 60
    assert found["next"] == [f"headway train {tmp_path / 'one.yaml'}"]
    recipe = read_recipe(tmp_path / "one.yaml", (), TrainRecipe).recipe
    assert (recipe.data.train, recipe.data.eval) == ("one.packed", None)
    headway("train", tmp_path / "one.yaml", "--run", tmp_path / "run-one", *QUICK)


@pytest.mark.thin(2)
@pytest.mark.parametrize("size", [(40, 8), (8, 40), (64, 24), (9, 9), (23, 64), (65, 65), (30, 90)])
def test_images_that_are_not_square(tmp_path: Path, size: tuple[int, int]) -> None:
    colour(tmp_path / "src", [size] * 6, "png")
    headway("init", tmp_path / "src", "--out", tmp_path / "r.yaml")
    headway("pack", tmp_path / "src", tmp_path / "src.packed", "--split", "0.2")
    trains(tmp_path / "r.yaml", tmp_path / "run")


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["2024", "1e-3", "no", "a: b", "it's # one", "null", "-x", ".hidden", "\u732b {x}"])
def test_folders_of_any_name(tmp_path: Path, name: str) -> None:
    """YAML reads many names as something else, and so do shells; the commands it prints are typed as they stand."""
    digits(tmp_path / name, per_class=3)
    out = tmp_path / "r.yaml"
    said = headway("init", tmp_path / name, "--out", out)
    recipe = read_recipe(out, (), TrainRecipe).recipe
    assert recipe.name == name.lstrip(".")
    assert recipe.data.train == f"{name.lstrip('.')}.packed/train"
    packing, training = commands(said.out)
    headway(*packing)
    headway(*training, "--run", tmp_path / "run", *QUICK)


def test_an_existing_recipe_is_kept(tmp_path: Path) -> None:
    digits(tmp_path / "digits", per_class=2)
    out = tmp_path / "r.yaml"
    out.write_text("# mine\n")
    assert "this recipe exists. Name another with --out, or pass --overwrite." in refused(
        "init", tmp_path / "digits", "--out", out, status=2
    )
    assert out.read_text() == "# mine\n"
    headway("init", tmp_path / "digits", "--out", out, "--overwrite")
    assert "# Proposed by headway init" in out.read_text()


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(tmp_path / "data/digits", per_class=3)
    (tmp_path / "recipes").mkdir()
    headway("pack", tmp_path / "data/digits", tmp_path / "data/digits.packed", "--split", "0.3")
    monkeypatch.chdir(tmp_path / "data")
    headway("init", "digits.packed", "--out", "../recipes/d.yaml")
    recipe = read_recipe(tmp_path / "recipes/d.yaml", (), TrainRecipe).recipe
    assert recipe.data.train == os.path.join("..", "data", "digits.packed", "train")
    monkeypatch.chdir("/")
    trains(tmp_path / "recipes/d.yaml", tmp_path / "run")


def test_the_source_is_only_looked_at(tmp_path: Path) -> None:
    digits(tmp_path / "src", per_class=2)
    (tmp_path / "src/0/000.png").write_text("damaged")
    before = files(tmp_path / "src")
    found = inspect_source(tmp_path / "src")
    assert (found.samples, found.outputs, found.gray, found.common_size) == (20, 10, True, (8, 8))
    assert files(tmp_path / "src") == before
    # Pillow warns of its size, and a warning fails this test.
    Image.new("L", (10_000, 9_000)).save(tmp_path / "src/0/001.png")
    assert inspect_source(tmp_path / "src").common_size is None
    for path in (tmp_path / "src").rglob("*.png"):
        path.write_text("damaged")
    assert "none of the images looked at can be opened" in refused(
        "init", tmp_path / "src", "--out", tmp_path / "r.yaml", status=1
    )
    assert not (tmp_path / "r.yaml").exists()
