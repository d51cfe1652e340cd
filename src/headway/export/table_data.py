"""The images of an inference table, as a file of pixels that the processes of all rows map."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headway.data.dataset import Dataset
    from headway.setup.train_setup import TrainSetup

MAX_PIXEL_BYTES = 2 << 30
"""Largest file of pixels; 14,000 images of 224 pixels."""


@dataclass(frozen=True, kw_only=True)
class TableImages:
    """Images of the evaluation set as files.

    Attributes:
        pixels: .npy file, uint8 [n, H, W, C].
        labels: int64 [n]; None if labels are not classes.
        classes: number of classes; 0 if labels are not classes.
        available: size of the evaluation set.
    """

    pixels: Path
    labels: NDArray[np.int64] | None
    classes: int
    available: int

    @property
    def count(self) -> int:
        """Number of images in the file."""
        return int(np.load(self.pixels, mmap_mode="r").shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = np.load(self.pixels, mmap_mode="r").shape[1:]
        return height, width, channels


def write_images(setup: TrainSetup, dataset: Dataset, folder: Path, limit: int | None = None) -> TableImages:
    """Writes the pixels of an evaluation set as the network gets them. Damaged images are left out.

    They are in a random order with the seed 0: whoever compares the first ones compares a random part, also of a set
    that is sorted by class.

    Args:
        folder: for the file `pixels.npy`.
        limit: largest number of images.
    """
    height, width = setup.size
    image_bytes = height * width * setup.channels
    most = max(1, MAX_PIXEL_BYTES // image_bytes)
    count = min(len(dataset), most if limit is None else min(limit, most))
    kept, labels, place = 0, list[NDArray[Any]](), folder / "pixels.npy"
    shape = (count, height, width, setup.channels)
    pixels = np.lib.format.open_memmap(place, mode="w+", dtype=np.uint8, shape=shape)
    for batch in setup.inputs.build_sample_loader(setup.recipe, dataset, count, min(count, 64), 0):
        # The last batch is full, and goes on behind the end.
        good = np.flatnonzero((batch.served >= 0) & (batch.positions < count))
        pixels[kept : kept + len(good)] = batch.images.cpu().numpy()[good]
        labels.append(batch.labels.cpu().numpy()[good])
        kept += len(good)
    pixels.flush()
    del pixels
    if kept < count:
        # A shorter file, so that nobody compares outputs for images that are not there.
        whole = np.load(place, mmap_mode="r")[:kept].copy()
        np.save(place, whole)
    is_class = setup.target.kind == "class" and setup.task.outputs == len(setup.target.classes)
    return TableImages(
        pixels=place,
        labels=np.concatenate(labels).astype(np.int64) if is_class else None,
        classes=len(setup.target.classes) if is_class else 0,
        available=len(dataset),
    )


def write_noise(folder: Path, shape: tuple[int, int, int], count: int) -> TableImages:
    """Writes random pixels, for a run without an evaluation set: speed can be measured on them, accuracy cannot."""
    place = folder / "pixels.npy"
    np.save(place, np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8))
    return TableImages(pixels=place, labels=None, classes=0, available=0)
