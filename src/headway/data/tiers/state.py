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
USED_LOCK = 0
"""Byte of the lock file that every process that uses the set locks, shared."""

# "HWSTORE1".
_MAGIC = 0x31_45_52_4F_54_53_57_48
_HEADER_BYTES = 4096
_MAGIC_WORD, _COUNT, _KEPT, _SIDE, _LAST_USE, _TOTAL = range(6)
"""Indices of the header's int64 words: magic number, samples, kept bytes, side of new leases, last use (Unix seconds),
and bytes of the set.
"""


@final
class StoreState:
    """The mapped state file: one byte a sample, 1 if its record is in the store, and a header of a few numbers.

    Args:
        samples: size of the data set.
        total_bytes: size of all its shards.
        alone: no other process uses the set; then a file that is damaged, or of another set, is reset.

    Attributes:
        present: uint8 [samples].

    Raises:
        OSError: the disk is full, or the file is damaged and in use.
    """

    def __init__(self, path: Path, samples: int, total_bytes: int, *, is_exclusive: bool) -> None:
        size = _HEADER_BYTES + samples
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            header = np.frombuffer(os.pread(descriptor, 16, 0).ljust(16, b"\0"), np.int64)
            is_valid = (
                header[_MAGIC_WORD] == _MAGIC and header[_COUNT] == samples and os.fstat(descriptor).st_size == size
            )
            if not is_valid and not is_exclusive:
                raise OSError(errno.EIO, "its state is damaged, and another process uses it")
            if not is_valid:
                os.ftruncate(descriptor, 0)
                # Allocates the blocks: on a full disk, a write to a mapped hole kills the process.
                os.posix_fallocate(descriptor, 0, size)
            # The mapping is shared: every process sees a record as soon as its byte is set.
            mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._header = np.frombuffer(mapping, np.int64, _HEADER_BYTES // 8)
        self.present: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, samples, _HEADER_BYTES)
        self._header[[_COUNT, _TOTAL, _LAST_USE]] = samples, total_bytes, int(time.time())
        # Written last: a process that dies before leaves a file that is reset at the next start.
        self._header[_MAGIC_WORD] = _MAGIC

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
        """The side, 0 or 1, of new leases."""
        return int(self._header[_SIDE]) & 1

    @side.setter
    def side(self, side: int) -> None:
        self._header[_SIDE] = side


def compute_share_bytes(folder: Path, total_bytes: int, budget_bytes: int) -> int:
    """Returns the bytes that the set in `folder` may take of the budget of all sets beside it.

    Sets in use share the budget in proportion to their size. Unused sets are removed from the disk if their space is
    needed, least recently used first.
    """
    active_bytes = total_bytes
    used_bytes = 0
    unused_sets: list[tuple[int, int, Path]] = []
    for set_folder in folder.parent.iterdir():
        header = None if set_folder == folder else _read_header(set_folder)
        if header is None:
            continue
        # A crashed process holds no locks, so its set counts as unused.
        if is_in_use(set_folder):
            active_bytes += header[_TOTAL]
        else:
            unused_sets.append((header[_LAST_USE], header[_KEPT], set_folder))
        # Without the set in `folder` itself, whose share is computed.
        used_bytes += header[_KEPT]
    share_bytes = budget_bytes * total_bytes // max(1, active_bytes)
    # Records take whole blocks: little more than their bytes, unless they are tiny.
    wanted_bytes = min(share_bytes, 2 * total_bytes)
    for _, kept_bytes, set_folder in sorted(unused_sets):
        if used_bytes + wanted_bytes > budget_bytes and remove_set(set_folder):
            used_bytes -= kept_bytes
    return max(0, min(share_bytes, budget_bytes - used_bytes))


def is_in_use(folder: Path) -> bool:
    """Returns True if a process uses the set in a folder."""
    locks = _try_lock_set(folder)
    if locks is not None:
        locks.close()
    return locks is None


def remove_set(folder: Path) -> bool:
    """Removes a set from the disk and returns True; returns False if a process uses it."""
    locks = _try_lock_set(folder)
    if locks is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    locks.close()
    return True


def _try_lock_set(folder: Path) -> ByteLocks | None:
    """Locks a set exclusively, so that no process can start to use it; returns None if one uses it."""
    try:
        locks = ByteLocks(folder / LOCKS_FILE)
    except OSError:
        return None
    if locks.try_lock(USED_LOCK):
        return locks
    locks.close()
    return None


def _read_header(folder: Path) -> list[int] | None:
    """Returns the words of the header of the set in a folder; None if there is no valid state file."""
    try:
        with open(folder / STATE_FILE, "rb") as file:
            words: list[int] = np.frombuffer(file.read(64), np.int64).tolist()
    except (OSError, ValueError):
        return None
    return words if len(words) == 8 and words[_MAGIC_WORD] == _MAGIC else None
