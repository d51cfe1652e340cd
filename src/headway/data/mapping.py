"""Mapped files, and what becomes of a read where one is cut while it is in use.

A page that a mapped file has lost cannot be read: the signal SIGBUS ends the process without a word. The native core
answers it for the files that are mapped here: the lost bytes become zeros, and the next `check` raises DataError by
the file's name. So whoever reads mapped bytes checks afterwards, once a batch.

The rest of the page in which a cut file ends reads as zeros without a signal. So every check compares the size of one
file too, each in its turn. Without the native core there is nothing but sizes: a check compares all of them, and a cut
that comes between it and a read still ends the process.
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
"""By the ticket of the native core, or by the address where that is not there; the first one is looked at next."""
_cut: set[int] = set()
"""Those of them that were found to be cut."""


def map_file(file: BinaryIO, path: Path) -> memoryview:
    """The bytes of an open file, mapped for as long as the view or a part of it is in use.

    Args:
        path: for messages.

    Raises OSError; ValueError: the file is empty.
    """
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = np.frombuffer(mapping, np.uint8).ctypes.data
    ticket = native.guard_file(begin, len(mapping)) if native.is_available() else begin
    if ticket < 0:
        raise MemoryError("no more files can be guarded")
    _files[ticket] = _MappedFile(path, begin, mapping)
    # The view is not of the mmap object itself: that unmaps first and tells its weak references afterwards.
    held = (ctypes.c_ubyte * len(mapping)).from_address(begin)
    weakref.finalize(held, _release, ticket).atexit = False  # threads may read until the very end
    return memoryview(held).cast("B").toreadonly()


def _release(ticket: int) -> None:
    if native.is_available():
        native.unguard_file(ticket)
    _cut.discard(ticket)
    _files.pop(ticket, None)


def get_addresses(arrays: Iterable[NDArray[Any]]) -> UInt64:
    """The address of each array, for `check`."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def find_cut_files() -> frozenset[int]:
    """The mapped files that are cut now, for `check`."""
    lost = {ticket for ticket in list(_files) if native.is_available() and native.count_lost_files(ticket)}
    return frozenset(lost | {ticket for ticket, file in list(_files.items()) if file.was_cut()})


def check_mappings(addresses: UInt64 | None = None, but: frozenset[int] = frozenset()) -> None:
    """Raises DataError where a mapped file was cut while it was in use, so that what was read of it may be zeros.

    Args:
        addresses: look at the files that hold these; None: at every file.
        but: not at these, which were cut before: somebody else's, who may not have let go of them yet.
    """
    if native.is_available():
        # A handler installed since, such as faulthandler's, would end the process at the first lost page.
        native.retake_sigbus()
        _check_next_size()
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
    # Another thread may come between, or the end of a mapping: then the next check looks.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):
        ticket = next(iter(_files))
        if _files[ticket].was_cut():
            _cut.add(ticket)
        _files.move_to_end(ticket)
