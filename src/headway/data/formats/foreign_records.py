"""Found: what a look at foreign files gives, before any image is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import FLAG_PLANAR, FLAG_RAW, LabelKind
from headway.data.formats.byte_ranges import ByteRange

CLASS_LIMIT = 1 << 20
"""A class number beyond it is taken for damage: the names of so many classes would fill the memory."""


class LabelColumn(NamedTuple):
    """Labels of all samples: int64 [n] (class), float32 [n, k] (multi, value) or float32 [n] (value)."""

    kind: LabelKind
    classes: tuple[str, ...]
    values: NDArray[Any]


class PixelShapes(NamedTuple):
    """The shape of raw images: width and height of each, uint32 [n], and their number of channels."""

    width: NDArray[np.uint32]
    height: NDArray[np.uint32]
    channels: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignRecords:
    """Where each sample lies and what its label is; shard, offset, length and flags are of shape [n]."""

    format: str
    files: tuple[Path, ...]
    """The shards: `shard` counts in them. None where each sample is a file of its own."""
    shard: NDArray[np.uint16]
    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    flags: NDArray[np.uint8]
    labels: LabelColumn
    pixels: PixelShapes | None = None
    """Of raw images; None: each is an image file, whose header says it."""
    names: Sequence[str] | None = None
    watched: tuple[Path, ...] = ()
    """Files and folders besides `files` that this follows from."""


def build_records(
    format: str,
    files: Sequence[Path],
    places: Sequence[tuple[int, int, int, int]],
    labels: LabelColumn,
    names: Sequence[str] | None = None,
) -> ForeignRecords:
    """Image files in shards; `places` holds (shard, offset, length, flags) of each."""
    if not places:
        raise DataError("there is no image in it", where=", ".join(map(str, files[:3])))
    if len(files) > 1 << 16:
        raise DataError(f"{len(files):,} shards are more than a data set can have", where=str(files[0].parent))
    columns = np.array(places, np.uint64).T
    if (columns[2] >= 1 << 32).any():
        raise DataError("an image of 4 GiB or more", where=str(files[int(columns[0][columns[2].argmax()])]))
    return ForeignRecords(
        format=format,
        files=tuple(files),
        shard=columns[0].astype(np.uint16),
        offset=columns[1].copy(),
        length=columns[2].astype(np.uint32),
        flags=columns[3].astype(np.uint8),
        labels=labels,
        names=names,
    )


def build_row_records(
    format: str,
    blocks: Sequence[tuple[ByteRange, int, int]],
    shape: tuple[int, int, int],
    labels: LabelColumn,
    *,
    stride: int | None = None,
    planar: bool = False,
    names: Sequence[str] | None = None,
    watched: Sequence[Path] = (),
) -> ForeignRecords:
    """Raw images of one shape (height, width, channels) in rows of `stride` bytes; None: of their own size.

    `blocks` holds (piece, offset of the first image in it, number of images).
    """
    height, width, channels = shape
    size = height * width * channels
    files = sorted({piece.path for piece, _, _ in blocks})
    counts = [count for _, _, count in blocks]
    steps = (np.arange(count, dtype=np.uint64) * np.uint64(stride or size) for count in counts)
    begins = (piece.offset + first for piece, first, _ in blocks)
    n = sum(counts)
    if n == 0:
        raise DataError("there is no image in it", where=str(blocks[0][0]))
    return ForeignRecords(
        format=format,
        files=tuple(files),
        shard=np.repeat([files.index(piece.path) for piece, _, _ in blocks], counts).astype(np.uint16),
        offset=np.concatenate([begin + step for begin, step in zip(map(np.uint64, begins), steps, strict=True)]),
        length=np.full(n, size, np.uint32),
        flags=np.full(n, FLAG_RAW | FLAG_PLANAR * planar, np.uint8),
        labels=labels,
        pixels=PixelShapes(np.full(n, width, np.uint32), np.full(n, height, np.uint32), channels),
        names=names,
        watched=tuple(watched),
    )


def build_class_labels(values: NDArray[Any], where: str, classes: Sequence[str] = ()) -> LabelColumn:
    """Class numbers of shape [n]. Without names of classes, they are called by their numbers.

    Raises DataError for a number that is no class.
    """
    numbers = values.astype(np.int64)
    limit = len(classes) or CLASS_LIMIT
    wrong = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if wrong.size:
        fix = f"There are {len(classes)} classes, from 0." if classes else f"Classes count from 0 to {limit - 1:,}."
        raise DataError(f"label {numbers[wrong[0]]} of sample {wrong[0]} is no class", where=where, fix=fix)
    names = tuple(classes) or tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))
    return LabelColumn("class", names, numbers)


def infer_labels(values: NDArray[Any], where: str) -> LabelColumn:
    """Numbers of shape [n] or [n, k] as labels: class numbers where all are whole, not negative and one to a sample;
    several labels where all are 0 or 1; else values. Raises DataError for one that is not finite."""
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise DataError("a label is no finite number", where=where)
    if values.ndim == 1 and (values >= 0).all() and (values == np.floor(values)).all():
        return build_class_labels(values, where)
    outputs = () if values.ndim == 1 else tuple(map(str, range(values.shape[1])))
    several = values.ndim == 2 and bool(((values == 0) | (values == 1)).all())
    return LabelColumn("multi" if several else "value", outputs, values.astype(np.float32))


def parse_labels(values: Sequence[Any], where: str) -> LabelColumn:
    """Labels as files name them: class numbers, names of classes, lists of names, numbers or lists of numbers.

    Raises DataError where they are of several kinds, or of none of these.
    """
    kinds = {type(value) for value in values}
    if kinds == {str}:
        if all(value.isdecimal() and len(value) < 10 for value in values):
            return build_class_labels(np.array([int(value) for value in values]), where)
        classes, numbers = np.unique(np.array(values, object), return_inverse=True)
        return LabelColumn("class", tuple(classes), numbers.astype(np.int64))
    try:
        if kinds == {list}:
            if any(isinstance(part, str) for value in values for part in value):
                return _build_multi_labels(values)
            return infer_labels(np.array(values, np.float64), where)
        if kinds and kinds <= {int, float}:
            return infer_labels(np.array(values, np.float64), where)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError("the labels are not of one kind and length", where=where) from error
    named = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"the labels are not of one kind (found: {named})", where=where)


def _build_multi_labels(values: Sequence[list[str]]) -> LabelColumn:
    classes = sorted({name for names in values for name in names})
    number = {name: place for place, name in enumerate(classes)}
    labels = np.zeros((len(values), len(classes)), np.float32)
    for row, names in enumerate(values):
        labels[row, [number[name] for name in names]] = 1
    return LabelColumn("multi", tuple(classes), labels)
