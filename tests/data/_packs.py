"""What the tests of pack share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from headway.data import opening
from headway.data.dataset import Dataset
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.recordio import ImageRecord, read_record


def picture(
    number: int, kind: str = "JPEG", size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: object
) -> bytes:
    """The bytes of an image file; another one for another number."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def folder(root: Path, classes: dict[str, int]) -> Path:
    """An image folder with so many images of each class."""
    number = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            number += 1
            (root / name / f"{index}.jpg").write_bytes(picture(number))
    return root


def names_of(packed: Dataset) -> list[str]:
    return [packed.name(sample) for sample in range(len(packed))]


def contents(folder: Path) -> dict[str, bytes]:
    packed = opening.open(folder)
    try:
        return dict(zip(names_of(packed), map(bytes, packed.read(np.arange(len(packed)))), strict=True))
    finally:
        packed.close()


def sources(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read_records(path: Path) -> Iterator[ImageRecord]:
    """All records of a RecordIO shard, in the order of the file."""
    view, start = map_path(path), 0
    while start < len(view):
        record, start = read_record(view, start, str(path))
        yield record
