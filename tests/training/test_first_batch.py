"""The panel of the first batch shows what the network gets."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests._support import headway, packed_digits, write_recipe

from headway.data import opening
from headway.data.order import Order
from headway.data.reference import read_image

OWN = """
from torch import nn

class Bytes(nn.Sequential):
    def forward(self, images):
        return super().forward(images.float() / 255)

def takes_bytes(num_classes):
    return Bytes(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", epochs=1, data={"eval": None})
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.mark.parametrize("normalise", ["true", "false"])
def test_images_and_labels_of_the_first_batch(folder: Path, tmp_path: Path, normalise: str) -> None:
    headway(
        "train",
        folder / "recipe.yaml",
        "--run",
        tmp_path / "run",
        f"augment.normalise={normalise}",
        "model.factory=own.py:takes_bytes",
    )
    panel = json.loads((tmp_path / "run" / "panels" / "first-batch.json").read_text())
    _, samples = Order(180, 0)(np.arange(16))
    dataset = opening.open(folder / "digits.packed" / "train")
    for shown, sample in zip(panel["data"]["images"], samples.tolist(), strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["src"].partition(",")[2]))))
        assert np.array_equal(pixels, np.asarray(read_image(dataset, sample).convert("L")))
        assert shown["caption"] == dataset.classes[int(dataset.label[sample])]


def test_blended_labels_have_shares(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "augment.mixup={alpha: 1.0}")
    panel = json.loads((tmp_path / "run" / "panels" / "first-batch.json").read_text())
    captions = [one["caption"] for one in panel["data"]["images"]]
    assert any("%" in caption and ", " in caption for caption in captions), captions
