"""Columns: what is known of every sample, as arrays in one file that is mapped and never read as a whole.

`columns.safetensors` is a plain safetensors file (any reader opens it): one tensor a column, and the description below
as its metadata. Mapping it takes as long for ten samples as for ten million.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
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

AGAIN = "Pack the data again, or copy the folder again."

LabelKind = Literal["class", "multi", "value"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of records: its path, relative to the data set's folder, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Description:
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
        return {"headway": json.dumps(asdict(self))}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> Description:
        fields = json.loads(metadata["headway"])
        fields["shards"] = tuple(
            Shard(name=os.fspath(shard["name"]), size=operator.index(shard["size"]))  # of a damaged file: TypeError
            for shard in fields["shards"]
        )
        for name in ("classes", "class_counts", "parts"):
            fields[name] = tuple(fields.get(name, ()))
        fields["common_size"] = tuple(fields["common_size"]) if fields["common_size"] else None
        found = Description(**fields)
        wrong = [name for name, right in _FORM.items() if not right(getattr(found, name))]
        if wrong:
            raise ValueError(f"the description has a wrong {wrong[0]}")
        return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FORM: Mapping[str, Callable[[Any], bool]] = {
    "pack_id": lambda value: type(value) is int and 0 <= value < 1 << 64,
    **dict.fromkeys(("fingerprint", "format", "mode", "source"), _is_text),
    "label_kind": lambda value: value in get_args(LabelKind),
    "classes": lambda value: all(map(_is_text, value)),
    "class_counts": lambda value: all(map(_is_count, value)),
    "channels": lambda value: _is_count(value) and value > 0,
    "common_size": lambda value: value is None or (len(value) == 2 and all(map(_is_count, value))),
    "shards": lambda value: all(_is_text(shard.name) and _is_count(shard.size) for shard in value),
    "parts": lambda value: all(map(_is_text, value)),
}
"""What each field of a description that was read has to be."""


def load_columns(path: Path) -> tuple[dict[str, NDArray[Any]], Description, dict[str, str]]:
    """Columns as views of one mapping, the description, and all metadata.

    Raises DataError where the file is damaged, or is no columns file.
    """
    try:
        columns, metadata = _map(path)
        return columns, Description.from_metadata(metadata), metadata
    except (
        *(struct.error, LookupError, ValueError, TypeError, AttributeError, OverflowError, OSError),
        RecursionError,  # a header of brackets
    ) as error:
        raise DataError("the columns file is damaged", where=str(path), fix=AGAIN) from error


def name_of(columns: Mapping[str, NDArray[Any]], sample: int) -> str:
    """The source's name of a sample (a relative path), or its number where there are no names."""
    if "name" not in columns:
        return str(sample)
    low, high = columns["name_offset"][sample], columns["name_offset"][sample + 1]
    return columns["name"][low:high].tobytes().decode(errors="backslashreplace")


def fingerprint_of(columns: Mapping[str, NDArray[Any]]) -> str:
    """sha256 over all columns, in order of name, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        digest.update(column.data)
    return digest.hexdigest()


def _map(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """A safetensors file is 8 bytes of header length, a JSON header, then the tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length) if length < size else b"")
        metadata = header.pop("__metadata__")
        end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        if size != end:
            raise DataError(f"the columns file is cut: {size} of {end} bytes", where=str(path), fix=AGAIN)
        mapped = map_file(file, path)
    wrong = [name for name, kind in COLUMN_TYPES.items() if header.get(name, {}).get("dtype") != kind]
    if wrong or "label" not in header:
        what = f"columns are missing or of another type: {', '.join(wrong) or 'label'}"
        raise DataError(what, where=str(path), fix=AGAIN)
    samples = {header[name]["shape"][0] for name in (*COLUMN_TYPES, "label")}
    if len(samples) != 1:
        raise DataError("its columns have different lengths", where=str(path), fix=AGAIN)
    ends = header.get("name_offset", {}).get("shape")
    if ("name" in header) != (ends is not None) or ends not in (None, [samples.pop() + 1]):
        raise DataError("the samples' names are incomplete", where=str(path), fix=AGAIN)
    columns = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        kind = np.dtype(NUMPY_TYPES[entry["dtype"]])
        count = (high - low) // kind.itemsize
        columns[name] = np.frombuffer(mapped, kind, count, 8 + length + low).reshape(entry["shape"])
    return columns, metadata
