"""Readers of records in local files: mapped shards, shards read by pread, or files of their own.

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

_SHARD_LIMIT = 1 << 16
"""A shard's number is a 16-bit column."""


@final
class _RecordPlaces:
    """Offsets and lengths from the columns, which may be damaged: a record outside its shard has length 0."""

    def __init__(self, shards: Sequence[Shard], columns: Columns) -> None:
        self._columns = columns
        # A shard that does not exist has size 0, so all its records are outside it.
        self.size = np.zeros(_SHARD_LIMIT, np.uint64)
        self.size[: len(shards)] = [shard.size for shard in shards]

    def locate(self, ids: Ids, shard: NDArray[np.uint16]) -> tuple[UInt64, UInt64, NDArray[np.bool_]]:
        """Returns offsets and lengths, and a mask of the split records; each of shape [k]."""
        columns = self._columns
        offset, length = columns["offset"][ids], columns["length"][ids].astype(np.uint64)
        split = (columns["flags"][ids] & FLAG_SPLIT).view(np.bool_)
        # Compared without an addition: offset + length may exceed 64 bits in a damaged file.
        size = self.size[shard]
        outside = (offset > size) | (length > size - offset)
        if outside.any():
            length[outside] = 0
        # An empty record may name a shard that does not exist, so nothing must be read for it.
        split &= length > 0
        return offset, length, split


class RecordReader(Protocol):
    """Reads the bytes of a data set's samples."""

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples; a damaged one may be short or empty."""

    def close(self) -> None:
        """Releases files and mappings."""


@final
class MappedShards:
    """Records in shards that are mapped at first use: a batch is found by arithmetic on the columns alone."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder, self._shards, self._columns = folder, shards, columns
        self._places = _RecordPlaces(shards, columns)
        self._maps = _ShardMaps()

    def read(self, ids: Ids) -> Records:
        """Finds the records of these samples in the mapped shards; copies only split records."""
        maps, shard = self._maps, self._columns["shard"][ids]
        address = maps.address[shard]
        # Address 0 marks a shard that is not mapped yet.
        if not address.all():
            for number in np.unique(shard).tolist():
                self._map(maps, number)
            address = maps.address[shard]
        check_mappings(address)
        offset, length, split = self._places.locate(ids, shard)
        address += offset
        # The usual case: nothing is copied.
        if not split.any():
            return Records(address, length, maps)
        chosen = np.flatnonzero(split)
        views = (maps.views[number] for number in shard[chosen].tolist())
        parts = Records.from_buffers(list(map(_join_record, views, offset[chosen].tolist(), length[chosen].tolist())))
        check_mappings(address)
        address[chosen], length[chosen] = parts.address, parts.length
        return Records(address, length, (maps, parts))

    def close(self) -> None:
        """Releases the mappings; each lives as long as Records of it, and a later read maps again."""
        self._maps = _ShardMaps()

    def _map(self, maps: _ShardMaps, number: int) -> None:
        if number in maps.views or number >= len(self._shards):
            return
        view = map_path(self._folder / self._shards[number].name)
        # Two threads may both map a shard; the address must be that of the mapping that is kept.
        view = maps.views.setdefault(number, view)
        # The shard may have been cut since it was opened.
        self._places.size[number] = min(len(view), self._shards[number].size)
        maps.address[number] = np.frombuffer(view, np.uint8).ctypes.data


@final
class _ShardMaps:
    """The mapped shards, and the address of each."""

    def __init__(self) -> None:
        self.views: dict[int, memoryview] = {}
        self.address = np.zeros(_SHARD_LIMIT, np.uint64)


@final
class PreadShards:
    """Records read by pread, for network file systems: a mapped file that is cut there kills the process."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder, self._shards, self._columns = folder, shards, columns
        self._places = _RecordPlaces(shards, columns)
        self._files: dict[int, _OpenFile] = {}

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples."""
        shard = self._columns["shard"][ids]
        offset, length, split = self._places.locate(ids, shard)
        # One buffer for the batch; records lie end to end in it.
        ends = np.cumsum(length)
        begins = ends - length
        buffer = np.empty(int(length.sum()), np.uint8)
        rows = zip(shard.tolist(), offset.tolist(), begins.tolist(), ends.tolist(), split.tolist(), strict=True)
        for place, (number, at, low, high, joined) in enumerate(rows):
            if low == high:
                continue
            into, file = buffer[low:high].data, self._open_file(number)
            length[place] = file.read_split(into, at) if joined else file.read_into(into, at)
        return Records(begins + np.uint64(buffer.ctypes.data), length, buffer)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._files = {}

    def _open_file(self, number: int) -> _OpenFile:
        file = self._files.get(number)
        if file is None:
            file = self._files.setdefault(number, _OpenFile(self._folder / self._shards[number].name))
        return file


@final
class _OpenFile:
    """An open file, closed with its last user. Its methods fill a buffer and return how many bytes came."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path, buffering=0) as file:
                self._number = os.dup(file.fileno())
        except OSError as error:
            raise build_read_error(path, error) from error
        weakref.finalize(self, os.close, self._number)

    def read_into(self, into: memoryview, offset: int) -> int:
        done = 0
        # A bad block or a server that is gone: the record stays short, and its checksum fails.
        with contextlib.suppress(OSError):
            while done < len(into) and (count := os.preadv(self._number, [into[done:]], offset + done)):
                done += count
        return done

    def read_split(self, into: memoryview, offset: int) -> int:
        # A part has 8 bytes of header for 4 of magic number; 1 MiB more holds the record's own header and labels.
        parts = np.empty(2 * len(into) + (1 << 20), np.uint8)
        image = _join_record(parts.data[: self.read_into(parts.data, offset)], 0, len(into))
        into[: len(image)] = image
        return len(image)


@final
class LooseFiles:
    """Records that are files of their own, opened by name."""

    def __init__(self, folder: Path, columns: Columns) -> None:
        self._folder, self._columns = os.fsencode(folder), columns

    def read(self, ids: Ids) -> Records:
        """Reads the files of these samples."""
        # Names are bytes here: a file name need not be UTF-8.
        names, begin, length = self._columns["name"], self._columns["name_offset"], self._columns["length"]
        rows = zip(begin[ids].tolist(), begin[ids + 1].tolist(), length[ids].tolist(), strict=True)
        return Records.from_buffers([self._read(names[low:high].tobytes(), size) for low, high, size in rows])

    def close(self) -> None:
        """Does nothing: no file is held open."""

    def _read(self, name: bytes, length: int) -> bytes:
        try:
            with open_regular(os.path.join(self._folder, name), buffering=0) as file:
                return file.read(min(length, os.fstat(file.fileno()).st_size))
        except (OSError, ValueError):
            # The file is gone, or its name is damaged: an empty record, whose checksum fails.
            return b""


def _join_record(view: memoryview, offset: int, length: int) -> bytes:
    try:
        return recordio.join_record(view, offset, length)
    except DataError:
        return b""
