"""Reads and changes which files lie in the page cache, so that the next read comes from the disk or from memory.

The owner of the files needs no other rights. posix_fadvise drops pages; for files that this process maps, MADV_PAGEOUT
(Linux 5.4) does, so no data set has to be closed. mincore then checks the result. Only this kernel's memory is covered:
a disk, a server, or the host of a virtual machine may cache the data, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.core.free_memory import read_free_memory_bytes
from headway.core.mounts import find_mount

# Files with a smaller share in memory are read from the disk.
COLD = 0.05

_PAGE = mmap.PAGESIZE
# Largest piece in which Linux caches a file; it drops such a piece as a whole or not at all.
_FOLIO = 2 << 20
# Bytes checked by one call.
_PIECE = 64 << 20
# Limits of a check; of larger sets an even sample is checked. A page takes 0.05 us and a file 10 us: at most about 1 s.
_MOST_PIECES, _MOST_FILES = 1024, 1 << 16
_BUFFER = 4 << 20
_END = 1 << 62
# MADV_PAGEOUT, which the mmap module does not define.
_PAGEOUT = 21
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


@final
class FileSpan(NamedTuple):
    """Bytes [begin, end) of a file; end None: up to its end."""

    path: Path
    begin: int = 0
    end: int | None = None


Files = Iterable[Path | FileSpan]
_Ranges = Mapping[Path, list[tuple[int, int]]]


@final
@dataclass(frozen=True)
class Eviction:
    """Result of dropping files from the page cache."""

    # Less than COLD of the files lies in memory now.
    held: bool
    # before, after: share in memory before and now; None: unknown.
    before: float | None
    after: float | None
    # Why the files stayed in memory; empty: they did not.
    note: str


def measure_resident_share(files: Files) -> float | None:
    """Returns the share of the files' pages in memory; many or large files are sampled evenly.

    None: there are no pages, or it is unknown: this is not Linux, or the files belong to another user (since Linux 5.2
    the kernel does not tell).
    """
    return _measure_share(_align_ranges(files))


def evict(files: Files) -> Eviction:
    """Drops files from the page cache, and checks the result.

    It cannot work for files in memory (tmpfs), or files that another process maps. Mappings of this process stay valid.
    Nothing is done if the kernel does not tell which pages are in memory.
    """
    ranges = _align_ranges(files := list(files))
    before = after = _measure_share(ranges)
    if before is not None:
        _drop_pages(ranges, synced=False)
        after = _measure_share(ranges)
        if after is not None and after >= COLD:
            # Dirty pages and parts of larger pieces stay: write them first, and drop whole pieces.
            _drop_pages(_align_ranges(files, _FOLIO), synced=True)
            after = _measure_share(ranges)
    held = after is not None and after < COLD
    return Eviction(held, before, after, "" if held else _explain_failure(ranges, after))


def load(files: Files) -> int:
    """Reads files into memory as far as memory is free, and returns the bytes read."""
    view, done, room = memoryview(bytearray(_BUFFER)), 0, read_free_memory_bytes()
    for path, ranges in _align_ranges(files).items():
        with suppress(OSError), _open_file(path) as (number, size):
            for low, high in ranges:
                end = min(high, size)
                while low < end and (count := os.preadv(number, [view[: min(end - low, room - done)]], low)):
                    low, done = low + count, done + count
    return done


@contextmanager
def restore_residency(files: Files) -> Iterator[None]:
    """Loads the pages that are in memory now again at the end of the block."""
    ranges = _align_ranges(files, _FOLIO)
    before = [] if _measure_share(ranges) is None else list(_find_resident_spans(ranges))
    try:
        yield
    finally:
        load(before)


def _align_ranges(files: Files, align: int = _PAGE) -> _Ranges:
    """Returns the bytes [low, high) of each file in whole pieces of `align` bytes; the last one may pass its end."""
    spans: dict[Path, list[tuple[int, int]]] = {}
    for one in files:
        span = one if isinstance(one, FileSpan) else FileSpan(one)
        high = _END if span.end is None else -(-span.end // align) * align
        if span.begin < high:
            spans.setdefault(span.path, []).append((span.begin // align * align, high))
    return {path: _merge_ranges(ranges) for path, ranges in spans.items()}


def _merge_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges.sort()
    out = ranges[:1]
    for low, high in ranges[1:]:
        if low <= out[-1][1]:
            out[-1] = out[-1][0], max(high, out[-1][1])
        else:
            out.append((low, high))
    return out


@contextmanager
def _open_file(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (descriptor, size in bytes) of a file."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield number, os.fstat(number).st_size
    finally:
        os.close(number)


def _measure_share(ranges: _Ranges) -> float | None:
    if not _is_mincore_reliable():
        return None
    here = pages = 0
    every = -(-len(ranges) // _MOST_FILES) or 1
    try:
        for path in list(ranges)[::every]:
            with suppress(FileNotFoundError), _open_file(path) as (number, size):
                # A deleted file has no pages.
                if not _may_query(path, number):
                    return None
                pieces = list(_split_ranges(ranges[path], size))
                most = max(1, _MOST_PIECES // len(ranges))
                for low, high in pieces[:: -(-len(pieces) // most) or 1]:
                    flags = _read_page_flags(number, low, high)
                    here, pages = here + int(np.count_nonzero(flags)), pages + len(flags)
    except OSError:
        # The file system has no mappings, or the file is not readable.
        return None
    return here / pages if pages else None


def _find_resident_spans(ranges: _Ranges) -> Iterator[FileSpan]:
    for path, some in ranges.items():
        with suppress(OSError), _open_file(path) as (number, size):
            for low, high in _split_ranges(some, size):
                edges = np.flatnonzero(
                    np.diff(_read_page_flags(number, low, high).astype(np.int8), prepend=0, append=0)
                )
                for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                    yield FileSpan(path, low + first * _PAGE, low + last * _PAGE)


def _split_ranges(ranges: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        end = min(high, size)
        yield from ((begin, min(begin + _PIECE, end)) for begin in range(low, end, _PIECE))


def _read_page_flags(number: int, low: int, high: int) -> NDArray[np.bool_]:
    """Returns for each page of bytes [low, high) whether it is in memory; low is the first byte of a page."""
    address = _LIBC.mmap(None, high - low, mmap.PROT_READ, mmap.MAP_SHARED, number, low)
    if address == _FAILED:
        raise _build_os_error()
    try:
        flags = np.empty(-(-(high - low) // _PAGE), np.uint8)
        if _LIBC.mincore(address, high - low, flags.ctypes.data):
            raise _build_os_error()
        return (flags & 1).view(np.bool_)
    finally:
        _LIBC.munmap(address, high - low)


def _build_os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@cache
def _is_mincore_reliable() -> bool:
    """Checks mincore on a hole, which is never in memory: some sandboxes report it as resident."""
    try:
        number = os.memfd_create("hole")
    except (AttributeError, OSError):
        # Not Linux, or the call is forbidden.
        return False
    try:
        os.ftruncate(number, _PAGE)
        return not _read_page_flags(number, 0, _PAGE).any()
    except OSError:
        return False
    finally:
        os.close(number)


def _may_query(path: Path, number: int) -> bool:
    """Returns True if mincore tells this user about a file; for others' files it reports all pages as resident."""
    return os.geteuid() in (0, os.fstat(number).st_uid) or os.access(path, os.W_OK, effective_ids=True)


