"""Reads Caffe's LMDB: each value is a `Datum`, a protocol buffer message.

Its fields are channels = 1, height = 2, width = 3, data = 4 (bytes), label = 5, float_data = 6 and encoded = 7. `data`
is an image file if `encoded` is set, else pixels, [channels, height, width]. Their colour order is that of the writer
(Caffe's own tool writes blue, green, red).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.core.errors import DataError
from headway.data.columns import FLAG_PLANAR, FLAG_RAW
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.foreign_records import ForeignRecords, PixelShapes, build_records, infer_labels
from headway.data.formats.lmdb import read_entries

_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _FLOAT_DATA, _ENCODED = range(1, 8)
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class Datum(NamedTuple):
    """One value: where its `data` lies in the value, and the image's shape (channels, height, width) and label."""

    offset: int
    length: int
    shape: tuple[int, int, int]
    label: int
    encoded: bool


def open_database(path: Path) -> ForeignRecords:
    """Returns the images of a database of Datum values, in the order of its keys.

    Raises DataError if a value is not a Datum of an image, or files and pixels are mixed.
    """
    view = map_path(path)
    image_places: list[tuple[int, int, int, int]] = []
    names: list[str] = []
    labels: list[int] = []
    shapes: list[tuple[int, int, int]] = []
    for name, offset, size in read_entries(path):
        where = f"{path}, {name}"
        datum = parse_datum(view[offset : offset + size], where)
        flags = 0 if datum.encoded else FLAG_RAW | FLAG_PLANAR
        if not datum.encoded and (math.prod(datum.shape) != datum.length or datum.shape[0] not in (1, 3)):
            what = f"{datum.length:,} bytes are not an image of {list(datum.shape)} (channels, height, width)"
            raise DataError(what, where=where)
        image_places.append((0, offset + datum.offset, datum.length, flags))
        names.append(name)
        labels.append(datum.label)
        shapes.append(datum.shape)
    records = build_records("lmdb", [path], image_places, infer_labels(np.array(labels, np.float64), str(path)), names)
    pixel_formats = {
        (flags, shape[0] if flags else 0) for (_, _, _, flags), shape in zip(image_places, shapes, strict=True)
    }
    # A data set is either image files or pixels of one number of channels.
    if len(pixel_formats) > 1:
        raise DataError("its images mix encoded files and pixels, or numbers of channels", where=str(path))
    if not records.flags[0]:
        return records
    channels, height, width = np.array(shapes, np.uint32).T
    return replace(records, pixels=PixelShapes(width, height, int(channels[0])))


def parse_datum(value: memoryview, where: str) -> Datum:
    """Parses a value. Raises DataError, with `where` as its place, unless it is a Datum of an image."""
    numbers = {_CHANNELS: 0, _HEIGHT: 0, _WIDTH: 0, _LABEL: 0, _ENCODED: 0}
    data: tuple[int, int] | None = None
    offset = 0
    try:
        while offset < len(value):
            # A tag is the number of the field, and 3 bits for the type of its value.
            tag, offset = _read_varint(value, offset)
            field, wire_type = tag >> 3, tag & 7
            if wire_type == _VARINT:
                number, offset = _read_varint(value, offset)
                if field in numbers:
                    numbers[field] = number
                continue
            size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
            if wire_type == _LENGTH_DELIMITED:
                size, offset = _read_varint(value, offset)
                if field == _DATA:
                    data = offset, size
            # Types 3 and 4 (groups) are obsolete, and 6 and 7 do not exist.
            if size is None or offset + size > len(value):
                raise ValueError
            offset += size
    except (ValueError, IndexError) as error:
        raise DataError("this is not a Caffe Datum, or it is damaged", where=where) from error
    if data is None:
        raise DataError("it has no image (a Datum without `data`)", where=where)
    label = numbers[_LABEL]
    shape = (numbers[_CHANNELS], numbers[_HEIGHT], numbers[_WIDTH])
    # Protocol buffers store negative numbers as 64 bits.
    return Datum(*data, shape, label - (1 << 64) if label >> 63 else label, bool(numbers[_ENCODED]))


def is_datum(value: memoryview) -> bool:
    """Returns True if a value is a Datum with an image file, or with pixels whose number matches its shape."""
    try:
        datum = parse_datum(value, "")
    except DataError:
        return False
    return datum.encoded or 0 < math.prod(datum.shape) == datum.length


def _read_varint(value: memoryview, offset: int) -> tuple[int, int]:
    """Returns the number at `offset`, and the offset after it."""
    number = 0
    for index in range(10):
        # 7 bits a byte, the lowest first; the top bit says that another byte follows.
        byte = value[offset + index]
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number & ((1 << 64) - 1), offset + index + 1
    raise ValueError("a number of more than 64 bits")
