"""Columns: one array for each property of the samples, in a file that is mapped and never read as a whole.

`columns.safetensors` is a plain safetensors file: one tensor for each column, and the description of the data set as
its metadata. Mapping it takes the same time for ten samples as for ten million.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import open_regular
from headway.core.untrusted_json import (
    Checks,
    JsonError,
    expect_entries,
    is_sha256,
    is_text,
    is_whole_number,
    parse_object,
)
from headway.data.mapping import map_file

COLUMNS_FILE = "columns.safetensors"

FLAG_SPLIT = 1
"""The record contains RecordIO's magic number, so it is stored in several parts."""
FLAG_NOT_JPEG = 2
"""PNG or another format, which the Pillow reference decodes with every backend."""
FLAG_RAW = 4
"""Pixels without a header, uint8 [height, width, channels]; the description has the number of channels."""
FLAG_PLANAR = 8
"""Set with FLAG_RAW: the pixels are uint8 [channels, height, width]."""

COLUMN_TYPES: Mapping[str, str] = {
    "shard": "U16",
    "offset": "U64",
    "length": "U32",
    "crc32c": "U32",
    "width": "U32",
    "height": "U32",
    "flags": "U8",
}
"""safetensors types of the fixed columns, each of shape [n]. `label` is I64 [n], F32 [n] or F32 [n, k];
`name` (U8) and `name_offset` (U64 [n + 1]) hold the names of the samples as UTF-8.
"""

NUMPY_TYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64, "F32": np.float32}

PACK_FORMATS = ("recordio", "tar", "lmdb", "raw")

PACK_AGAIN = "Pack the data again, or copy the folder again."

MAX_HEADER_BYTES = 100 << 20
"""Limit of the header in safetensors."""
MAX_SHARD_BYTES = 1 << 47
"""The cache of remote records sorts them by 47 bits of their offset in the shard."""
MAX_CHANNELS = 1 << 10

