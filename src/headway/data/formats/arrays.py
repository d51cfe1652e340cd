"""Arrays of images: IDX (MNIST), and `.npy`.

IDX: u16 zero, u8 type, u8 number of dimensions, a big-endian u32 for each, then the numbers. Images are unsigned
bytes, [n, h, w] or [n, h, w, c]. Their labels are in a file beside them, of the same name with `labels` for `images`
and `idx1` for `idx3`. Either file may be compressed (`.gz`).

`.npy`: images are uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] with c of 1 or 3, in C order. The last of four axes is
the channel axis, unless its size is neither 1 nor 3 and that of the second is. Labels of shape [n] or [n, k] are in
NAME.labels.npy, NAME_labels.npy, a file of the same name with `labels` for `images`, or labels.npy. Nothing is
unpickled.
"""

from __future__ import annotations

import functools
import io
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.formats.byte_ranges import ByteRange
from headway.data.formats.foreign_records import ForeignRecords, LabelColumn, build_row_records, infer_labels
from headway.data.formats.unpack import GZIP_MAGIC, unpack_gzip

NPY_MAGIC = b"\x93NUMPY"

_IDX_NAME = re.compile(r"(?P<set>.*?)[-_.]?images[-.]idx[34]-ubyte(\.gz)?")
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_NPY_NAME = re.compile(r"(?P<set>.*?)[-_.]?images\.npy")
_SET_ALIASES = {"t10k": "test"}
_ALLOWED_SHAPES = "[n, h, w], [n, h, w, c] or [n, c, h, w] with 1 or 3 channels"

SetOpeners = dict[str, Callable[[], ForeignRecords]]
"""Functions that open the data sets of a folder or an archive, by name."""


class _Array(NamedTuple):
    """An array in a file: its values begin at byte `offset` of the byte_range."""

    byte_range: ByteRange
    kind: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def read_values(self) -> NDArray[Any]:
        """Returns the array as a view of the mapped file."""
        count = math.prod(self.shape)
        if not count:
            return np.zeros(self.shape, self.kind)
        return np.frombuffer(self.byte_range.view(), self.kind, count, self.offset).reshape(self.shape)


def find_idx_sets(files: Mapping[str, ByteRange]) -> SetOpeners:
    """Returns the data sets of a folder in MNIST's layout: `train-images-idx3-ubyte` is train, `t10k-` is test."""
    matches = {name: _IDX_NAME.fullmatch(name) for name in sorted(files)}
    return {
        _SET_ALIASES.get(match["set"], match["set"] or "images"): functools.partial(open_idx, files[name].path)
        for name, match in matches.items()
        if match
    }


def find_npy_sets(files: Mapping[str, ByteRange]) -> SetOpeners:
    """Returns the data sets of a folder with images.npy, or with train_images.npy and test_images.npy."""
    matches = {name: _NPY_NAME.fullmatch(name) for name in sorted(files)}
    return {
        match["set"] or "images": functools.partial(open_npy, files[name].path)
        for name, match in matches.items()
        if match
    }


def is_idx(head: bytes) -> bool:
    """Returns True if a file that begins with these bytes contains images in IDX."""
    return len(head) >= 4 and head[:3] == b"\0\0\x08" and head[3] in (3, 4)


def open_idx(path: Path) -> ForeignRecords:
    """Returns the images of an IDX file. Raises DataError if it or its labels are damaged or missing."""
    # One of the two files may be compressed and the other not.
    labels_path = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    alternative_path = (
        labels_path.with_suffix("") if labels_path.suffix == ".gz" else labels_path.with_name(f"{labels_path.name}.gz")
    )
    labels_file = next(
        (candidate for candidate in (labels_path, alternative_path) if candidate.is_file() and candidate != path), None
    )
    if labels_file is None:
        raise DataError("its labels are missing", where=str(path), fix=f"Put them into {labels_path}.")
    return _build_array_records(_locate_idx_array(path), _locate_idx_array(labels_file), "idx", (path, labels_file))


def open_npy(path: Path) -> ForeignRecords:
    """Returns the images of an `.npy` file. Raises DataError if it or its labels are damaged or missing."""
    stem = path.name.removesuffix(".npy")
    names = (f"{stem}.labels.npy", f"{stem}_labels.npy", path.name.replace("images", "labels"), "labels.npy")
    labels_file = next(
        (path.with_name(name) for name in names if name != path.name and path.with_name(name).is_file()), None
    )
    if labels_file is None:
        fix = f"Put them into {path.with_name(names[0])}."
        raise DataError("its labels are missing", where=str(path), fix=fix)
    return _build_array_records(
        _locate_npy_array(ByteRange.from_file(path)),
        _locate_npy_array(ByteRange.from_file(labels_file)),
        "npy",
        (path, labels_file),
    )


