"""StoreState: the content of a store, in a file that all processes map; and the sets in a cache folder."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.data.tiers.locks import ByteLocks

STATE_FILE, LOCKS_FILE = "state", "locks"
USED = 0
"""Byte of the lock file that every process that uses the set locks, shared."""

# "HWSTORE1".
_MAGIC = 0x31_45_52_4F_54_53_57_48
_HEADER_BYTES = 4096
_KIND, _COUNT, _KEPT, _SIDE, _LAST_USE, _TOTAL = range(6)
"""Words of the header: magic number, samples, kept bytes, side of READ, last use (Unix seconds), bytes of the set."""


@final
class StoreState:
    """One byte a sample, 1 if its record is in the store, and a few numbers.

    Args:
        total_bytes: of all records of the set.
        alone: no other process uses the set; then a file that is damaged, or of another set, is started anew.

    Attributes:
        present: uint8 [samples].

    Raises:
        OSError: the disk is full, or the file is damaged and in use.
    """

    def __init__(self, path: Path, samples: int, total_bytes: int, *, alone: bool) -> None:
        size = _HEADER_BYTES + samples
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            head = np.frombuffer(os.pread(number, 16, 0).ljust(16, b"\0"), np.int64)
            good = head[_KIND] == _MAGIC and head[_COUNT] == samples and os.fstat(number).st_size == size
            if not good and not alone:
                raise OSError(errno.EIO, "its state is damaged, and another process uses it")
            if not good:
                os.ftruncate(number, 0)
                # Allocates the blocks: on a full disk, a write to a mapped hole kills the process.
                os.posix_fallocate(number, 0, size)
            # The mapping is shared: every process sees a record as soon as its byte is set.
            mapped = mmap.mmap(number, size)
        finally:
            os.close(number)
        self._header = np.frombuffer(mapped, np.int64, _HEADER_BYTES // 8)
        self.present: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8, samples, _HEADER_BYTES)
        self._header[[_COUNT, _TOTAL, _LAST_USE]] = samples, total_bytes, int(time.time())
        # Written last: a process that dies before leaves a file that is started anew.
        self._header[_KIND] = _MAGIC

    def list_present(self) -> NDArray[np.int64]:
        """Returns the samples that are in the store."""
        return np.flatnonzero(self.present)

    @property
    def kept_bytes(self) -> int:
        """Upper bound of the disk space of the records."""
        return int(self._header[_KEPT])

    @kept_bytes.setter
    def kept_bytes(self, size_bytes: int) -> None:
        self._header[_KEPT] = size_bytes

    @property
    def side(self) -> int:
        """The side, 0 or 1, on which new Records are held."""
        return int(self._header[_SIDE]) & 1

    @side.setter
    def side(self, side: int) -> None:
        self._header[_SIDE] = side


def compute_share(folder: Path, total_bytes: int, budget_bytes: int) -> int:
    """Returns the bytes that the set in `folder` may take of the budget of all sets beside it.

    Sets in use share it in proportion to their size. Unused sets are removed if their space is needed, the longest
    unused first.
    """
    total, used = total_bytes, 0
    idle: list[tuple[int, int, Path]] = []
    for other in folder.parent.iterdir():
        head = None if other == folder else _read_header(other)
        if head is None:
            continue
        # A crashed process holds no locks, so its set counts as unused.
        if is_in_use(other):
            total, used = total + head[_TOTAL], used + head[_KEPT]
        else:
            idle.append((head[_LAST_USE], head[_KEPT], other))
            used += head[_KEPT]
    share = budget_bytes * total_bytes // max(1, total)
    # Records take whole blocks: little more than their bytes, unless they are tiny.
    wanted_bytes = min(share, 2 * total_bytes)
    for _, kept_bytes, other in sorted(idle):
        if used + wanted_bytes > budget_bytes and remove_set(other):
            used -= kept_bytes
    return max(0, min(share, budget_bytes - used))


def is_in_use(folder: Path) -> bool:
    """Returns True if a process uses the set in a folder."""
    locks = _lock_unused(folder)
    if locks is not None:
        locks.close()
    return locks is None


def remove_set(folder: Path) -> bool:
    """Removes a set, and returns True; returns False if a process uses it."""
    locks = _lock_unused(folder)
    if locks is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    locks.close()
    return True


def _lock_unused(folder: Path) -> ByteLocks | None:
    """Locks a set that no process uses, so that none can start to; None if one uses it."""
    try:
        locks = ByteLocks(folder / LOCKS_FILE)
    except OSError:
        return None
    if locks.try_lock(USED):
        return locks
    locks.close()
    return None


def _read_header(folder: Path) -> list[int] | None:
    try:
        with open(folder / STATE_FILE, "rb") as file:
            words: list[int] = np.frombuffer(file.read(64), np.int64).tolist()
    except (OSError, ValueError):
        return None
    return words if len(words) == 8 and words[_KIND] == _MAGIC else None