def _drop_pages(ranges: _Ranges, *, synced: bool) -> None:
    mapped = _find_mappings()
    for path, some in ranges.items():
        with suppress(OSError), _open_file(path) as (number, size):
            if synced:
                with suppress(OSError):
                    # A read-only file system refuses fdatasync.
                    os.fdatasync(number)
            views = mapped.get(os.fstat(number).st_ino, ())
            for low, high in some:
                for address, first, last in views:
                    begin, end = max(low, first), min(high, last)
                    if begin < end:
                        _LIBC.madvise(address + begin - first, end - begin, _PAGEOUT)
                # A length of 0 means up to the end: the kernel keeps pages that a range covers only in part.
                os.posix_fadvise(number, low, 0 if high >= size else high - low, os.POSIX_FADV_DONTNEED)


def _find_mappings() -> Mapping[int, list[tuple[int, int, int]]]:
    """Returns this process's file mappings by inode: the address of each, and its bytes [low, high).

    Files on two file systems may share an inode: that is harmless, as MADV_PAGEOUT loses no data.
    """
    mappings: dict[int, list[tuple[int, int, int]]] = {}
    with suppress(OSError), open("/proc/self/maps", errors="replace") as lines:
        for line in lines:
            place, rights, offset, _, inode, *_ = line.split(None, 5)
            if rights.endswith("s") and inode != "0":
                first, last = (int(part, 16) for part in place.split("-"))
                low = int(offset, 16)
                mappings.setdefault(int(inode), []).append((first, low, low + last - first))
    return mappings


def _explain_failure(ranges: _Ranges, after: float | None) -> str:
    if not ranges:
        return "There is no file to read."
    if after is None and not _is_mincore_reliable():
        return "This system does not tell which pages of a file are in memory."
    mount = find_mount(next(iter(ranges)))
    if mount is not None and mount.kind in _IN_MEMORY:
        return f"The files are always in memory: their file system is {mount.kind}."
    if after is None:
        return "It is unknown which pages are in memory: the files are empty, deleted, or another user's."
    kind = f"their file system ({mount.kind})" if mount is not None else "their file system"
    return f"{after:.0%} of the files stayed in memory: another process uses them, or {kind} keeps them."
