"""Locks on single bytes of a file, between the processes of a host; a killed process holds none."""

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
    """Locks of one open file description: its threads share them, and other openings are kept out.

    They are Linux's "open file description" locks. The older kind belongs to a process, and closing any other
    descriptor of the file would release it. No method waits without limit.

    Raises:
        OSError: the file cannot be opened for writing, or its file system has no such locks.
    """

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self.number)
        _OPEN.add(self)

    def try_lock(self, byte: int, *, shared: bool = False, patience_s: float = 0.0) -> bool:
        """Locks a byte, or changes the kind of its lock; returns False if another opening still holds it."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._set(byte, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
                return True
            except (BlockingIOError, PermissionError):
                # POSIX allows EAGAIN and EACCES.
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.001)

    def release(self, byte: int) -> None:
        """Releases one lock."""
        if self._close.alive:
            self._set(byte, fcntl.F_UNLCK)

    def close(self) -> None:
        """Releases all locks."""
        self._close()

    def _set(self, byte: int, kind: int) -> None:
        # struct flock: type, whence, start, length, process (0 for this kind of lock)
        fcntl.fcntl(self.number, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))


_OPEN: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # A forked child shares its parent's descriptors: it could release the parent's locks, or hold them after its death.
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_leave_to_parent)
