"""Where the bytes of samples are read from: mapped shards, shards read by pread, or loose files.

Three equal classes: each is made of a data set's columns and has read(ids) -> Records and close(). A record whose
bytes cannot be had whole is short or empty, so that its checksum shows it.
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
NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p"]
    + [f"fuse.{name}" for name in ("sshfs", "gcsfuse", "s3fs", "juicefs", "glusterfs", "rclone", "mountpoint-s3")]
)
"""Kinds in which a read may take milliseconds, and a mapped page may be of another machine's file."""


@final
class _RecordPlaces:
    """Where records lie by the columns, which may be damaged too: what lies outside of its shard is empty."""

    def __init__(self, shards: Sequence[Shard], columns: Columns) -> None:
        self._columns = columns
        # A shard that does not exist has no bytes, so that all its records lie outside of it.
        self.size = np.zeros(_SHARD_LIMIT, np.uint64)
        self.size[: len(shards)] = [shard.size for shard in shards]

    def locate(self, ids: Ids, shard: NDArray[np.uint16]) -> tuple[UInt64, UInt64, NDArray[np.bool_]]:
        """Offsets and lengths, and which records are split; each of shape [k]."""
        columns = self._columns
        offset, length = columns["offset"][ids], columns["length"][ids].astype(np.uint64)
        split = (columns["flags"][ids] & FLAG_SPLIT).view(np.bool_)
        size = self.size[shard]
        outside = (offset > size) | (length > size - offset)
        if outside.any():
            length[outside] = 0
        split &= length > 0  # an empty one may be of a shard that does not exist
        return offset, length, split


class RecordReader(Protocol):
    """What reads the bytes of a data set's samples."""

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples; a damaged one may be short or empty."""

    def close(self) -> None:
        """Releases files and mappings."""


@final
class MappedShards:
    """Records of shards that are mapped as they are touched: a batch is read by arithmetic on the columns alone."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder, self._shards, self._columns = folder, shards, columns
        self._places = _RecordPlaces(shards, columns)
        self._maps = _ShardMaps()

    def read(self, ids: Ids) -> Records:
        """Finds the records of these samples in the mapped shards; nothing is copied but split records."""
        maps, shard = self._maps, self._columns["shard"][ids]
        address = maps.address[shard]
        if not address.all():
            for number in np.unique(shard).tolist():
                self._map(maps, number)
            address = maps.address[shard]
        check_mappings(address)
        offset, length, split = self._places.locate(ids, shard)
        address += offset
        if not split.any():
            return Records(address, length, maps)
        chosen = np.flatnonzero(split)
        views = (maps.views[number] for number in shard[chosen].tolist())
        parts = Records.from_buffers(list(map(_join_record, views, offset[chosen].tolist(), length[chosen].tolist())))
        check_mappings(address)
        address[chosen], length[chosen] = parts.address, parts.length
        return Records(address, length, (maps, parts))

    def close(self) -> None:
        """Lets go of the mappings; each stays for as long as Records of it live, and a later read maps again."""
        self._maps = _ShardMaps()

    def _map(self, maps: _ShardMaps, number: int) -> None:
        if number in maps.views or number >= len(self._shards):
            return
        view = map_path(self._folder / self._shards[number].name)
        # Two threads may both map a shard: the one that is kept is the one whose address is kept.
        view = maps.views.setdefault(number, view)
        self._places.size[number] = min(len(view), self._shards[number].size)  # it may have been cut since the opening
        maps.address[number] = np.frombuffer(view, np.uint8).ctypes.data


@final
class _ShardMaps:
    """The shards that are mapped, and the address of each."""

    def __init__(self) -> None:
        self.views: dict[int, memoryview] = {}
        self.address = np.zeros(_SHARD_LIMIT, np.uint64)


@final
class PreadShards:
    """Records read by pread: a mapped file that is cut on a network file system kills the process."""

    def __init__(self, folder: Path, shards: Sequence[Shard], columns: Columns) -> None:
        self._folder, self._shards, self._columns = folder, shards, columns
        self._places = _RecordPlaces(shards, columns)
        self._files: dict[int, _OpenFile] = {}

    def read(self, ids: Ids) -> Records:
        """Reads the records of these samples."""
        shard = self._columns["shard"][ids]
        offset, length, split = self._places.locate(ids, shard)
        ends = np.cumsum(length)
        begins = ends - length
        buffer = np.empty(int(length.sum()), np.uint8)
        rows = zip(shard.tolist(), offset.tolist(), begins.tolist(), ends.tolist(), split.tolist(), strict=True)
        for place, (number, at, low, high, joined) in enumerate(rows):
            if low == high:
                continue
            into, file = buffer[low:high].data, self._file(number)
            length[place] = file.read_split(into, at) if joined else file.read_into(into, at)
        return Records(begins + np.uint64(buffer.ctypes.data), length, buffer)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._files = {}

    def _file(self, number: int) -> _OpenFile:
        file = self._files.get(number)
        if file is None:
            file = self._files.setdefault(number, _OpenFile(self._folder / self._shards[number].name))
        return file


@final
class _OpenFile:
    """An open file, closed with its last user. It is read into memory, and how many bytes came is returned."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path, buffering=0) as file:
                self._number = os.dup(file.fileno())
        except OSError as error:
            raise build_read_error(path, error) from error
        weakref.finalize(self, os.close, self._number)

    def read_into(self, into: memoryview, offset: int) -> int:
        done = 0
        with contextlib.suppress(OSError):  # a bad block, a server that is gone
            while done < len(into) and (count := os.preadv(self._number, [into[done:]], offset + done)):
                done += count
        return done

    def read_split(self, into: memoryview, offset: int) -> int:
        # The header of a part is 8 bytes in place of 4 of magic number; a MiB is for the record's own and labels.
        parts = np.empty(2 * len(into) + (1 << 20), np.uint8)
        image = _join_record(parts.data[: self.read_into(parts.data, offset)], 0, len(into))
        into[: len(image)] = image
        return len(image)


@final
class LooseFiles:
    """Records that are files of their own, each read by its name."""

    def __init__(self, folder: Path, columns: Columns) -> None:
        self._folder, self._columns = os.fsencode(folder), columns

    def read(self, ids: Ids) -> Records:
        """Reads the files of these samples."""
        names, begin, length = self._columns["name"], self._columns["name_offset"], self._columns["length"]
        rows = zip(begin[ids].tolist(), begin[ids + 1].tolist(), length[ids].tolist(), strict=True)
        return Records.from_buffers([self._read(names[low:high].tobytes(), size) for low, high, size in rows])

    def close(self) -> None:
        """Nothing is held open."""

    def _read(self, name: bytes, length: int) -> bytes:
        try:
            with open_regular(os.path.join(self._folder, name), buffering=0) as file:
                return file.read(min(length, os.fstat(file.fileno()).st_size))
        except (OSError, ValueError):  # it is gone; or its name is damaged
            return b""


def _join_record(view: memoryview, offset: int, length: int) -> bytes:
    try:
        return recordio.join_record(view, offset, length)
    except DataError:
        return b""


def is_on_network(path: Path) -> bool:
    """Whether a file lies on a network file system."""
    best, kind, inside = "", "", f"{os.path.realpath(path)}/"
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, point, name, *_ = line.split()
            if len(point) >= len(best) and inside.startswith(f"{point.rstrip('/')}/"):
                best, kind = point, name
    return kind in NETWORK_FILE_SYSTEMS
