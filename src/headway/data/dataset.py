"""Dataset: columns over bytes in mapped shards. Random access in O(1), nothing per sample in Python.

A packed data set is a folder: shards, and `columns.safetensors`, which is written last. That file is a plain
safetensors file (any reader opens it): one tensor a column, and the description below as its metadata.
Opening maps it and reads its header only, so it takes as long for ten samples as for ten million.
"""

from __future__ import annotations

import builtins
import json
import mmap
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.data.formats import recordio
from headway.data.options import Verify

COLUMNS_FILE = "columns.safetensors"

FLAG_SPLIT = 1
"""The record holds its own magic number, so its bytes lie in several parts."""
FLAG_NOT_JPEG = 2
"""PNG or another format: the Pillow reference decodes it whatever the backend."""

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

_AGAIN = "Pack the data again, or copy the folder again."

LabelKind = Literal["class", "multi", "value"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of records: its name inside the folder and its size in bytes."""

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
    """`recordio`."""
    mode: str
    """`keep`: the bytes of the source, untouched."""
    label_kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes; of the outputs where the label is a vector; empty for a single number."""
    class_counts: tuple[int, ...]
    """Samples of each class (a sample with several labels counts for each); empty for numbers."""
    channels: int
    """1 where every image is gray, else 3."""
    common_size: tuple[int, int] | None
    """(width, height) where all images share it."""
    shards: tuple[Shard, ...]
    source: str
    """What was packed, as the user named it."""

    def to_metadata(self) -> dict[str, str]:
        return {"headway": json.dumps(asdict(self))}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> Description:
        fields = json.loads(metadata["headway"])
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        for name in ("classes", "class_counts"):
            fields[name] = tuple(fields[name])
        fields["common_size"] = tuple(fields["common_size"]) if fields["common_size"] else None
        return Description(**fields)


class Dataset:
    """Samples of one packed folder. Columns are numpy arrays mapped from the disk, one entry a sample.

    Attributes:
        shard, offset, length, crc32c, width, height, flags: see `COLUMN_TYPES`; shape [n].
        label: int64 [n] (class), float32 [n] or [n, k] (numbers, several labels).
        description: what was stored at pack time.
    """

    def __init__(self, folder: Path, columns: Mapping[str, NDArray[Any]], description: Description) -> None:
        self.folder, self.description = folder, description
        self.shard: NDArray[np.uint16] = columns["shard"]
        self.offset: NDArray[np.uint64] = columns["offset"]
        self.length: NDArray[np.uint32] = columns["length"]
        self.crc32c: NDArray[np.uint32] = columns["crc32c"]
        self.width: NDArray[np.uint32] = columns["width"]
        self.height: NDArray[np.uint32] = columns["height"]
        self.flags: NDArray[np.uint8] = columns["flags"]
        self.label: NDArray[Any] = columns["label"]
        self._names = columns.get("name")
        self._name_offset = columns.get("name_offset")
        self._shards: dict[int, _Bytes] = {}
        self._touched = np.zeros(len(self.label), np.bool_)

    def __len__(self) -> int:
        return len(self.label)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.description.classes

    @property
    def fingerprint(self) -> str:
        return self.description.fingerprint

    def name(self, sample: int) -> str:
        """The source's name of a sample (a relative path), or its number where the pack holds no names."""
        if self._names is None or self._name_offset is None:
            return str(sample)
        low, high = self._name_offset[sample], self._name_offset[sample + 1]
        return self._names[low:high].tobytes().decode()

    def read(self, ids: Sequence[int] | NDArray[np.int64]) -> list[memoryview | bytes]:
        """Image bytes of the samples, unchecked; views of the mapped shard where the record lies in one piece.

        A record in several parts that do not fit together any more is empty, so that it counts as damaged.
        """
        out: list[memoryview | bytes] = []
        for sample in ids:
            shard, offset, length = int(self.shard[sample]), int(self.offset[sample]), int(self.length[sample])
            source = self._shards.get(shard) or self._open_shard(shard)
            split = bool(self.flags[sample] & FLAG_SPLIT)
            out.append(source.join(offset, length) if split else source.cut(offset, length))
        return out

    def intact(
        self, ids: NDArray[np.int64], buffers: Sequence[memoryview | bytes], verify: Verify = "first"
    ) -> NDArray[np.bool_]:
        """Whether each record's bytes have the checksum of pack time; shape [k].

        `first` looks at a record when this process touches it for the first time: libjpeg notices only one in five
        flipped bits, and a checksum costs about a thousandth of the decoding.
        """
        good = np.ones(len(ids), np.bool_)
        if verify == "never":
            return good
        for place, (sample, data) in enumerate(zip(ids, buffers, strict=True)):
            if verify == "always" or not self._touched[sample]:
                good[place] = crc32c(data) == self.crc32c[sample]
                self._touched[sample] = good[place]
        return good

    def close(self) -> None:
        """Lets go of the mapped shards; a later read opens them again."""
        for source in self._shards.values():
            source.close()
        self._shards.clear()

    def _open_shard(self, number: int) -> _Bytes:
        path = self.folder / self.description.shards[number].name
        return self._shards.setdefault(number, _Bytes(path, by_pread=on_network(path)))


class _Bytes:
    """The bytes of one file: mapped, or read by pread where it lies on a network (a cut mapping kills the process)."""

    def __init__(self, path: Path, *, by_pread: bool) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, self._file)
        self._view: memoryview | None = None
        if not by_pread:
            self._view = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ))
            self._release()  # the mapping has a descriptor of its own

    def cut(self, offset: int, length: int) -> memoryview | bytes:
        if self._view is not None:
            return self._view[offset : offset + length]
        return os.pread(self._file, length, offset)

    def join(self, offset: int, length: int) -> bytes:
        """A split record's bytes; none where its parts are damaged, which its checksum then shows."""
        if self._view is None:
            # The header of a part is 8 bytes in place of 4 of magic number; a MiB is for the record's own and labels.
            view, offset = memoryview(os.pread(self._file, 2 * length + (1 << 20), offset)), 0
        else:
            view = self._view
        try:
            return recordio.join(view, offset, length)
        except DataError:
            return b""

    def close(self) -> None:
        # Views of the mapping may still be in use; the mapping goes with the last of them.
        self._view = None
        self._release()


