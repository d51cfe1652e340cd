"""Locks on single bytes of a file, between the processes of a host; the kernel releases those of a killed process."""

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
    """Locks on bytes of a file, owned by one open file description; threads that share the object share its locks.

    They are Linux's "open file description" locks (F_OFD_SETLK). Classic POSIX locks belong to a process, and closing
    any other descriptor of the file would release them. No method waits without limit.

    Raises:
        OSError: the file cannot be opened for writing, or its file system has no such locks.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        _OPEN_LOCKS.add(self)

    def try_lock(self, byte: int, *, shared: bool = False, timeout_s: float = 0.0) -> bool:
        """Locks a byte exclusively or shared, also if it is locked already; retries for `timeout_s`.

        Returns False if a conflicting lock of another open file description prevents it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._set_lock(byte, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
                return True
            except (BlockingIOError, PermissionError):
                # POSIX allows EAGAIN and EACCES.
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.001)

    def release(self, byte: int) -> None:
        """Releases one lock."""
        if self._close.alive:
            self._set_lock(byte, fcntl.F_UNLCK)

    def close(self) -> None:
        """Releases all locks."""
        self._close()

    def _set_lock(self, byte: int, kind: int) -> None:
        # struct flock: type, whence, start, length, process (0 for this kind of lock)
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))


_OPEN_LOCKS: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares its parent's descriptors: it could release the parent's locks, or hold them after its exit.
    for locks in list(_OPEN_LOCKS):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
