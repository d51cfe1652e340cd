"""Readers of records in local files: mapped shards, shards read by pread, or one file a record.

Each has `read(ids) -> Records` and `close()`. A record whose bytes are incomplete is short or empty, so that its
checksum fails.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import open_regular
from headway.core.random_keys import UInt64
from headway.data.columns import FLAG_SPLIT, Shard
from headway.data.formats import recordio
from headway.data.formats.byte_ranges import build_read_error, map_path
from headway.data.mapping import check_mappings
from headway.data.records import Records

Ids = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]

_MAX_SHARDS = 1 << 16
"""The column of shard numbers has 16 bits."""


@final
class _RecordPlaces:
    """Offsets and lengths from the columns, which may be damaged: a record outside its shard gets length 0.

    Attributes:
        shard_bytes: size of each shard; 0 for numbers without a shard. uint64 [_MAX_SHARDS].
    """

    def __init__(self, shards: Sequence[Shard], columns: Columns) -> None:
        self._columns = columns
        # A shard that does not exist has size 0, so all its records are outside it.
        self.shard_bytes = np.zeros(_MAX_SHARDS, np.uint64)
        self.shard_bytes[: len(shards)] = [shard.size for shard in shards]

    def locate(self, ids: Ids, shard: NDArray[np.uint16]) -> tuple[UInt64, UInt64, NDArray[np.bool_]]:
        """Returns the records' offsets and lengths, and a mask of the split records; each of shape [k]."""
        columns = self._columns
        offset, length = columns["offset"][ids], columns["length"][ids].astype(np.uint64)
        is_split = (columns["flags"][ids] & FLAG_SPLIT).view(np.bool_)
        # Compared without an addition: offset + length may exceed 64 bits in a damaged file.
        size = self.shard_bytes[shard]
        is_outside = (offset > size) | (length > size - offset)
        if is_outside.any():
            length[is_outside] = 0
        # An empty record may name a shard that does not exist, so nothing must be read for it.
        is_split &= length > 0
        return offset, length, is_split


class RecordReader(Protocol):
    """Interface of the readers of a data set's records."""

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples; a damaged one may be short or empty."""

    def close(self) -> None:
        """Releases files and mappings."""


@final
class MappedShards:
    """Records in shards that are mapped at first use; reading a batch takes array operations on the columns only."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder = folder
        self._shards = shards
        self._columns = columns
        self._record_places = _RecordPlaces(shards, columns)
        self._maps = _ShardMaps()

    def read(self, ids: Ids) -> Records:
        """Returns views of the records in the mapped shards; only split records are copied.

        Raises DataError if a shard cannot be mapped, or a mapped file was truncated.
        """
        maps = self._maps
        shard = self._columns["shard"][ids]
        address = maps.address[shard]
        # Address 0 marks a shard that is not mapped yet.
        if not address.all():
            for number in np.unique(shard).tolist():
                self._map_shard(maps, number)
            address = maps.address[shard]
        check_mappings(address)
        offset, length, is_split = self._record_places.locate(ids, shard)
        address += offset
        # The usual case: nothing is copied.
        if not is_split.any():
            return Records(address, length, maps)
        split_indices = np.flatnonzero(is_split)
        views = (maps.views[number] for number in shard[split_indices].tolist())
        joined = Records.from_buffers(
            list(map(_join_record_or_empty, views, offset[split_indices].tolist(), length[split_indices].tolist()))
        )
        check_mappings(address)
        address[split_indices], length[split_indices] = joined.address, joined.length
        return Records(address, length, (maps, joined))

    def close(self) -> None:
        """Releases the mappings; each lives as long as Records of it, and a later read maps again."""
        self._maps = _ShardMaps()

    def _map_shard(self, maps: _ShardMaps, shard_index: int) -> None:
        if shard_index in maps.views or shard_index >= len(self._shards):
            return
        view = map_path(self._folder / self._shards[shard_index].name)
        # Two threads may both map a shard; the address must be that of the mapping that is kept.
        view = maps.views.setdefault(shard_index, view)
        # The shard may have been truncated since it was opened.
        self._record_places.shard_bytes[shard_index] = min(len(view), self._shards[shard_index].size)
        maps.address[shard_index] = np.frombuffer(view, np.uint8).ctypes.data


