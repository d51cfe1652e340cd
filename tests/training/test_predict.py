"""Predictions see the pixels that an evaluation of the same files sees."""

from __future__ import annotations

import struct
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests._support import headway, packed_digits, write_recipe
from tests.data._packs import picture

from headway.core.errors import UsageError
from headway.core.recipe import read_recipe
from headway.data.decode import build_decoder
from headway.data.image_files import list_image_files, read_pixels
from headway.data.pack import pack
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.predict import build_evaluation_transform

FILES = {
    "a/large.jpg": {"size": (200, 150)},
    "a/small.png": {"kind": "PNG", "size": (37, 52)},
    "a/print.jpg": {"mode": "CMYK", "size": (91, 60)},
    "b/gray.jpg": {"mode": "L", "size": (64, 64)},
    "b/gray.png": {"kind": "PNG", "mode": "L", "size": (40, 90)},
    "b/same.jpg": {"size": (32, 24)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG, PNG and CMYK of many sizes, as files and packed as they are."""
    root = tmp_path_factory.mktemp("predict")
    for number, (name, how) in enumerate(FILES.items()):
        (root / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "files" / name).write_bytes(picture(number, **how))  # type: ignore[arg-type]
    pack(root / "files", root / "pack", mode="keep", threads=1)
    data = {"train": "pack", "eval": "pack", "size": [24, 32]}
    write_recipe(root / "recipe.yaml", data=data, model={"factory": "headway.model:small_net"}, batch=4)
    return root


@pytest.mark.parametrize("backend", ["native", "pillow"])
@pytest.mark.parametrize("how", ["share: 1.0", "share: 0.5", "name: random, share: 0.875"])
@pytest.mark.parametrize("scaled", ["true", "false"])
def test_the_pixels_of_an_evaluation(folder: Path, backend: str, how: str, scaled: str) -> None:
    overrides = (f"data.crop={{{how}}}", f"data.decoder={backend}", f"data.scaled={scaled}")
    setup = build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe))
    with closing(setup.inputs):
        assert setup.eval is not None
        found: dict[str, np.ndarray] = {}
        for batch in setup.inputs.build_evaluation_loader(setup.recipe, setup.eval):
            found |= {setup.eval.name(int(n)): batch.images[k].numpy().copy() for k, n in enumerate(batch.served)}
        files = list_image_files([folder / "files"])
        with closing(build_decoder(1, setup.recipe.data.decoder)) as decoder:
            opened, mine = read_pixels(build_evaluation_transform(setup), decoder, files)
            assert opened == list(range(len(files)))
    assert found.keys() == FILES.keys()
    for file, image in zip(files, mine, strict=True):
        name = str(file.relative_to(folder / "files"))
        assert np.array_equal(image, found[name]), name


def _long_text() -> bytes:
    """A PNG's chunk."""
    body = b"zTXta\0\0" + zlib.compress(bytes(3 << 20))
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))


def test_bad_files_are_refused_or_left_out(tmp_path: Path) -> None:
    """No image, an empty file, one cut short, one whose end is damaged, one with a text of 3 MB; more than a batch of
    good ones about them."""
    packed_digits(tmp_path)
    run = tmp_path / "run"
    headway("train", write_recipe(tmp_path / "recipe.yaml"), "--run", run, "epochs=0.2")
    files = sorted((tmp_path / "digits").rglob("*.png"))[:70]
    whole = headway("predict", run, *files).out.splitlines()
    assert len(whole) == 71
    jpeg, png = picture(0, size=(64, 64)), files[0].read_bytes()
    contents = {"note.png": b"no image", "empty.png": b"", "cut.jpg": jpeg[: len(jpeg) // 2], "end.png": png[:-30]}
    contents["text.png"] = png[:33] + _long_text() + png[33:]  # of which Pillow raises a ValueError
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    bad = [tmp_path / name for name in contents]
    for one in bad:
        said = headway("predict", run, files[0], one, status=1).err
        assert str(one) in said
        assert "Leave such files out with --skip-bad." in said
    said = headway("predict", run, *bad[:2], *files[:3], *bad[2:], *files[3:], files[0], "--skip-bad")
    assert said.out.splitlines() == [*whole, whole[1]]
    for one in bad:
        assert said.err.count(f"Left out {one}: ") == 1
    assert said.err.endswith("Left out 5 of 76 files.\n")
    out = tmp_path / "rows.csv"
    said = headway("predict", run, *bad, "--skip-bad", "--out", out, status=1)
    assert "of 5 files none is an image that can be read" in said.err
    assert not out.exists()


def test_the_nearest_folder_or_image_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").touch()
    (tmp_path / "photo.txt").touch()
    with pytest.raises(UsageError, match=r"no such file or folder\. Did you mean '.*/photos'\?$"):
        list_image_files([tmp_path / "phots"])
    with pytest.raises(UsageError, match=r"Did you mean '.*/photos/cat\.jpg'\?$"):
        list_image_files([tmp_path / "photos/Cta.jpg"])
    with pytest.raises(UsageError, match=r"Name image files, or folders with images\.$"):
        list_image_files([tmp_path / "mine"])
