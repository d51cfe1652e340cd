"""Mapped files, and the detection of files that are cut while they are mapped.

Reading a page that a mapped file has lost raises SIGBUS, which ends the process. The native core handles that signal
for files mapped here: lost bytes read as zeros, and the next `check_mappings` raises DataError with the file's name. So
code that reads mapped bytes checks afterwards, once a batch.

The rest of the page in which a cut file ends reads as zeros without a signal. So every check also compares the size of
one file, in turn. Without the native core, a check compares the sizes of all files, and a cut between a check and a
read still ends the process.
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
    """A file while it is mapped."""

    def __init__(self, path: Path, begin: int, mapping: mmap.mmap) -> None:
        self._path, self._mapping = path, mapping
        self.begin, self.size = begin, len(mapping)

    def was_cut(self) -> bool:
        return self._mapping.size() < self.size

    def build_error(self) -> DataError:
        if self.was_cut():
            what = f"the file was cut from {self.size} to {self._mapping.size()} bytes while it was in use"
        else:
            what = "a part of the file could not be read: its disk failed, or it was cut and written anew"
        fix = "Copy it again, or pack again. To replace data in use, write a new file and rename it."
        return DataError(what, where=str(self._path), fix=fix)


_files: OrderedDict[int, _MappedFile] = OrderedDict()
"""Mapped files by the ticket of the native core, or by address without it; the first is checked next."""
_cut: set[int] = set()
"""Tickets of files found to be cut."""


def map_file(file: BinaryIO, path: Path) -> memoryview:
    """Maps an open file; the mapping lives as long as the returned view or a part of it.

    Args:
        path: for messages.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is empty.
    """
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = np.frombuffer(mapping, np.uint8).ctypes.data
    # A ticket names the mapping for the signal handler of the native core.
    ticket = native.guard_file(begin, len(mapping)) if native.is_available() else begin
    if ticket < 0:
        raise MemoryError("no more files can be guarded")
    _files[ticket] = _MappedFile(path, begin, mapping)
    # A view of the mmap object would not do: mmap unmaps first and calls its finalizers afterwards.
    held = (ctypes.c_ubyte * len(mapping)).from_address(begin)
    # At exit, threads may read until the very end.
    weakref.finalize(held, _release, ticket).atexit = False
    return memoryview(held).cast("B").toreadonly()


def _release(ticket: int) -> None:
    if native.is_available():
        native.unguard_file(ticket)
    _cut.discard(ticket)
    _files.pop(ticket, None)


def get_addresses(arrays: Iterable[NDArray[Any]]) -> UInt64:
    """Returns the address of each array, for `check_mappings`."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def find_cut_files() -> frozenset[int]:
    """Returns the mapped files that are cut now, for `check_mappings`."""
    # Tickets are listed first: a mapping may end in another thread during the loop.
    lost = {ticket for ticket in list(_files) if native.is_available() and native.count_lost_files(ticket)}
    return frozenset(lost | {ticket for ticket, file in list(_files.items()) if file.was_cut()})


def check_mappings(addresses: UInt64 | None = None, but: frozenset[int] = frozenset()) -> None:
    """Raises DataError if a mapped file was cut while in use, so that bytes read from it may be zeros.

    Args:
        addresses: check only the files that contain these; None checks every file.
        but: skip these files, which were cut earlier and may still be held by other code.
    """
    if native.is_available():
        # Another SIGBUS handler, such as faulthandler's, may have replaced ours since: install it again.
        native.retake_sigbus()
        _check_next_size()
        # The usual end: two flags, no loop over files.
        if not _cut and not native.count_lost_files():
            return
    for ticket, file in list(_files.items()):
        if ticket in but:
            continue
        if addresses is not None and not ((addresses >= file.begin) & (addresses < file.begin + file.size)).any():
            continue
        if file.was_cut() or (native.is_available() and native.count_lost_files(ticket)):
            raise file.build_error()


def _check_next_size() -> None:
    # Another thread or the end of a mapping may interfere; then the next check compares.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):
        ticket = next(iter(_files))
        if _files[ticket].was_cut():
            _cut.add(ticket)
        _files.move_to_end(ticket)