def open(uri: str | os.PathLike[str]) -> Dataset:
    """Opens a packed folder in a time that does not depend on its size.

    Raises:
        UsageError: the folder is missing or is no packed data set.
        DataError: its columns or shards are damaged, missing, or of different packs.
    """
    folder = Path(uri)
    path = folder / COLUMNS_FILE
    if not path.is_file():
        raise _not_a_pack(folder)
    try:
        columns, metadata = _map_columns(path)
        description = Description.from_metadata(metadata)
    except (struct.error, LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError("the columns file is damaged", where=str(path), fix=_AGAIN) from error
    for shard in description.shards:
        _check_shard(folder / shard.name, shard, description.pack_id)
    return Dataset(folder, columns, description)


def _not_a_pack(folder: Path) -> UsageError:
    if not folder.exists():
        return UsageError("there is no such folder", where=str(folder), fix="Pack one: headway pack SRC DST.")
    parts = [part for part in ("train", "eval") if (folder / part / COLUMNS_FILE).is_file()]
    if parts:
        return UsageError("this folder holds packed parts", where=str(folder), fix=f"Name one: {folder / parts[0]}.")
    return UsageError(
        f"this is no packed data set (it has no {COLUMNS_FILE})",
        where=str(folder),
        fix="Pack it: headway pack SRC DST.",
    )


def _map_columns(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Columns as views of one mapping: safetensors is 8 bytes of header length, a JSON header, then the tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length) if length < size else b"")
        metadata = header.pop("__metadata__")
        end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        if size != end:
            raise DataError(f"the columns file is cut: {size} of {end} bytes", where=str(path), fix=_AGAIN)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    wrong = [name for name, kind in COLUMN_TYPES.items() if header.get(name, {}).get("dtype") != kind]
    if wrong or "label" not in header:
        what = f"columns are missing or of another type: {', '.join(wrong) or 'label'}"
        raise DataError(what, where=str(path), fix=_AGAIN)
    samples = {header[name]["shape"][0] for name in (*COLUMN_TYPES, "label")}
    if len(samples) != 1:
        raise DataError("its columns have different lengths", where=str(path), fix=_AGAIN)
    columns = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        kind = np.dtype(NUMPY_TYPES[entry["dtype"]])
        count = (high - low) // kind.itemsize
        columns[name] = np.frombuffer(mapped, kind, count, 8 + length + low).reshape(entry["shape"])
    return columns, metadata


def _check_shard(path: Path, shard: Shard, pack_id: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError("a shard is missing", where=str(path), fix="Copy the folder again, or pack again.") from None
    if recordio.pack_id_of(path) != pack_id:
        raise DataError(
            "this shard belongs to another pack",
            where=str(path),
            fix="Keep the files of one pack together; pack again.",
        )
    if size != shard.size:
        raise DataError(
            f"the shard has {size} bytes and should have {shard.size}",
            where=str(path),
            fix="Copy it again, or pack again.",
        )


def on_network(path: Path) -> bool:
    """Whether a file lies on a network file system."""
    best, kind, resolved = "", "", path.resolve()
    with builtins.open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, point, name, *_ = line.split()
            if len(point) >= len(best) and resolved.is_relative_to(point):
                best, kind = point, name
    return kind in {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "ceph",
        "beegfs",
        "gpfs",
        "9p",
        "fuse.sshfs",
        "fuse.gcsfuse",
    }
