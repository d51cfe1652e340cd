"""Columns: what is known of every sample, as arrays in one file that is mapped and never read as a whole.

`columns.safetensors` is a plain safetensors file (any reader opens it): one tensor a column, and the description below
as its metadata. Mapping it takes as long for ten samples as for ten million.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import open_regular
from headway.core.untrusted_json import JsonError, is_sha256, is_whole_number, parse_object
from headway.data.mapping import map_file

COLUMNS_FILE = "columns.safetensors"

FLAG_SPLIT = 1
"""The record holds RecordIO's magic number, so its bytes lie in several parts."""
FLAG_NOT_JPEG = 2
"""PNG or another format: the Pillow reference decodes it whatever the backend."""
FLAG_RAW = 4
"""Pixels, uint8 [height, width, channels], with no header; the description says how many channels."""
FLAG_PLANAR = 8
"""With FLAG_RAW: uint8 [channels, height, width]."""

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
`name` (U8) and `name_offset` (U64 [n + 1]) hold the samples' source names as UTF-8."""

NUMPY_TYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64, "F32": np.float32}

PACK_FORMATS = ("recordio", "tar", "lmdb", "raw")

PACK_AGAIN = "Pack the data again, or copy the folder again."

HEADER_LIMIT_BYTES = 100 << 20
"""Most of the header, as of every safetensors file."""
SHARD_LIMIT_BYTES = 1 << 47
"""Of a shard: what is kept of a remote one orders its records by so many bits of their place."""
CHANNELS_LIMIT = 1 << 10