def _build_array_records(images: _Array, labels: _Array, format: str, watched: tuple[Path, Path]) -> ForeignRecords:
    where = str(watched[0])
    if images.kind != np.uint8 or not 3 <= len(images.shape) <= 4:
        what = f"images are uint8 {_ALLOWED_SHAPES}, not {images.kind} {list(images.shape)}"
        fix = (
            "Save all of them, one after the other." if images.kind == np.uint8 else "Save them as bytes from 0 to 255."
        )
        raise DataError(what, where=where, fix=fix)
    num_images, *shape = images.shape
    # 3 as the last size wins: [n, 3, 3, 3] is channels last.
    is_planar = len(shape) == 3 and shape[2] not in (1, 3) and shape[0] in (1, 3)
    channels = shape.pop(0 if is_planar else 2) if len(shape) == 3 else 1
    # A record has a 32-bit length.
    if channels not in (1, 3) or min(shape) < 1 or math.prod(shape) * channels >= 1 << 32:
        what = f"this is not an array of images: its shape is {list(images.shape)}"
        fix = f"Save them as {_ALLOWED_SHAPES}."
        if len(images.shape) == 4 and 4 in (images.shape[3], images.shape[1]):
            fix = f"Drop the alpha channel: images[{'..., ' if images.shape[3] == 4 else ':, '}:3]."
        raise DataError(what, where=where, fix=fix)
    # Different counts mean that one of the files belongs to another set.
    if len(labels.shape) not in (1, 2) or labels.shape[0] != num_images:
        what = f"there are {num_images:,} images, and labels of shape {list(labels.shape)} in {watched[1]}"
        fix = f"Put one label (or one row of k labels) for each image into {watched[1].name}, or copy both files again."
        raise DataError(what, where=where, fix=fix)
    return build_row_records(
        format,
        [(images.byte_range, images.offset, num_images)],
        (shape[0], shape[1], channels),
        _build_labels(labels.read_values(), str(watched[1])),
        planar=is_planar,
        watched=watched,
    )


def _build_labels(values: NDArray[Any], where: str) -> LabelColumn:
    if values.dtype.kind not in "biuf":
        raise DataError(f"labels of type {values.dtype}", where=where, fix="Save them as numbers.")
    return infer_labels(values.astype(np.float64), where)


def _locate_idx_array(path: Path) -> _Array:
    byte_range = ByteRange.from_file(unpack_gzip(path) if path.suffix == ".gz" else path)
    # At most 255 dimensions of 4 bytes follow the 4 bytes of the header.
    header = byte_range.view()[: 4 + 4 * 255].tobytes()
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in _IDX_TYPES or len(header) < 4 + 4 * header[3]:
        # Some browsers and tools remove the ending and leave the file compressed.
        fix = "It is compressed: add .gz to its name." if header[:2] == GZIP_MAGIC else "Copy it again."
        raise DataError("this is not an IDX file", where=str(path), fix=fix)
    shape = struct.unpack_from(f">{header[3]}I", header, 4)
    return _check_size(_Array(byte_range, np.dtype(_IDX_TYPES[header[2]]), shape, 4 + 4 * header[3]), path)


def _locate_npy_array(byte_range: ByteRange) -> _Array:
    # The length of a header has 2 or 4 bytes; numpy refuses headers over 10,000 bytes.
    file = io.BytesIO(byte_range.view()[: 1 << 17].tobytes())
    try:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
        # numpy warns about headers written by Python 2.
        with warnings.catch_warnings(action="ignore"):
            shape, is_fortran_order, dtype = read_header(file)
    except Exception as error:
        # numpy evaluates the header as a Python literal, which can fail in many ways.
        raise DataError("this is not an .npy file, or its header is damaged", where=str(byte_range)) from error
    # Arrays of objects are pickles, which are never loaded.
    if dtype.hasobject or min(shape, default=0) < 0:
        raise DataError(f"an array of {dtype} {list(shape)}", where=str(byte_range), fix="Save an array of numbers.")
    if is_fortran_order and len(shape) > 1:
        raise DataError("an array in Fortran order", where=str(byte_range), fix="Save it with numpy.ascontiguousarray.")
    return _check_size(_Array(byte_range, dtype, shape, file.tell()), byte_range.path)


def _check_size(array: _Array, path: Path) -> _Array:
    """Returns the array. Raises DataError if its values reach beyond the end of the file."""
    # Bytes after the array are allowed: a shard of a pack ends with a trailer.
    needed_bytes = array.offset + math.prod(array.shape) * array.kind.itemsize
    if array.byte_range.size < needed_bytes:
        what = f"the file has {array.byte_range.size:,} bytes, and its header promises {needed_bytes:,}"
        raise DataError(what, where=str(path), fix="Copy it again.")
    return array