@final
class _ShardMaps:
    """The mapped shards, and the memory address of each; 0: not mapped."""

    def __init__(self) -> None:
        self.views: dict[int, memoryview] = {}
        self.address = np.zeros(_MAX_SHARDS, np.uint64)


@final
class PreadShards:
    """Records read by pread, for network file systems: a mapped file that is truncated there kills the process."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder = folder
        self._shards = shards
        self._columns = columns
        self._record_places = _RecordPlaces(shards, columns)
        self._files: dict[int, _OpenFile] = {}

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples into one buffer. Raises DataError if a shard cannot be opened."""
        shard = self._columns["shard"][ids]
        offset, length, is_split = self._record_places.locate(ids, shard)
        # Records lie end to end in the buffer.
        ends = np.cumsum(length)
        begins = ends - length
        buffer = np.empty(int(length.sum()), np.uint8)
        rows = zip(shard.tolist(), offset.tolist(), begins.tolist(), ends.tolist(), is_split.tolist(), strict=True)
        for index, (shard_index, file_offset, begin, end, is_split_record) in enumerate(rows):
            if begin == end:
                continue
            destination = buffer[begin:end].data
            file = self._open_file(shard_index)
            read = file.read_split if is_split_record else file.read_into
            length[index] = read(destination, file_offset)
        return Records(begins + np.uint64(buffer.ctypes.data), length, buffer)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._files = {}

    def _open_file(self, shard_index: int) -> _OpenFile:
        file = self._files.get(shard_index)
        if file is None:
            file = self._files.setdefault(shard_index, _OpenFile(self._folder / self._shards[shard_index].name))
        return file


@final
class _OpenFile:
    """An open file, closed when it is garbage-collected. Its methods fill a buffer and return the bytes read."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise build_read_error(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, destination: memoryview, offset: int) -> int:
        """Reads bytes from `offset` on until the buffer is full, the file ends, or a read fails."""
        num_read = 0
        # After an I/O error the record stays short, and its checksum fails.
        with contextlib.suppress(OSError):
            while num_read < len(destination) and (
                count := os.preadv(self._descriptor, [destination[num_read:]], offset + num_read)
            ):
                num_read += count
        return num_read

    def read_split(self, destination: memoryview, offset: int) -> int:
        """Reads the image of the split RecordIO record at `offset`."""
        part_bytes = np.empty(recordio.compute_split_record_bound(len(destination)), np.uint8)
        image = _join_record_or_empty(part_bytes.data[: self.read_into(part_bytes.data, offset)], 0, len(destination))
        destination[: len(image)] = image
        return len(image)


@final
class LooseFiles:
    """Records that are one file each, opened by name."""

    def __init__(self, folder: Path, columns: Columns) -> None:
        self._folder = os.fsencode(folder)
        self._columns = columns

    def read(self, ids: Ids) -> Records:
        """Reads the files of these samples."""
        # Names are bytes here: a file name need not be UTF-8.
        names, name_offset, length = self._columns["name"], self._columns["name_offset"], self._columns["length"]
        rows = zip(name_offset[ids].tolist(), name_offset[ids + 1].tolist(), length[ids].tolist(), strict=True)
        return Records.from_buffers(
            [self._read(names[name_begin:name_end].tobytes(), size) for name_begin, name_end, size in rows]
        )

    def close(self) -> None:
        """Does nothing: no file is held open."""

    def _read(self, name: bytes, length: int) -> bytes:
        try:
            with open_regular(os.path.join(self._folder, name), buffering=0) as file:
                return file.read(min(length, os.fstat(file.fileno()).st_size))
        except (OSError, ValueError):
            # The file is missing, or its name is damaged: an empty record, whose checksum fails.
            return b""


def _join_record_or_empty(view: memoryview, offset: int, length: int) -> bytes:
    try:
        return recordio.join_record(view, offset, length)
    except DataError:
        return b""
