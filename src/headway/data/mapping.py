"""Maps files, and detects files that are truncated while they are mapped.

Reading a page behind the end of a truncated file raises SIGBUS, which ends the process. The native core handles that
signal for files mapped here: missing bytes read as zeros, and the next `check_mappings` raises DataError with the
file's name. So code that reads mapped bytes checks afterwards, once for each batch.

The rest of the page in which a truncated file ends reads as zeros without a signal. So every check also compares the
size of one file, in turn. Without the native core, a check compares the sizes of all files, and a truncation between a
check and a read still ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.random_keys import UInt64
from headway.data import native


@final
class _MappedFile:
    """A file that is mapped."""

    def __init__(self, path: Path, begin: int, mapping: mmap.mmap) -> None:
        self._path = path
        self._mapping = mapping
        self.begin = begin
        self.size = len(mapping)

    def is_truncated(self) -> bool:
        """Returns True if the file is shorter now than when it was mapped."""
        return self._mapping.size() < self.size

    def build_error(self) -> DataError:
        """Builds the error for a file whose mapped bytes were lost."""
        if self.is_truncated():
            what = f"the file was cut from {self.size} to {self._mapping.size()} bytes while it was in use"
        else:
            what = "a part of the file could not be read: its disk failed, or it was cut and written anew"
        fix = "Copy it again, or pack again. To replace data in use, write a new file and rename it."
        return DataError(what, where=str(self._path), fix=fix)


_mapped_files: OrderedDict[int, _MappedFile] = OrderedDict()
"""Mapped files by the ticket of the native core, or by address without it; `_check_next_size` checks the first one."""
_truncated_tickets: set[int] = set()
"""Tickets of files that were found to be truncated."""


def map_file(file: BinaryIO, path: Path) -> memoryview:
    """Maps an open file read-only, and guards it against truncation.

    Args:
        path: name of the file in messages.

    Returns:
        the bytes; the mapping lives as long as this view or a slice of it.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is empty.
        MemoryError: the native core cannot guard more files.
    """
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    # A ticket names the mapping for the signal handler of the native core.
    ticket = native.guard_file(address, len(mapping)) if native.is_available() else address
    if ticket < 0:
        raise MemoryError("no more files can be guarded")
    _mapped_files[ticket] = _MappedFile(path, address, mapping)
    # A ctypes array owns the mapping, since an mmap object unmaps before it calls its finalizers.
    owner = (ctypes.c_ubyte * len(mapping)).from_address(address)
    # At exit, threads may read until the very end.
    weakref.finalize(owner, _unregister, ticket).atexit = False
    return memoryview(owner).cast("B").toreadonly()


def _unregister(ticket: int) -> None:
    # Forgotten first, and unmapped at the end: once the native core has the ticket back, another thread may get it for
    # a file that it maps, which must not be forgotten in this one's place.
    file = _mapped_files.pop(ticket, None)
    _truncated_tickets.discard(ticket)
    if native.is_available():
        native.unguard_file(ticket)
    del file


def get_addresses(arrays: Iterable[NDArray[Any]]) -> UInt64:
    """Returns the memory address of each array, uint64 [k], for `check_mappings`."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def find_truncated_files() -> frozenset[int]:
    """Returns the tickets of the files that are truncated now, for `check_mappings`."""
    # Tickets are listed first: a mapping may end in another thread during the loop.
    lost_tickets = {
        ticket for ticket in list(_mapped_files) if native.is_available() and native.count_lost_files(ticket)
    }
    return frozenset(lost_tickets | {ticket for ticket, file in list(_mapped_files.items()) if file.is_truncated()})


def check_mappings(addresses: UInt64 | None = None, but: frozenset[int] = frozenset()) -> None:
    """Raises DataError if a mapped file was truncated while in use, so that bytes read from it may be zeros.

    Args:
        addresses: check only the files that contain these; None checks every file.
        but: skip the files with these tickets, which were truncated earlier and may still be in use by other code.
    """
    if native.is_available():
        # Another SIGBUS handler, such as faulthandler's, may have replaced ours since: install it again.
        native.retake_sigbus()
        _check_next_size()
        # The usual case: two flags, no loop over files.
        if not _truncated_tickets and not native.count_lost_files():
            return
    for ticket, file in list(_mapped_files.items()):
        if ticket in but:
            continue
        if addresses is not None and not ((addresses >= file.begin) & (addresses < file.begin + file.size)).any():
            continue
        if file.is_truncated() or (native.is_available() and native.count_lost_files(ticket)):
            raise file.build_error()


def _check_next_size() -> None:
    # Another thread or the end of a mapping may interfere; then the next check compares.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):
        ticket = next(iter(_mapped_files))
        if _mapped_files[ticket].is_truncated():
            _truncated_tickets.add(ticket)
        _mapped_files.move_to_end(ticket)
