"""Sparse files: bytes at their own offset, and holes for those that are not kept."""

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
    """Local copies of shards, each as long as its shard, created by the first write.

    Raises:
        OSError: from any method. The constructor raises it if the file system lacks sparse files or holes.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        _check_holes(folder)
        self._folder, self._shards = folder, shards
        self._files: dict[int, int] = {}

    def write(self, shard: int, start: int, data: NDArray[np.uint8]) -> None:
        view, number = data.data, self._open_copy(shard)
        while len(view):
            # A signal may cut a write short.
            done = os.pwrite(number, view, start)
            view, start = view[done:], start + done

    def punch(self, shard: int, begin: int, end: int) -> None:
        """Makes a hole of bytes [begin, end)."""
        _punch(self._open_copy(shard), begin, end - begin)

    def find_complete(self) -> NDArray[np.bool_]:
        """Returns a mask of the shards whose copy has the right length; bool [shards]."""
        return np.array([size == shard.size for size, _, shard in self._read_stats()], np.bool_)

    def measure_disk_bytes(self) -> int:
        """Returns the disk space of the copies."""
        return sum(blocks * 512 for _, blocks, _ in self._read_stats())

    def close(self) -> None:
        for number in self._files.values():
            os.close(number)
        self._files = {}

    def _read_stats(self) -> list[tuple[int, int, Shard]]:
        """Returns (size, blocks, shard) of each copy; -1 and 0 if there is none."""
        out = []
        for shard in self._shards:
            try:
                status = os.stat(self._folder / shard.name)
                out.append((status.st_size, status.st_blocks, shard))
            except FileNotFoundError:
                out.append((-1, 0, shard))
        return out

    def _open_copy(self, shard: int) -> int:
        number = self._files.get(shard)
        if number is None:
            path, size = self._folder / self._shards[shard].name, self._shards[shard].size
            path.parent.mkdir(parents=True, exist_ok=True)
            number = self._files[shard] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # The full length from the start, so that offsets are those of the shard.
            if os.fstat(number).st_size != size:
                os.ftruncate(number, size)
        return number


def _punch(number: int, begin: int, length: int) -> None:
    if _LIBC.fallocate(number, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_holes(folder: Path) -> None:
    # A file system without holes accepts the calls and fills the disk, so this is tried first.
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.unlink(path)
    try:
        # 8 KiB written at 32 MiB of a 64 MiB file must not take 16 MiB.
        os.ftruncate(number, 64 << 20)
        os.pwrite(number, bytes(8192), 32 << 20)
        if os.fstat(number).st_blocks * 512 > 16 << 20:
            raise OSError(errno.EOPNOTSUPP, "its file system has no sparse files")
        _punch(number, 32 << 20, 8192)
    finally:
        os.close(number)
