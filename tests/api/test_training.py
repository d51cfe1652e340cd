"""headway.train and headway.resume from Python: what is shown, what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests._support import collect_messages, packed_digits, refused, write_recipe
from tests._support import headway as command
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


def test_what_is_about_the_network_of_the_factory_is_left_out(folder: Path, tmp_path: Path) -> None:
    """`headway init` writes such keys; they would fail with another network, or change its weights."""
    changes = {
        "model": {"factory": "headway.model:resnet18", "zero_init": True, "args": {"width": 3}, "freeze": ["^layer1"]},
        "optimizer": {"groups": [{"match": "^1\\.bias", "weight_decay": 0}, {"match": "downsample"}, {"match": ".*"}]},
        "epochs": 1,
    }
    recipe = write_recipe(folder / "for_another.yaml", **changes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with collect_messages() as said:
        run = headway.train(recipe, model=model, run=tmp_path / "a")
    assert said[0] == (
        "Your network takes the place of headway.model:resnet18. Left out, because the recipe says it about that one: "
        "model.args, model.freeze, model.zero_init, optimizer.groups with match 'downsample'. Give in the overrides "
        "what is meant for yours."
    )
    assert run.recipe["model"]["zero_init"] is False
    assert run.recipe["model"]["args"] == {}
    assert [group["match"] for group in run.recipe["optimizer"]["groups"]] == ["^1\\.bias", ".*"]
    # What the caller gives is meant for this network.
    with pytest.raises(HeadwayError, match=r"model\.zero_init: the network has no residual block"):
        headway.train(recipe, {"model.zero_init": True}, model=model, run=tmp_path / "b")
    mine = {"model.freeze": ["^1.weight"], "optimizer.groups": []}
    run = headway.train(recipe, mine, model=model, run=tmp_path / "c")
    assert run.recipe["model"]["freeze"] == ["^1.weight"]
    # So is what a recipe without a factory says, and that of a run which was given its network too.
    mapping = yaml.safe_load(recipe.read_text()) | {
        "model": {"freeze": ["^1.weight"]},
        "optimizer": {"name": "sgd", "lr": 1},
    }
    mapping["data"] |= {key: str(folder / mapping["data"][key]) for key in ("train", "eval")}
    for one in (mapping, tmp_path / "c/recipe.yaml"):
        with collect_messages() as said:
            again = headway.train(one, model=model, run=tmp_path / f"d{type(one).__name__}")
        assert again.recipe["model"]["freeze"] == ["^1.weight"]
        assert not any("takes the place" in line for line in said)


def test_messages_speak_python(folder: Path, tmp_path: Path) -> None:
    """Options of commands are named to the command line alone."""
    recipe, out = folder / "recipe.yaml", tmp_path / "a"
    run = headway.train(recipe, {"epochs": 1, "data.eval": None}, run=out)
    known = f"{out}: this run folder exists. "
    with pytest.raises(HeadwayError) as caught:
        headway.train(recipe, run=out)
    assert str(caught.value) == f"{known}Resume it: headway.resume({str(out)!r}). Or name another one with run=."
    said = refused("train", recipe, "--run", out, status=2)
    assert said == f"{known}Resume it: headway train --resume {out}. Or name another one with --run."
    for call, message in (
        (lambda: headway.train(recipe, {"epoch": 3}), r"^overrides: there is no key 'epoch'\. Did you mean 'epochs'"),
        (lambda: headway.train(recipe, {"epochs": "no"}), "^overrides: epochs must be a number, not 'no'"),
        (lambda: headway.resume(run, {"seed": 3}), r'headway\.train\(RECIPE, \{"model\.weights": '),
        (lambda: run.evaluate(), r"Name one as --data or data=\."),
        (lambda: run.predict(recipe), r"not an image\. Leave it out of the images\."),
        (
            lambda: headway.train(str(recipe), epochs=3, seed=1),  # type: ignore[arg-type]
            r"headway\.train has no argument 'epochs'\. Values of the recipe go into a mapping: "
            r"headway\.train\('.*recipe\.yaml', \{\"epochs\": 3, \"seed\": 1\}\)\.",
        ),
        (lambda: headway.train(recipe, modle=3), r"has no argument 'modle'\. Did you mean 'model'\?$"),  # type: ignore[arg-type]
        (lambda: headway.resume(run, epochs=9), r"headway\.resume\('.*a', \{\"epochs\": 9\}\)"),  # type: ignore[arg-type]
    ):
        with pytest.raises(HeadwayError, match=message):
            call()


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
