"""`headway tune RECIPE`: what it writes is the recipe with what helped, and is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests._support import headway, packed_digits, refused, write_recipe

from headway.core.recipe import given, load
from headway.doctor.tune import changes_of
from headway.train.recipe import TrainRecipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed_digits(tmp_path)
    return tmp_path


@pytest.mark.check
def test_a_slow_decoder_is_cured_and_the_evidence_written(folder: Path) -> None:
    """PNGs that are decoded in each epoch, where memory would hold them decoded."""
    recipe = write_recipe(folder / "slow.yaml", data={"cache": "none"}, batch=60)
    said = headway("tune", recipe, "--quick", "--json").json()
    target = folder / "slow.tuned.yaml"
    assert said["written"] == str(target)
    text = target.read_text()
    assert text.startswith("# slow.yaml, tuned on ")
    loaded = load(target, (), TrainRecipe).recipe
    kept = [step["override"] for step in said["steps"] if step["kept"]]
    assert "data.cache=memory" in [step["override"] for step in said["steps"]]
    assert loaded.data.cache == ("memory" if "data.cache=memory" in kept else "none")
    assert (said["after"] is None) == (not kept)
    for step in said["steps"]:
        assert step["override"] in text
    assert loaded.precision == "fp32"  # nothing that changes the mathematics without leave
    assert loaded.batch == 60


def test_what_is_there_is_not_replaced(folder: Path) -> None:
    recipe = write_recipe(folder / "some.yaml")
    (folder / "some.tuned.yaml").write_text("mine")
    assert "exists" in refused("tune", recipe, status=2)
    assert (folder / "some.tuned.yaml").read_text() == "mine"
    assert "nothing to allow" in refused("tune", recipe, "--allow", "everything", "--out", folder / "x.yaml", status=2)
    (folder / "other").mkdir()
    assert "relative paths" in refused("tune", recipe, "--out", folder / "other/x.yaml", status=2)


def test_overrides_are_read_as_changes() -> None:
    assert changes_of("data.threads=2 channels_last=true") == {"data.threads": 2, "channels_last": True}
    assert changes_of("headway pack SRC DST --mode=raw") == {}
    assert changes_of("") == {}


def test_the_recipe_is_written_as_it_was_given(folder: Path) -> None:
    path = folder / "short.yaml"
    path.write_text(
        "data: digits.packed/train\nmodel: {factory: 'net.py:linear'}\noptimizer: {name: sgd, lr: 0.02}\nbatch: 30\n"
        "epochs: 2\n"
    )
    text = given(path, ["seed=3"], {"data.cache": "memory", "channels_last": False}, TrainRecipe)
    assert yaml.safe_load(text) == {
        "data": {"train": "digits.packed/train", "cache": "memory"},
        "model": {"factory": "net.py:linear"},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": 30,
        "epochs": 2,
        "seed": 3,
        "channels_last": False,
    }
