"""Dataset: columns over bytes in mapped shards. Random access in O(1), nothing per sample in Python.

A packed data set is a folder: shards, and `columns.safetensors`, which is written last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.data import native
from headway.data.columns import AGAIN, COLUMNS_FILE, PACK_FORMATS, Description, Shard, load_columns, name_of
from headway.data.data_recipe import VerifyMode
from headway.data.formats import recordio, trailer
from headway.data.mapping import addresses_of, check
from headway.data.records import Records
from headway.data.shards import LooseFiles, MappedShards, PreadShards, Source, on_network


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
        description: Description,
        *,
        mapped: bool | None = None,
        source: Source | None = None,
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
        self._columns, self._addresses = columns, addresses_of(columns.values())
        self._touched = np.zeros(len(self.label), np.bool_)
        self.source: Source
        if source is not None:
            self.source = source
        elif description.format == "folder":
            self.source = LooseFiles(folder, columns)
        elif mapped is False or (mapped is None and (on_network(folder) or not native.is_available())):
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
        return name_of(self._columns, sample)

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
        check(self._addresses)

    def unchecked(self, ids: NDArray[np.int64], verify: VerifyMode = "first") -> NDArray[np.bool_]:
        """Which records' checksums are to be looked at; shape [k].

        `first` looks at a record until this data set has once found it good (`checked`): libjpeg notices only one in
        five flipped bits, and a checksum costs about a thousandth of the decoding.
        """
        if verify == "first":
            return ~self._touched[ids]
        return np.full(len(ids), verify == "always")

    def checked(self, ids: NDArray[np.int64]) -> None:
        """Notes that these records were found good."""
        self._touched[ids] = True

    def close(self) -> None:
        """Lets go of the shards; a later read opens them again. Records that were read stay."""
        self.source.close()


def open(
    uri: str | os.PathLike[str],
    *,
    mapped: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Opens a packed folder in a time that does not depend on its size; or foreign data, which are scanned once.

    A pack may lie at an address such as `s3://bucket/imagenet/train`, foreign data only on this machine.

    A scan reads everything once, for sizes and checksums; its columns are kept beside the data (see `foreign`), so that
    the next opening is as fast as a pack's. Foreign data are

    - a folder of images, CLASS/NAME.jpg, or a CSV or JSONL file that lists them;
    - RecordIO (`.rec`) and tar in the layout of WebDataset: a file, a folder of shards, or a pattern such as
      `train-{000..146}.tar` or `train-*.rec`;
    - LMDB: Caffe's `Datum`, or the keys of WebDataset;
    - IDX (MNIST and its like), `.npy`, CIFAR-10 and CIFAR-100 (binary files and python archives, also as `.tar.gz`).

    Where a folder or an archive holds several data sets, one is named as if it were a folder inside:
    `cifar-10-batches-bin/train`, `mnist/test` (of `t10k-`), `shards/val` (of `val-000.tar`...). CIFAR-100's coarse
    labels are `cifar-100-python/train?labels=coarse`.

    Args:
        mapped: whether shards are mapped or read by pread; None: mapped, except on a network file system.
        progress: called during a scan with (samples done, samples in all).

    Raises:
        UsageError: there is nothing at `uri`, or nothing of a known format; it holds several data sets.
        DataError: columns or shards are damaged, missing, or of different packs; foreign data are damaged.
    """
    text = os.fspath(uri).removeprefix("file://")
    if "://" in text:
        from headway.data.tiers.opened import open_remote  # it needs Dataset

        return open_remote(text)
    folder = Path(text)
    path = folder / COLUMNS_FILE
    if not path.is_file():
        return _not_packed(folder, mapped, progress)
    columns, description, _ = load_columns(path)
    if description.format not in PACK_FORMATS:
        what = f"it is packed in a format that is not known here, {description.format!r}"
        raise DataError(what, where=str(path), fix=AGAIN)
    for shard in description.shards:
        _check_shard(folder / shard.name, shard, description)
    return Dataset(folder, columns, description, mapped=mapped)


def _not_packed(path: Path, mapped: bool | None, progress: Callable[[int, int], None] | None) -> Dataset:
    parts = [part for part in ("train", "eval") if (path / part / COLUMNS_FILE).is_file()]
    if parts:
        raise UsageError("this folder holds packed parts", where=str(path), fix=f"Name one: {path / parts[0]}.")
    from headway.data.foreign import open_foreign  # it needs Dataset

    return open_foreign(os.fspath(path), mapped=mapped, progress=progress)


def _check_shard(path: Path, shard: Shard, description: Description) -> None:
    again = "Copy the folder again, or pack again."
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError("a shard is missing", where=str(path), fix=again) from None
    except (OSError, ValueError) as error:  # a name that is none
        raise DataError(f"a shard cannot be opened ({error})", where=str(path.parent), fix=again) from None
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise DataError("this shard is no plain file", where=str(path), fix=again)
    size = status.st_size
    pack_id_of = recordio.pack_id_of if description.format == "recordio" else trailer.pack_id_of
    if pack_id_of(path) != description.pack_id:
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
