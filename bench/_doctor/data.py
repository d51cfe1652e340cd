"""The training sets of the cases, by name. They are made once from real images, in the cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from PIL import Image, ImageOps

import headway
from bench import _data
from bench._accuracy import cifar
from headway.data.pack import pack

COPIES = {"many": 8, "a great many": 160}
"""Of each photograph: 220 MB as JPEG, for an epoch that takes a while; 4.4 GB, of which little is fetched ahead."""


class NotHereError(Exception):
    """A case cannot be had on this machine; the reason."""


@final
class Sets:
    """Finds a set, and makes it where it is not there yet.

    - `pixels`: CIFAR-10 as raw pixels, with its evaluation set; `loose`: as 50,000 files.
    - `photos x SCALE`: 250 ImageNet files, 1 time as large as they are or more, packed as JPEG; `photos loose`: as they
      are.
    - `photos raw`: their middle, 224 x 224 pixels; `pixels SIDE`: of another side.
    - `..., many`, `..., a great many`: each photograph 8 or 160 times.

    Args:
        pixels: a smaller CIFAR-10 in its place.
        folder: where they are kept; unset: in the cache folder.
    """

    def __init__(self, pixels: Path | None = None, folder: Path | None = None) -> None:
        cache = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")
        self._pixels, self._folder = pixels, folder or cache / "doctor"

    def train(self, name: str) -> Path:
        """Raises NotHereError: there are no real images to make it of."""
        if name == "pixels":
            return self._cifar() / "train"
        target = self._folder / name.replace(" ", "-").replace(",", "")
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make(name, target)
        return target

    def held_out(self, name: str) -> Path | None:
        """The evaluation set; of CIFAR-10 alone."""
        return self._cifar() / "eval" if name in ("pixels", "loose") else None

    def _cifar(self) -> Path:
        if self._pixels is None:
            self._pixels = cifar.packed()
        return self._pixels

    def _make(self, name: str, target: Path) -> None:
        one_of_each, _, many = name.partition(", ")
        kind, _, value = one_of_each.rpartition(" ")
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".making-") as temporary:
            folder = Path(temporary)
            if name == "loose":
                _link(cifar.find_source() / "train", folder / name)
                _settle(folder / name, target)
                return
            photos = _data.images(folder / "photos")
            if photos is None:
                raise NotHereError(
                    "there are no photographs: set HEADWAY_TEST_DATA to the folder that has imagenet-250"
                )
            if many:
                _multiply(photos, COPIES[many], shutil.copyfile if one_of_each == "photos loose" else os.link)
            if one_of_each == "photos loose":
                _settle(photos, target)
                return
            how: dict[str, Any] = {"mode": "keep"}
            if kind == "photos x" and value != "1":
                how["transform"] = scaled(float(value))
            elif kind != "photos x":
                how = {"mode": "raw", "transform": fitted(224 if value == "raw" else int(value))}
            pack(photos, target, **how)


def scaled(factor: float) -> Callable[[Image.Image, Any, str], Image.Image]:
    """Makes images so many times as wide and as high."""

    def transform(image: Image.Image, label: Any, name: str) -> Image.Image:
        return image.convert("RGB").resize((round(image.width * factor), round(image.height * factor)))

    return transform


def fitted(side: int) -> Callable[[Image.Image, Any, str], Image.Image]:
    """Makes images square: their middle, of so many pixels a side."""

    def transform(image: Image.Image, label: Any, name: str) -> Image.Image:
        return ImageOps.fit(image.convert("RGB"), (side, side))

    return transform


def _multiply(folder: Path, copies: int, copy: Callable[[Path, Path], object]) -> None:
    for path in sorted(folder.rglob("*.JPEG")):
        for number in range(1, copies):
            copy(path, path.with_name(f"{path.stem}-{number}.JPEG"))


def _link(source: Path, target: Path) -> None:
    """The same files in another folder, so that what is kept of them beside them is not written into the source."""
    for path in sorted(source.rglob("*.jpg")):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, there)
        except OSError:  # another file system
            shutil.copyfile(path, there)


def _settle(folder: Path, target: Path) -> None:
    """Puts a folder of files where it belongs, and opens it once: the first opening reads all of them."""
    folder.rename(target)
    headway.open(target).close()


def load(folder: Path) -> None:
    """Reads all files of a folder, so that they lie in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def evict(folder: Path) -> None:
    """Gives back the memory in which files of a folder lie, so that they are read from the disk next."""
    os.sync()  # what is not written yet stays
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