LabelKind = Literal["class", "multi", "value"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of records."""

    name: str
    """Path relative to the data set's folder."""
    size: int
    """Size in bytes."""
    pack_id: int | None = None
    """Number that is stored in this shard, if it came from another pack; None: `DatasetDescription.pack_id`. Versions
    of a store share shards of many packs, whose records keep the numbers and labels of those."""


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """Facts about a whole data set, stored as metadata of the columns file."""

    pack_id: int
    """64-bit number that is stored in every shard too, so that shards of two packs cannot be mixed; a shard with a
    number of its own (`Shard.pack_id`) has that one."""
    fingerprint: str
    """SHA-256 of the columns in hexadecimal; see `compute_fingerprint`."""
    format: str
    """`recordio`, `tar`, `lmdb` or `raw` for a pack; foreign data also `folder`, `npy`, `idx` or `cifar`."""
    mode: str
    """`keep` (bytes unchanged), `seekable`, `resize=N,quality=Q`, `raw`; `foreign` for data never packed."""
    label_kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes, or of the outputs of a vector label; empty for a single number."""
    class_counts: tuple[int, ...]
    """Samples of each class (a sample with several labels counts for each); empty for numbers."""
    channels: int
    """1 if every image is gray, else 3; for raw pixels, their number of channels."""
    common_size: tuple[int, int] | None
    """(width, height) if all images have the same size, else None."""
    shards: tuple[Shard, ...]
    source: str
    """The source of the pack, as the user named it."""
    sets: tuple[str, ...] = ()
    """Names of all sets that were packed together, this one included; empty if it was packed alone."""
    record_gaps: tuple[int, ...] = ()
    """For each shard, how much larger the numbers of its records are than their samples': bad images that the machines
    before left out. Empty if there are no gaps."""

    def to_metadata(self) -> dict[str, str]:
        """Returns the metadata of the columns file, as `from_metadata` reads it."""
        # Not `asdict`, which copies each class and count.
        fields = {**vars(self), "shards": [dict(vars(shard)) for shard in self.shards]}
        # The name that the file has had from the beginning.
        fields["parts"] = fields.pop("sets")
        # Shards of a pack have its number; only those of a store have their own.
        for shard in fields["shards"]:
            if shard["pack_id"] is None:
                del shard["pack_id"]
        # Few packs have gaps; the files of the others stay as they are.
        if not self.record_gaps:
            del fields["record_gaps"]
        return {"headway": json.dumps(fields)}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> DatasetDescription:
        """Parses the metadata of a columns file. Raises ValueError, which names the entry, if one is invalid."""
        fields = parse_object(metadata["headway"])
        # The file may come from anywhere: every entry is checked before it is used.
        expect_entries({"parts": (), "record_gaps": (), **fields}, _ENTRIES)
        # Packs with numbers as labels have names of outputs and no counts.
        if len(fields["class_counts"]) not in (0, len(fields["classes"])):
            raise JsonError("it has more or fewer class_counts than classes")
        if len(fields.get("record_gaps", ())) not in (0, len(fields["shards"])):
            raise JsonError("it has more or fewer record_gaps than shards")
        # JSON has no tuples.
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        fields["sets"] = fields.pop("parts", ())
        for name in ("classes", "class_counts", "sets", "record_gaps"):
            fields[name] = tuple(fields.get(name, ()))
        fields["common_size"] = tuple(fields["common_size"]) if fields["common_size"] else None
        return DatasetDescription(**fields)


def _is_pack_id(value: Any) -> bool:
    return is_whole_number(value, 0, (1 << 64) - 1)


def _is_shard(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "size"} <= value.keys() <= {"name", "size", "pack_id"}
        and isinstance(value["name"], str)
        and "\0" not in value["name"]
        and is_whole_number(value["size"], 0, MAX_SHARD_BYTES)
        and ("pack_id" not in value or _is_pack_id(value["pack_id"]))
    )


def _is_list_of(value: Any, element_type: type) -> bool:
    # `type is`, since True would count as an int.
    return isinstance(value, list | tuple) and all(type(element) is element_type for element in value)


_ENTRIES: Checks = {
    "shards": (lambda value: isinstance(value, list) and all(map(_is_shard, value)), "a list of names and sizes"),
    "pack_id": (_is_pack_id, "a number of 64 bits"),
    "fingerprint": (is_sha256, "64 hexadecimal digits"),
    "format": (is_text, "a text"),
    "mode": (is_text, "a text"),
    "label_kind": (lambda value: value in ("class", "multi", "value"), "class, multi or value"),
    "classes": (lambda value: _is_list_of(value, str), "a list of texts"),
    "class_counts": (
        lambda value: _is_list_of(value, int) and all(0 <= count < 1 << 63 for count in value),
        "a list of counts",
    ),
    "channels": (lambda value: is_whole_number(value, 1, MAX_CHANNELS), f"a number from 1 to {MAX_CHANNELS:,}"),
    "common_size": (
        lambda value: (
            value is None
            or (_is_list_of(value, int) and len(value) in (0, 2) and all(0 < side < 1 << 31 for side in value))
        ),
        "width and height, or null",
    ),
    "source": (is_text, "a text"),
    "parts": (lambda value: _is_list_of(value, str), "a list of texts"),
    "record_gaps": (
        lambda value: _is_list_of(value, int) and all(0 <= gap < 1 << 63 for gap in value),
        "a list of numbers",
    ),
}


def load_columns(path: Path) -> tuple[dict[str, NDArray[Any]], DatasetDescription, dict[str, str]]:
    """Maps a columns file, and returns its columns, its description and all its metadata.

    Raises DataError if the file is damaged, or is not a columns file.
    """
    try:
        columns, metadata = _map_columns(path)
        return columns, DatasetDescription.from_metadata(metadata), metadata
    except (struct.error, LookupError, ValueError, TypeError, AttributeError, OverflowError, OSError) as error:
        # Only our own ValueErrors and JSON errors have text that helps the user.
        reason = f" ({error})" if type(error) is ValueError or isinstance(error, JsonError) else ""
        raise DataError(f"the columns file is damaged{reason}", where=str(path), fix=PACK_AGAIN) from error


def decode_name(columns: Mapping[str, NDArray[Any]], sample: int) -> str:
    """Returns a sample's name in its source (a relative path), or its number if the data set has no names."""
    if "name" not in columns:
        return str(sample)
    # Names are stored end to end; sample i has bytes [offset[i], offset[i + 1]).
    begin, end = columns["name_offset"][sample], columns["name_offset"][sample + 1]
    return columns["name"][begin:end].tobytes().decode(errors="backslashreplace")


def compute_fingerprint(columns: Mapping[str, NDArray[Any]]) -> str:
    """Returns the SHA-256 of all columns, sorted by name, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        # Name, type and shape are part of the digest: equal bytes of another shape are another data set.
        column = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        digest.update(column.data)
    return digest.hexdigest()


def find_common_size(columns: Mapping[str, NDArray[Any]]) -> tuple[int, int] | None:
    """Returns (width, height) if all images share it, else None."""
    width, height = columns["width"], columns["height"]
    is_common = bool((width == width[0]).all() and (height == height[0]).all())
    return (int(width[0]), int(height[0])) if is_common else None


def count_classes(label_kind: LabelKind, labels: NDArray[Any], num_classes: int) -> tuple[int, ...]:
    """Returns the number of samples of each class; a sample with several labels counts for each. Empty for numbers."""
    if label_kind == "value":
        return ()
    if label_kind == "multi":
        return tuple(np.count_nonzero(labels, axis=0).tolist())
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


def _check_column(name: str, entry: Any) -> None:
    """Raises ValueError unless the bytes of a column fit its shape and type, so no view reaches beyond them."""
    dtype = np.dtype(NUMPY_TYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    numbers = [begin, end, *shape]
    if not all(map(is_whole_number, numbers)) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"column {name!r:.50} has bytes {begin!r:.30} to {end!r:.30} for the shape {shape!r:.60}")


def _map_columns(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Maps a safetensors file: 8 bytes of header length, a JSON header, then the tensors."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        # The length comes from the file: reading only up to the limit keeps a damaged one from filling memory.
        if header_bytes > min(size, MAX_HEADER_BYTES):
            raise ValueError(f"its header has {header_bytes:,} bytes")
        header = parse_object(file.read(header_bytes))
        # safetensors allows only strings as metadata, so the description is JSON.
        metadata = header.pop("__metadata__")
        for name, entry in header.items():
            _check_column(name, entry)
        expected_bytes = 8 + header_bytes + max(entry["data_offsets"][1] for entry in header.values())
        # Reading the missing pages of a truncated file would raise SIGBUS.
        if size != expected_bytes:
            raise DataError(
                f"the columns file is cut: {size} of {expected_bytes} bytes", where=str(path), fix=PACK_AGAIN
            )
        mapping = map_file(file, path)
    # The layout is valid; the checks below are about the content.
    wrong_columns = [name for name, dtype in COLUMN_TYPES.items() if header.get(name, {}).get("dtype") != dtype]
    if wrong_columns or "label" not in header:
        what = f"columns are missing or of another type: {', '.join(wrong_columns) or 'label'}"
        raise DataError(what, where=str(path), fix=PACK_AGAIN)
    wrong_rank = [
        name for name in (*COLUMN_TYPES, "name", "name_offset") if len(header.get(name, {}).get("shape", [0])) != 1
    ]
    if wrong_rank or len(header["label"]["shape"]) not in (1, 2):
        what = f"columns have the wrong number of dimensions: {', '.join(wrong_rank) or 'label'}"
        raise DataError(what, where=str(path), fix=PACK_AGAIN)
    # Each sample has an entry in every column.
    lengths = {header[name]["shape"][0] for name in (*COLUMN_TYPES, "label")}
    if len(lengths) != 1:
        raise DataError("its columns have different lengths", where=str(path), fix=PACK_AGAIN)
    # Names are optional, but `name` and its offsets come together, one offset more than samples.
    offset_shape = header.get("name_offset", {}).get("shape")
    if ("name" in header) != (offset_shape is not None) or offset_shape not in (None, [lengths.pop() + 1]):
        raise DataError("the samples' names are incomplete", where=str(path), fix=PACK_AGAIN)
    columns = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(NUMPY_TYPES[entry["dtype"]])
        # Views of one mapping: a column costs no memory until its pages are read.
        count = (end - begin) // dtype.itemsize
        columns[name] = np.frombuffer(mapping, dtype, count, 8 + header_bytes + begin).reshape(entry["shape"])
    return columns, metadata
