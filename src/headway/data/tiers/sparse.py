"""Sparse files: bytes at their own place, and holes where nothing is kept."""

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

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


@final
class SparseFiles:
    """Local copies of shards, each as long as the shard, made when something is written to it.

    Raises:
        OSError: from any method, as the file system does; at first where it has no sparse files or no holes.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        _check_holes(folder)
        self._folder, self._shards = folder, shards
        self._files: dict[int, int] = {}

    def write(self, shard: int, start: int, data: NDArray[np.uint8]) -> None:
        view, number = data.data, self._open_copy(shard)
        while len(view):
            done = os.pwrite(number, view, start)
            view, start = view[done:], start + done

    def punch(self, shard: int, begin: int, end: int) -> None:
        """Makes a hole of bytes [begin, end)."""
        _punch(self._open_copy(shard), begin, end - begin)

    def find_complete(self) -> NDArray[np.bool_]:
        """Which shards have a copy of the right length; bool [shards]."""
        return np.array([size == shard.size for size, _, shard in self._read_stats()], np.bool_)

    def measure_disk_bytes(self) -> int:
        """What the copies take on the disk."""
        return sum(blocks * 512 for _, blocks, _ in self._read_stats())

    def close(self) -> None:
        for number in self._files.values():
            os.close(number)
        self._files = {}

    def _read_stats(self) -> list[tuple[int, int, Shard]]:
        """(size, blocks, shard) of each; -1 and 0 where there is no copy."""
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
            if os.fstat(number).st_size != size:
                os.ftruncate(number, size)
        return number


def _punch(number: int, begin: int, length: int) -> None:
    if _LIBC.fallocate(number, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_holes(folder: Path) -> None:
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.unlink(path)
    try:
        os.ftruncate(number, 64 << 20)
        os.pwrite(number, bytes(8192), 32 << 20)
        if os.fstat(number).st_blocks * 512 > 16 << 20:
            raise OSError(errno.EOPNOTSUPP, "its file system has no sparse files")
        _punch(number, 32 << 20, 8192)
    finally:
        os.close(number)
