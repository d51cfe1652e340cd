"""ForeignRecords: the offsets and labels of foreign samples, known before any image is read."""

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
"""A larger class number counts as damage: the names of so many classes would fill the memory."""


class LabelColumn(NamedTuple):
    """Labels of all samples: int64 [n] (class), float32 [n, k] (multi, value) or float32 [n] (value)."""

    kind: LabelKind
    classes: tuple[str, ...]
    values: NDArray[Any]


class PixelShapes(NamedTuple):
    """Shapes of raw images: width and height of each, uint32 [n], and their number of channels."""

    width: NDArray[np.uint32]
    height: NDArray[np.uint32]
    channels: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignRecords:
    """The place and label of each sample; shard, offset, length and flags have shape [n]."""

    format: str
    files: tuple[Path, ...]
    """The shards that `shard` counts; empty if each sample is a file of its own."""
    shard: NDArray[np.uint16]
    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    flags: NDArray[np.uint8]
    labels: LabelColumn
    pixels: PixelShapes | None = None
    """Shapes of raw images; None for image files, whose header has them."""
    names: Sequence[str] | None = None
    watched: tuple[Path, ...] = ()
    """Other files and folders that these records depend on."""


def build_records(
    format: str,
    files: Sequence[Path],
    places: Sequence[tuple[int, int, int, int]],
    labels: LabelColumn,
    names: Sequence[str] | None = None,
) -> ForeignRecords:
    """Returns image files in shards; `places` holds (shard, offset, length, flags) of each."""
    if not places:
        raise DataError("it contains no image", where=", ".join(map(str, files[:3])))
    # The shard column has 16 bits.
    if len(files) > 1 << 16:
        raise DataError(f"{len(files):,} shards are more than a data set can have", where=str(files[0].parent))
    # One array of 4 columns from millions of tuples, then a copy of each in its own type.
    columns = np.array(places, np.uint64).T
    # The length column has 32 bits.
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
    """Returns raw images of one shape (height, width, channels), in rows of `stride` bytes.

    `blocks` holds (byte range, offset of the first image in it, number of images). Without a
    `stride`, rows have no gaps.
    """
    height, width, channels = shape
    size = height * width * channels
    # Blocks of one archive share a file, which must be mapped once.
    files = sorted({piece.path for piece, _, _ in blocks})
    counts = [count for _, _, count in blocks]
    # Offsets by arithmetic: millions of rows need no Python object each.
    steps = (np.arange(count, dtype=np.uint64) * np.uint64(stride or size) for count in counts)
    begins = (piece.offset + first for piece, first, _ in blocks)
    n = sum(counts)
    if n == 0:
        raise DataError("it contains no image", where=str(blocks[0][0]))
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
    """Returns class numbers of shape [n] as labels; without names, classes are named by their numbers.

    Raises DataError for a number that is not a class.
    """
    numbers = values.astype(np.int64)
    limit = len(classes) or CLASS_LIMIT
    # Checked all together; the message names the first one.
    wrong = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if wrong.size:
        fix = f"There are {len(classes)} classes, from 0." if classes else f"Classes count from 0 to {limit - 1:,}."
        raise DataError(f"label {numbers[wrong[0]]} of sample {wrong[0]} is not a class", where=where, fix=fix)
    names = tuple(classes) or tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))
    return LabelColumn("class", names, numbers)


def infer_labels(values: NDArray[Any], where: str) -> LabelColumn:
    """Returns numbers of shape [n] or [n, k] as labels.

    They are class numbers if all are whole, not negative and one a sample; several labels if all are 0 or 1; else
    values. Raises DataError for a number that is not finite.
    """
    # Written so that a NaN fails too.
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise DataError("a label is not a finite number", where=where)
    if values.ndim == 1 and (values >= 0).all() and (values == np.floor(values)).all():
        return build_class_labels(values, where)
    outputs = () if values.ndim == 1 else tuple(map(str, range(values.shape[1])))
    # Rows of 0 and 1 are indicators of labels.
    several = values.ndim == 2 and bool(((values == 0) | (values == 1)).all())
    return LabelColumn("multi" if several else "value", outputs, values.astype(np.float32))


def parse_labels(values: Sequence[Any], where: str) -> LabelColumn:
    """Returns labels as files give them: class numbers, class names, lists of names, numbers or lists of numbers.

    Raises DataError if they are of several kinds, or of none of these.
    """
    # Exact types: a bool among ints is a mistake in the file.
    kinds = {type(value) for value in values}
    if kinds == {str}:
        # Names that are all numbers are class numbers, as in files of WebDataset.
        if all(value.isdecimal() and len(value) < 10 for value in values):
            return build_class_labels(np.array([int(value) for value in values]), where)
        classes, numbers = np.unique(np.array(values, object), return_inverse=True)
        return LabelColumn("class", tuple(classes), numbers.astype(np.int64))
    try:
        if kinds == {list}:
            if any(isinstance(part, str) for value in values for part in value):
                return build_multi_labels(values)
            return infer_labels(np.array(values, np.float64), where)
        if kinds and kinds <= {int, float}:
            return infer_labels(np.array(values, np.float64), where)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError("the labels differ in kind or length", where=where) from error
    named = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"the labels differ in kind (found: {named})", where=where)


def build_multi_labels(values: Sequence[Sequence[str]]) -> LabelColumn:
    """Returns lists of class names as indicators, float32 [n, k]; classes are sorted by name."""
    classes = sorted({name for names in values for name in names})
    number = {name: place for place, name in enumerate(classes)}
    labels = np.zeros((len(values), len(classes)), np.float32)
    for row, names in enumerate(values):
        labels[row, [number[name] for name in names]] = 1
    return LabelColumn("multi", tuple(classes), labels)