LabelKind = Literal["class", "multi", "value"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of records: its path, relative to the data set's folder, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """What is known of a data set without a look at its samples; stored as metadata of the columns file."""

    pack_id: int
    """64 bits that every shard of the pack carries too, so that shards of two packs cannot be mixed."""
    fingerprint: str
    """sha256 over the columns, in hexadecimal."""
    format: str
    """Of a pack: `recordio`, `tar`, `lmdb` or `raw`. Of foreign files also `folder`, `npy`, `idx` or `cifar`."""
    mode: str
    """`keep` (the source's bytes, untouched), `seekable`, `resize=N,quality=Q`, `raw`; `foreign`: never packed."""
    label_kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes; of the outputs where the label is a vector; empty for a single number."""
    class_counts: tuple[int, ...]
    """Samples of each class (a sample with several labels counts for each); empty for numbers."""
    channels: int
    """1 where every image is gray, else 3; of raw pixels as many as there are."""
    common_size: tuple[int, int] | None
    """(width, height) where all images share it."""
    shards: tuple[Shard, ...]
    source: str
    """What was packed, as the user named it."""
    parts: tuple[str, ...] = ()
    """Names of the folders that were packed together with this one, and its own; empty where it was packed alone."""

    def to_metadata(self) -> dict[str, str]:
        """Returns the metadata of the columns file that `from_metadata` reads."""
        return {"headway": json.dumps(asdict(self))}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> DatasetDescription:
        """Raises ValueError that names the first entry that is missing or wrong."""
        fields = parse_object(metadata["headway"])
        shards = fields.get("shards")
        _require(isinstance(shards, list) and all(map(_is_shard, shards)), "shards")
        for name, check in _ENTRIES.items():
            _require(check(fields.get(name, () if name == "parts" else None)), name)
        _require(not fields["class_counts"] or len(fields["class_counts"]) == len(fields["classes"]), "class_counts")
        fields["shards"] = tuple(Shard(name=shard["name"], size=shard["size"]) for shard in fields["shards"])
        for name in ("classes", "class_counts", "parts"):
            fields[name] = tuple(fields.get(name, ()))
        fields["common_size"] = tuple(fields["common_size"]) if fields["common_size"] else None
        return DatasetDescription(**fields)


def _require(right: bool, name: str) -> None:
    if not right:
        raise ValueError(f"its description has no good {name}")


def _is_shard(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "size"}
        and isinstance(value["name"], str)
        and "\0" not in value["name"]
        and is_whole_number(value["size"], 0, SHARD_LIMIT_BYTES)
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(one) is kind for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_ENTRIES: Mapping[str, Callable[[Any], bool]] = {
    "pack_id": lambda value: is_whole_number(value, 0, (1 << 64) - 1),
    "fingerprint": is_sha256,
    "format": _is_text,
    "mode": _is_text,
    "label_kind": lambda value: value in ("class", "multi", "value"),
    "classes": lambda value: _is_list_of(value, str),
    "class_counts": lambda value: _is_list_of(value, int) and all(0 <= count < 1 << 63 for count in value),
    "channels": lambda value: is_whole_number(value, 1, CHANNELS_LIMIT),
    "common_size": lambda value: (
        value is None
        or (_is_list_of(value, int) and len(value) in (0, 2) and all(0 < side < 1 << 31 for side in value))
    ),
    "source": _is_text,
    "parts": lambda value: _is_list_of(value, str),
}
"""What an entry of a description must be."""


def load_columns(path: Path) -> tuple[dict[str, NDArray[Any]], DatasetDescription, dict[str, str]]:
    """Columns as views of one mapping, the description, and all metadata.

    Raises DataError where the file is damaged, or is no columns file.
    """
    try:
        columns, metadata = _map_columns(path)
        return columns, DatasetDescription.from_metadata(metadata), metadata
    except (struct.error, LookupError, ValueError, TypeError, AttributeError, OverflowError, OSError) as error:
        why = f" ({error})" if type(error) is ValueError or isinstance(error, JsonError) else ""
        raise DataError(f"the columns file is damaged{why}", where=str(path), fix=PACK_AGAIN) from error


def decode_name(columns: Mapping[str, NDArray[Any]], sample: int) -> str:
    """The source's name of a sample (a relative path), or its number where there are no names."""
    if "name" not in columns:
        return str(sample)
    low, high = columns["name_offset"][sample], columns["name_offset"][sample + 1]
    return columns["name"][low:high].tobytes().decode(errors="backslashreplace")


def compute_fingerprint(columns: Mapping[str, NDArray[Any]]) -> str:
    """sha256 over all columns, in order of name, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        digest.update(column.data)
    return digest.hexdigest()


def _check_column(name: str, entry: Any) -> None:
    """Its bytes are those of its shape and type, so that no view of it reaches beyond them."""
    kind = np.dtype(NUMPY_TYPES[entry["dtype"]])
    (low, high), shape = entry["data_offsets"], entry["shape"]
    numbers = [low, high, *shape]
    if not all(map(is_whole_number, numbers)) or high - low != math.prod(shape) * kind.itemsize:
        raise ValueError(f"column {name!r:.50} has bytes {low!r:.30} to {high!r:.30} for the shape {shape!r:.60}")


def _map_columns(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """A safetensors file is 8 bytes of header length, a JSON header, then the tensors."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size, HEADER_LIMIT_BYTES):
            raise ValueError(f"its header has {length:,} bytes")
        header = parse_object(file.read(length))
        metadata = header.pop("__metadata__")
        for name, entry in header.items():
            _check_column(name, entry)
        end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        if size != end:
            raise DataError(f"the columns file is cut: {size} of {end} bytes", where=str(path), fix=PACK_AGAIN)
        mapped = map_file(file, path)
    wrong = [name for name, kind in COLUMN_TYPES.items() if header.get(name, {}).get("dtype") != kind]
    if wrong or "label" not in header:
        what = f"columns are missing or of another type: {', '.join(wrong) or 'label'}"
        raise DataError(what, where=str(path), fix=PACK_AGAIN)
    deep = [name for name in (*COLUMN_TYPES, "name", "name_offset") if len(header.get(name, {}).get("shape", [0])) != 1]
    if deep or len(header["label"]["shape"]) not in (1, 2):
        what = f"columns have the wrong number of dimensions: {', '.join(deep) or 'label'}"
        raise DataError(what, where=str(path), fix=PACK_AGAIN)
    samples = {header[name]["shape"][0] for name in (*COLUMN_TYPES, "label")}
    if len(samples) != 1:
        raise DataError("its columns have different lengths", where=str(path), fix=PACK_AGAIN)
    ends = header.get("name_offset", {}).get("shape")
    if ("name" in header) != (ends is not None) or ends not in (None, [samples.pop() + 1]):
        raise DataError("the samples' names are incomplete", where=str(path), fix=PACK_AGAIN)
    columns = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        kind = np.dtype(NUMPY_TYPES[entry["dtype"]])
        count = (high - low) // kind.itemsize
        columns[name] = np.frombuffer(mapped, kind, count, 8 + length + low).reshape(entry["shape"])
    return columns, metadata
