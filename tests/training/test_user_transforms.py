"""Transforms of the user's own in a recipe: of one image, and of a batch of bytes in the loader's thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import headway, packed_digits, records, refused, write_recipe

from headway.core.errors import RecipeError
from headway.core.recipe import read_recipe
from headway.core.user_code import import_user_object
from headway.data.batch_transform import check_transformed
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe

USER = '''
import random
import threading

import numpy as np
import torch

THREADS = set()

def noisy():
    """A transform of one image."""
    def add_noise(image):
        assert image.shape == (8, 8, 1) and image.dtype == np.uint8
        return image // 2 + np.uint8(random.randrange(64)) + np.random.randint(0, 9, (8, 8, 1), np.uint8)
    return add_noise

def shifted(images, labels, keys):
    THREADS.add(threading.current_thread().name)
    assert images.dtype == torch.uint8 and images.shape[1:] == (1, 8, 8)
    return images + torch.from_numpy((keys % np.uint64(9)).astype(np.uint8))[:, None, None, None], labels

def as_float():
    return lambda image: image / 255

def smaller():
    return lambda image: image[1:]

def nothing():
    return None

def breaks():
    return {}["the user's own key"]

def broken():
    return lambda image: {}["the user's own key"]

def floats(images, labels, keys):
    return images / 255, labels
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transforms")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    (folder / "user.py").write_text(USER)
    return folder


def losses(folder: Path, name: str, *overrides: str) -> list[float]:
    headway("train", folder / "recipe.yaml", "--run", folder / name, "seed=5", *overrides)
    return [record["loss"] for record in records(folder / name, "train")]


IMAGE = "data.image_transform=user.py:noisy"
BATCH = ("transform=user.py:shifted", "transform_on=uint8")


@pytest.mark.check
def test_a_run_with_both_transforms_resumes_exactly_with_other_workers(folder: Path) -> None:
    both = (IMAGE, *BATCH)
    alone = losses(folder, "inline", *both, "data.transform_workers=0", "checkpoint.every_steps=5", "checkpoint.keep=9")
    assert losses(folder, "pool", *both, "data.transform_workers=2") == alone
    weights = load_file(folder / "inline/weights.safetensors")
    # Back to a step inside the first epoch.
    for path in (folder / "inline/checkpoints").glob("step-*"):
        if path.name != "step-00000005":
            (path / "manifest.json").unlink()
    headway("train", "--resume", folder / "inline")
    again = load_file(folder / "inline/weights.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert losses(folder, "image", IMAGE) != alone
    assert losses(folder, "plain") != losses(folder, "batch", *BATCH)


def test_a_transform_of_bytes_runs_in_the_loaders_thread(folder: Path) -> None:
    seen = import_user_object("user.py:THREADS", base=folder, what="test")
    seen.clear()
    losses(folder, "thread", *BATCH)
    assert seen == {"headway-loader"}
    seen.clear()
    synthetic = "data={train: synthetic, synthetic: {samples: 60, size: [8, 8], channels: 1}}"
    losses(folder, "synthetic", *BATCH, synthetic)
    assert seen == {threading.main_thread().name}


def test_it_changes_training_images_alone(folder: Path) -> None:
    loaded = read_recipe(folder / "recipe.yaml", [IMAGE, *BATCH, "seed=5"], TrainRecipe)
    plain = read_recipe(folder / "recipe.yaml", ["seed=5"], TrainRecipe)
    setups = [build_setup(one) for one in (loaded, plain)]
    try:
        assert setups[0].augment._mean.tolist() == setups[1].augment._mean.tolist()
        for setup in setups:
            assert setup.eval is not None
        first, second = (next(iter(setup.batches(0))).images.clone() for setup in setups)
        assert first.shape == second.shape
        # noisy halves a pixel and adds at most 63 + 8, shifted adds at most 8.
        difference = first.numpy().astype(int) - second.numpy().astype(int) // 2
        assert difference.min() >= 0
        assert 50 < difference.max() <= 79
        evaluated = [
            next(iter(setup.inputs.build_evaluation_loader(setup.recipe, setup.eval))).images.clone()
            for setup in setups
            if setup.eval is not None
        ]
        assert np.array_equal(*evaluated)
    finally:
        for setup in setups:
            setup.inputs.close()


@pytest.mark.parametrize(
    ("override", "status", "expected"),
    [
        ("data.image_transform=user.py:nothing", 2, "returned a NoneType, which cannot be called with an image"),
        ("data.image_transform=user.py:nosy", 2, "Did you mean 'noisy'?"),
        ("data.transform_workers=2", 2, "'transform_workers' counts only with image_transform"),
        ("transform_on=uint8", 2, "transform_on counts only with a transform"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, override: str, status: int, expected: str) -> None:
    assert expected in refused("train", folder / "recipe.yaml", override, "--run", folder / "run", status=status)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("data.image_transform=user.py:as_float",), "return uint8, without ToTensor, ToDtype and Normalize"),
        (("data.image_transform=user.py:smaller",), "returned (7, 8, 1) torch.uint8, and got (8, 8, 1)"),
        (("data.image_transform=user.py:breaks",), "'user.py:breaks' failed: KeyError"),
        (("data.image_transform=user.py:broken",), "user.py:35: the transform of 'user.py:broken' failed: KeyError"),
    ],
)
def test_failing_code_is_shown(folder: Path, overrides: tuple[str, ...], expected: str) -> None:
    said = headway("train", folder / "recipe.yaml", *overrides, "--run", folder / "run", status=1)
    assert expected in said.err
    assert "Traceback" in said.err


def test_a_result_of_another_form_is_refused_with_the_form_that_is_needed(folder: Path) -> None:
    more = ("transform=user.py:floats", "transform_on=uint8", "--run", folder / "floats")
    sentence = refused("train", folder / "recipe.yaml", *more, status=2)
    assert "the transform 'user.py:floats' returned (float32 [30, 1, 8, 8], int64 [30])." in sentence
    assert sentence.endswith("Return (images, labels), here (uint8 [30, 1, 8, 8], int64 [30]).")


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "nothing"),
        (torch.zeros(4, 3, 8, 8), "float32 [4, 3, 8, 8]"),
        ((torch.zeros(4, 3, 8, 8), [0, 1, 2, 3]), "(float32 [4, 3, 8, 8], a list)"),
        ((torch.zeros(3, 3, 8, 8), torch.zeros(4)), "(float32 [3, 3, 8, 8], float32 [4])"),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(2)), "(float32 [4, 3, 8, 8], float32 [2])"),
        ((torch.zeros(4, 192), torch.zeros(4)), "(float32 [4, 192], float32 [4])"),
        ((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4)), "(uint8 [4, 3, 8, 8], float32 [4])"),
        ((torch.zeros(4, 3, 8, 8, device="meta"), torch.zeros(4)), "(float32 [4, 3, 8, 8] on meta, float32 [4])"),
        ("xy", "a str"),
    ],
)
def test_each_wrong_result_is_described(result: Any, got: str) -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4)
    with pytest.raises(RecipeError) as caught:
        check_transformed(result, images, labels, "mine:f", "step 1")
    assert str(caught.value).startswith(f"step 1: the transform 'mine:f' returned {got}. Return (images, labels), here")
    # Another size of image, soft labels, and a list for a pair are fine.
    for good in ((images[:, :, :4], labels), [images.double(), torch.zeros(4, 10)]):
        assert check_transformed(good, images, labels, "mine:f", "step 1")[0] is good[0]
