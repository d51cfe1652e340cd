"""Dataset: the columns of a data set and the bytes of its shards. Random access in O(1), no Python object per sample.

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
    """Samples of one data set. Columns are numpy arrays mapped from the disk, with one entry for each sample.

    Args:
        folder: the names of shards are relative to it.
        columns: arrays by name; see `COLUMN_TYPES`.
        description: facts about the whole data set.
        mapped: True maps shards, False reads them by pread. None maps, except on a network file system or without the
            native core, which guards mapped files.
        source: reads the records, if they are not in a local folder.

    Attributes:
        shard, offset, length, crc32c, width, height, flags: see `COLUMN_TYPES`; shape [n].
        label: int64 [n] (class), float32 [n] or [n, k] (numbers, several labels).
        description: facts about the whole data set.
        source: reads the records.
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
        self.folder = folder
        self.description = description
        self.shard: NDArray[np.uint16] = columns["shard"]
        self.offset: NDArray[np.uint64] = columns["offset"]
        self.length: NDArray[np.uint32] = columns["length"]
        self.crc32c: NDArray[np.uint32] = columns["crc32c"]
        self.width: NDArray[np.uint32] = columns["width"]
        self.height: NDArray[np.uint32] = columns["height"]
        self.flags: NDArray[np.uint8] = columns["flags"]
        self.label: NDArray[Any] = columns["label"]
        self._columns = columns
        # `check_columns` checks only the mapped file that contains these addresses.
        self._addresses = get_addresses(columns.values())
        self._is_checked = np.zeros(len(self.label), np.bool_)
        self.source: RecordReader
        # On a network file system, another machine may truncate a mapped file, which ends the process with SIGBUS.
        if source is not None:
            self.source = source
        elif description.format == "folder":
            self.source = LooseFiles(folder, columns)
        elif mapped is False or (mapped is None and (is_on_network(folder) or not native.is_available())):
            self.source = PreadShards(folder, description.shards, columns)
        else:
            self.source = MappedShards(folder, description.shards, columns)

    def __repr__(self) -> str:
        description = self.description
        classes = f" in {len(description.classes)} classes" if description.label_kind == "class" else ""
        return f"Dataset of {len(self):,} images{classes} ({description.format}, {description.mode}) in {self.folder}"

    def __len__(self) -> int:
        return len(self.label)

    @property
    def columns(self) -> Mapping[str, NDArray[Any]]:
        """All columns by name; a version in a store also has `sample_id`, uint8 [n, 32]."""
        return self._columns

    @property
    def pixel_bytes(self) -> int | None:
        """Bytes of all decoded images; None if their sizes differ."""
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

        Records in mapped shards are not copied. Records that are split by RecordIO's magic number, read by pread, or
        separate files are copied into memory that the Records own.

        Raises DataError if a shard cannot be opened, or was truncated while it was in use.
        """
        self.check_columns()
        # Checked before and after: a column that reads as zeros would point at the wrong bytes.
        records = self.source.read(np.asarray(ids, np.int64))
        self.check_columns()
        return records

    def check_columns(self) -> None:
        """Raises DataError if the columns file was truncated while in use, so that values read from it may be zeros."""
        check_mappings(self._addresses)

    def select_unchecked(self, ids: NDArray[np.int64], verify: VerifyMode = "first") -> NDArray[np.bool_]:
        """Returns a mask of the records whose checksum must be compared; bool [k].

        With `first`, these are the records that `mark_checked` has not marked. libjpeg notices only one in
        five flipped bits, and a checksum costs about a thousandth of decoding.
        """
        # Data on a disk rarely change, so one check of each record finds nearly all damage.
        if verify == "first":
            # One byte for each sample, set by any thread; a lost update only costs another checksum.
            return ~self._is_checked[ids]
        return np.full(len(ids), verify == "always")

    def mark_checked(self, ids: NDArray[np.int64]) -> None:
        """Marks records whose checksum was right, for `select_unchecked`."""
        self._is_checked[ids] = True

    def close(self) -> None:
        """Releases the shards; a later read opens them again. Records already read stay valid."""
        self.source.close()
