"""Dataset: the columns of a data set over the bytes of its shards. Random access in O(1), no Python object a sample.

A pack is a folder of shards and `columns.safetensors`, which is written last. `headway.data.opening` opens it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.mounts import is_on_network
from headway.data import native
from headway.data.columns import DatasetDescription, decode_name
from headway.data.data_recipe import VerifyMode
from headway.data.mapping import check_mappings, get_addresses
from headway.data.records import Records
from headway.data.shards import LooseFiles, MappedShards, PreadShards, RecordReader


@final
class Dataset:
    """Samples of one data set. Columns are numpy arrays mapped from the disk, one entry a sample.

    Args:
        folder: the names of shards are relative to it.
        mapped: True maps shards, False reads them by pread. None maps, except on a network file system or without the
            native core, which guards mapped files.
        source: reads the records, if they are not in a local folder.

    Attributes:
        shard, offset, length, crc32c, width, height, flags: see `COLUMN_TYPES`; shape [n].
        label: int64 [n] (class), float32 [n] or [n, k] (numbers, several labels).
        description: facts stored at pack time.
    """

    def __init__(
        self,
        folder: Path,
        columns: Mapping[str, NDArray[Any]],
        description: DatasetDescription,
        *,
        mapped: bool | None = None,
        source: RecordReader | None = None,
    ) -> None:
        self.folder, self.description = folder, description
        self.shard: NDArray[np.uint16] = columns["shard"]
        self.offset: NDArray[np.uint64] = columns["offset"]
        self.length: NDArray[np.uint32] = columns["length"]
        self.crc32c: NDArray[np.uint32] = columns["crc32c"]
        self.width: NDArray[np.uint32] = columns["width"]
        self.height: NDArray[np.uint32] = columns["height"]
        self.flags: NDArray[np.uint8] = columns["flags"]
        self.label: NDArray[Any] = columns["label"]
        # `check_columns` compares addresses, so it looks at the columns file alone.
        self._columns, self._addresses = columns, get_addresses(columns.values())
        self._touched = np.zeros(len(self.label), np.bool_)
        self.source: RecordReader
        # A network file system may cut a mapped file at any time, which ends the process with SIGBUS.
        if source is not None:
            self.source = source
        # A reader for each kind: loose files, pread, or mapped shards.
        elif description.format == "folder":
            self.source = LooseFiles(folder, columns)
        elif mapped is False or (mapped is None and (is_on_network(folder) or not native.is_available())):
            self.source = PreadShards(folder, description.shards, columns)
        else:
            self.source = MappedShards(folder, description.shards, columns)

    def __repr__(self) -> str:
        found = self.description
        classes = f" in {len(found.classes)} classes" if found.label_kind == "class" else ""
        return f"Dataset of {len(self):,} images{classes} ({found.format}, {found.mode}) in {self.folder}"

    def __len__(self) -> int:
        return len(self.label)

    @property
    def pixel_bytes(self) -> int | None:
        """Bytes of all decoded images; None if their sizes differ."""
        # Sizes are known since packing; nothing is decoded here.
        size = self.description.common_size
        return None if size is None else len(self) * size[0] * size[1] * self.description.channels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self.description.classes

    @property
    def fingerprint(self) -> str:
        """Digest of the columns: equal for equal data sets."""
        return self.description.fingerprint

    def name(self, sample: int) -> str:
        """Returns a sample's name in its source (a relative path), or its number if the data set has no names."""
        return decode_name(self._columns, sample)

    def read(self, ids: Sequence[int] | NDArray[np.int64]) -> Records:
        """Returns the records of these samples, unchecked; a damaged record may be short or empty.

        Records in mapped shards are not copied. Records split by RecordIO's magic number, read by pread, or in files of
        their own are copied into memory that the Records keep.

        Raises DataError if a shard cannot be opened, or was cut while it was in use.
        """
        self.check_columns()
        # Checked before and after: a column that reads as zeros would point at the wrong bytes.
        records = self.source.read(np.asarray(ids, np.int64))
        self.check_columns()
        return records

    def check_columns(self) -> None:
        """Raises DataError if the columns file was cut while in use, so that values read from it may be zeros."""
        check_mappings(self._addresses)

    def select_unchecked(self, ids: NDArray[np.int64], verify: VerifyMode = "first") -> NDArray[np.bool_]:
        """Returns a mask of the records whose checksum must be compared; shape [k].

        `first` compares a record's checksum until it was found good once (`mark_checked`). libjpeg notices only one in
        five flipped bits, and a checksum costs about a thousandth of decoding.
        """
        # Data at rest do not change often, so one check a record finds nearly all damage.
        if verify == "first":
            # One byte a sample, set by any thread; a lost update only costs a second checksum.
            return ~self._touched[ids]
        return np.full(len(ids), verify == "always")

    def mark_checked(self, ids: NDArray[np.int64]) -> None:
        """Notes that the checksums of these records are right."""
        self._touched[ids] = True

    def close(self) -> None:
        """Releases the shards; a later read opens them again. Records already read stay valid."""
        self.source.close()
