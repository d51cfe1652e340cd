"""Sparse files: records at their offset in the shard, and holes for those that are not kept."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.data.columns import Shard

# FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE = 3
_LIBC = ctypes.CDLL(None, use_errno=True)


@final
class SparseFiles:
    """Sparse local copies of shards, each as long as its shard, created by the first write.

    Raises:
        OSError: the file system has no sparse files or holes. Every method raises OSError if a system call fails.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        _check_holes(folder)
        self._folder = folder
        self._shards = shards
        # Open file descriptors, by shard.
        self._descriptors: dict[int, int] = {}

    def write(self, shard: int, start: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes at offset `start` of a shard's copy."""
        view = data.data
        descriptor = self._open_copy(shard)
        while len(view):
            # A signal may shorten a write.
            written = os.pwrite(descriptor, view, start)
            view = view[written:]
            start += written

    def punch(self, shard: int, begin: int, end: int) -> None:
        """Punches a hole at bytes [begin, end) of a shard's copy, which frees their disk space."""
        _punch(self._open_copy(shard), begin, end - begin)

    def find_complete(self) -> NDArray[np.bool_]:
        """Returns a mask of the shards whose copy has the right length; bool [shards]."""
        return np.array([size == shard.size for size, _, shard in self._read_stats()], np.bool_)

    def measure_disk_bytes(self) -> int:
        """Returns the disk space that the copies take, without their holes."""
        return sum(blocks * 512 for _, blocks, _ in self._read_stats())

    def close(self) -> None:
        """Closes the files; the next `write` opens them again."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _read_stats(self) -> list[tuple[int, int, Shard]]:
        """Returns (size, blocks, shard) of each copy; -1 and 0 if there is none."""
        stats = []
        for shard in self._shards:
            try:
                status = os.stat(self._folder / shard.name)
                stats.append((status.st_size, status.st_blocks, shard))
            except FileNotFoundError:
                stats.append((-1, 0, shard))
        return stats

    def _open_copy(self, shard: int) -> int:
        descriptor = self._descriptors.get(shard)
        if descriptor is None:
            path = self._folder / self._shards[shard].name
            size = self._shards[shard].size
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._descriptors[shard] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # The full length from the start, so that offsets are those of the shard.
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
        return descriptor


def _punch(descriptor: int, begin: int, length: int) -> None:
    if _LIBC.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_holes(folder: Path) -> None:
    """Raises OSError unless the file system of a folder has sparse files and can punch holes."""
    # A file system without holes accepts the calls and fills the disk, so this is tested first.
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.unlink(path)
    try:
        # 8 KiB written at 32 MiB of a 64 MiB file must not take 16 MiB.
        os.ftruncate(descriptor, 64 << 20)
        os.pwrite(descriptor, bytes(8192), 32 << 20)
        if os.fstat(descriptor).st_blocks * 512 > 16 << 20:
            raise OSError(errno.EOPNOTSUPP, "its file system has no sparse files")
        _punch(descriptor, 32 << 20, 8192)
    finally:
        os.close(descriptor)
