"""Dataset: columns over bytes in mapped shards. Random access in O(1), nothing per sample in Python.

A packed data set is a folder: shards, and `columns.safetensors`, which is written last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.data import native
from headway.data.columns import DatasetDescription, decode_name
from headway.data.data_recipe import VerifyMode
from headway.data.mapping import check_mappings, get_addresses
from headway.data.records import Records
from headway.data.shards import LooseFiles, MappedShards, PreadShards, RecordReader, is_on_network


@final
class Dataset:
    """Samples of one data set. Columns are numpy arrays mapped from the disk, one entry a sample.

    Args:
        folder: what the names of shards are relative to.
        mapped: whether shards are mapped or read by pread; None: mapped, except on a network file system and where the
            native core is not there, which guards what is mapped.
        source: where bytes are read from, where that is no local folder.

    Attributes:
        shard, offset, length, crc32c, width, height, flags: see `COLUMN_TYPES`; shape [n].
        label: int64 [n] (class), float32 [n] or [n, k] (numbers, several labels).
        description: what was stored at pack time.
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
        self._columns, self._addresses = columns, get_addresses(columns.values())
        self._touched = np.zeros(len(self.label), np.bool_)
        self.source: RecordReader
        if source is not None:
            self.source = source
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
        """Bytes of the decoded set; None if its images have different sizes."""
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
        """The source's name of a sample (a relative path), or its number where there are no names."""
        return decode_name(self._columns, sample)

    def read(self, ids: Sequence[int] | NDArray[np.int64]) -> Records:
        """Returns the records of these samples without checking them; a damaged record may be short or empty.

        Records in mapped shards are not copied; those split by RecordIO's magic number, read by pread, or files of
        their own are, into memory that the Records keep.

        Raises:
            DataError: a shard cannot be opened, or was cut while it was in use.
        """
        self.check_columns()
        records = self.source.read(np.asarray(ids, np.int64))
        self.check_columns()
        return records

    def check_columns(self) -> None:
        """Raises DataError where the columns file was cut while it was in use, so that what was read may be zeros."""
        check_mappings(self._addresses)

    def select_unchecked(self, ids: NDArray[np.int64], verify: VerifyMode = "first") -> NDArray[np.bool_]:
        """Which records' checksums are to be looked at; shape [k].

        `first` looks at a record until it was found good once (`mark_checked`): libjpeg notices only one in
        five flipped bits, and a checksum costs about a thousandth of the decoding.
        """
        if verify == "first":
            return ~self._touched[ids]
        return np.full(len(ids), verify == "always")

    def mark_checked(self, ids: NDArray[np.int64]) -> None:
        """Notes that these records were found good."""
        self._touched[ids] = True

    def close(self) -> None:
        """Lets go of the shards; a later read opens them again. Records that were read stay."""
        self.source.close()
