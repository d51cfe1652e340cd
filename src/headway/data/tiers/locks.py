"""Locks on single bytes of a file, between the processes of a host; those of a killed process are free at once."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref
from pathlib import Path
from typing import final


@final
class ByteLocks:
    """Locks of one opening of a file: its threads share them, other openings (of this process too) are kept out.

    They are Linux's "open file description" locks: the older kind belongs to a process, and closing any other
    descriptor of the file would drop them. None of the calls here waits without end.

    Raises:
        OSError: the file cannot be opened for writing, or its file system has no such locks.
    """

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self.number)
        _OPEN.add(self)

    def try_lock(self, byte: int, *, shared: bool = False, patience_s: float = 0.0) -> bool:
        """Takes the lock of a byte, or changes its kind; False where another opening still holds it in the end."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._set(byte, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
                return True
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX leaves it open
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.001)

    def release(self, byte: int) -> None:
        """Gives a lock back."""
        if self._close.alive:
            self._set(byte, fcntl.F_UNLCK)

    def close(self) -> None:
        """Gives all locks back."""
        self._close()

    def _set(self, byte: int, kind: int) -> None:
        # struct flock: type, whence, start, length, process (0 for this kind of lock)
        fcntl.fcntl(self.number, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))


_OPEN: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # A forked child shares its parent's openings: it could release the parent's locks, or hold them when that is dead.
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_leave_to_parent)
