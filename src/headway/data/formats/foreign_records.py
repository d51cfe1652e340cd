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

MAX_CLASSES = 1 << 20
"""A larger class number counts as damage: so many class names would fill the memory."""


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
    """Place and label of each sample; shard, offset, length and flags are columns of shape [n]."""

    format: str
    files: tuple[Path, ...]
    """The shards that `shard` counts; empty if each sample is a separate file."""
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
    image_places: Sequence[tuple[int, int, int, int]],
    labels: LabelColumn,
    names: Sequence[str] | None = None,
) -> ForeignRecords:
    """Builds the records of image files in shards; `image_places` holds (shard, offset, length, flags) of each.

    Raises DataError if there is no image, or more or larger ones than the columns can hold.
    """
    if not image_places:
        raise DataError("it contains no image", where=", ".join(map(str, files[:3])))
    # The shard column has 16 bits.
    if len(files) > 1 << 16:
        raise DataError(f"{len(files):,} shards are more than a data set can have", where=str(files[0].parent))
    # One array of 4 columns from millions of tuples, then a copy of each in its own type.
    columns = np.array(image_places, np.uint64).T
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
    """Builds the records of raw images of one shape.

    Args:
        blocks: (byte range, offset of the first image in it, number of images) of each block of images.
        shape: (height, width, channels) of every image.
        stride: bytes from one image to the next; None: no gaps.
        planar: the pixels are [channels, height, width].
        watched: other files that the records depend on.

    Raises:
        DataError: there is no image.
    """
    height, width, channels = shape
    image_bytes = height * width * channels
    # Blocks of one archive share a file, which must be mapped once.
    files = sorted({byte_range.path for byte_range, _, _ in blocks})
    counts = [count for _, _, count in blocks]
    # Offsets are computed as arrays, so that millions of rows need no Python object each.
    strides = (np.arange(count, dtype=np.uint64) * np.uint64(stride or image_bytes) for count in counts)
    starts = (byte_range.offset + first for byte_range, first, _ in blocks)
    num_images = sum(counts)
    if num_images == 0:
        raise DataError("it contains no image", where=str(blocks[0][0]))
    return ForeignRecords(
        format=format,
        files=tuple(files),
        shard=np.repeat([files.index(byte_range.path) for byte_range, _, _ in blocks], counts).astype(np.uint16),
        offset=np.concatenate(
            [start + offsets for start, offsets in zip(map(np.uint64, starts), strides, strict=True)]
        ),
        length=np.full(num_images, image_bytes, np.uint32),
        flags=np.full(num_images, FLAG_RAW | FLAG_PLANAR * planar, np.uint8),
        labels=labels,
        pixels=PixelShapes(np.full(num_images, width, np.uint32), np.full(num_images, height, np.uint32), channels),
        names=names,
        watched=tuple(watched),
    )


def build_class_labels(values: NDArray[Any], where: str, classes: Sequence[str] = ()) -> LabelColumn:
    """Builds labels from class numbers of shape [n]; without `classes`, classes are named by their numbers.

    Raises DataError for a number that is not a class.
    """
    class_numbers = values.astype(np.int64)
    num_allowed = len(classes) or MAX_CLASSES
    # Checked all together; the message names the first one.
    invalid = np.flatnonzero((class_numbers < 0) | (class_numbers >= num_allowed))
    if invalid.size:
        fix = (
            f"There are {len(classes)} classes, from 0." if classes else f"Classes count from 0 to {num_allowed - 1:,}."
        )
        raise DataError(
            f"label {class_numbers[invalid[0]]} of sample {invalid[0]} is not a class", where=where, fix=fix
        )
    names = tuple(classes) or tuple(map(str, range(int(class_numbers.max(initial=-1)) + 1)))
    return LabelColumn("class", names, class_numbers)


def infer_labels(values: NDArray[Any], where: str) -> LabelColumn:
    """Builds labels from numbers of shape [n] or [n, k].

    Numbers of shape [n] that are all non-negative integers are classes; numbers of shape [n, k] that are all 0 or 1 are
    multi-labels; all others are values. Raises DataError for a number that is not finite.
    """
    # Written so that a NaN fails too.
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise DataError("a label is not a finite number", where=where)
    if values.ndim == 1 and (values >= 0).all() and (values == np.floor(values)).all():
        return build_class_labels(values, where)
    output_names = () if values.ndim == 1 else tuple(map(str, range(values.shape[1])))
    # Rows of 0 and 1 are indicators of labels.
    is_multi = values.ndim == 2 and bool(((values == 0) | (values == 1)).all())
    return LabelColumn("multi" if is_multi else "value", output_names, values.astype(np.float32))


def parse_labels(values: Sequence[Any], where: str) -> LabelColumn:
    """Builds labels from the values in files: class numbers, class names, lists of names, numbers or lists of numbers.

    Raises DataError if they are of several kinds, or of none of these.
    """
    # Exact types: a bool among ints is a mistake in the file.
    label_types = {type(value) for value in values}
    if label_types == {str}:
        # Names that are all numbers are class numbers, as in files of WebDataset.
        if all(value.isdecimal() and len(value) < 10 for value in values):
            return build_class_labels(np.array([int(value) for value in values]), where)
        classes, numbers = np.unique(np.array(values, object), return_inverse=True)
        return LabelColumn("class", tuple(classes), numbers.astype(np.int64))
    try:
        if label_types == {list}:
            if any(isinstance(element, str) for value in values for element in value):
                return build_multi_labels(values)
            return infer_labels(np.array(values, np.float64), where)
        if label_types and label_types <= {int, float}:
            return infer_labels(np.array(values, np.float64), where)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError("the labels differ in kind or length", where=where) from error
    kind_names = ", ".join(sorted(label_type.__name__ for label_type in label_types))
    raise DataError(f"the labels differ in kind (found: {kind_names})", where=where)


def build_multi_labels(values: Sequence[Sequence[str]]) -> LabelColumn:
    """Builds multi-hot labels, float32 [n, k], from lists of class names; classes are sorted by name."""
    classes = sorted({name for names in values for name in names})
    index_by_class = {name: index for index, name in enumerate(classes)}
    labels = np.zeros((len(values), len(classes)), np.float32)
    for row, names in enumerate(values):
        labels[row, [index_by_class[name] for name in names]] = 1
    return LabelColumn("multi", tuple(classes), labels)
