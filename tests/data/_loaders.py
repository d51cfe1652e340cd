"""Loaders over small packs, and what they serve."""

from __future__ import annotations

import math
import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headway.data.batch import Batch
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.data.order import Order
from headway.data.pack import pack

N, SEED, SIZE = 23, 5, (6, 8)
Rows = list[tuple[int, int, int, int, int, bytes]]


def written(root: Path, sizes: list[tuple[int, int]], forms: tuple[str, ...], modes: tuple[str, ...]) -> Path:
    """A folder of two classes."""
    random = np.random.default_rng(0)
    for number in range(N):
        width, height = sizes[number % len(sizes)]
        mode, form = modes[number % len(modes)], forms[number % len(forms)]
        image = Image.frombytes(
            mode, (width, height), random.integers(0, 256, width * height * len(mode), np.uint8).tobytes()
        )
        path = root / "ab"[number % 2] / f"{number:02d}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return root


def mixed(root: Path) -> Path:
    """A pack of JPEGs and PNGs, gray and colour, of several sizes, in several shards; its files are in root/src."""
    source = written(root / "src", [(8, 6), (12, 20), (9, 5), (40, 30)], ("jpg", "png"), ("RGB", "RGB", "L"))
    pack(source, root / "dst", shard_bytes=8000)
    return root / "dst"


def uniform(root: Path) -> Path:
    """A pack of uncompressed gray images of one size, which decode whatever their pixels are."""
    pack(written(root / "src", [(8, 6)], ("ppm",), ("L",)), root / "dst")
    return root / "dst"


def loader(data: Dataset, batch: int = 7, **options: Any) -> Loader:
    """A loader over a pack; with an order it has no end, unless a stop is given."""
    options = {"order": Order(len(data), SEED), "size": SIZE, "threads": 1, "cache": "none", **options}
    if options["order"] is not None:
        options.setdefault("stop", math.inf)
    return Loader(data, batch=batch, **options)


def rows(batches: Any, count: int | None = None) -> Rows:
    """(position, epoch, asked, served, label, pixels) of every sample, copied, since a batch is a slot of the ring."""
    out = []
    for batch in islice(batches, count):
        images, labels = batch
        assert len(images) == len(labels) == len(batch.positions)
        columns = (batch.positions, batch.epochs, batch.samples, batch.served, labels)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        out += [(*row, image.numpy().tobytes()) for row, image in zip(numbers, images, strict=True)]
    return out


def rows_of(batch: Batch) -> Rows:
    return rows([batch])


def flip_a_byte(folder: Path, data: Dataset, sample: int, at: int) -> None:
    with (folder / data.description.shards[data.shard[sample]].name).open("r+b") as file:
        file.seek(int(data.offset[sample]) + at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headway")]
