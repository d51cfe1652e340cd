"""The page cache: what of some files lies in memory, and how to have them read from the disk, or from memory, next.

No right is needed but that of the files' owner: pages are given back by posix_fadvise and, where this process maps
them, by MADV_PAGEOUT (Linux 5.4), so that no data set has to be closed; mincore then says whether they are gone. Only
the kernel's own memory is spoken of: a disk, a server, or the host of a virtual machine may have a copy in theirs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.core.memory import free_memory_bytes
from headway.data.shards import NETWORK_FILE_SYSTEMS

# Files of which less than this share lies in memory are read from the disk.
COLD = 0.05

_PAGE = mmap.PAGESIZE
# Largest piece in which Linux keeps a file's pages; it gives such a piece back as a whole or not at all.
_FOLIO = 2 << 20
# Looked at in one call.
_PIECE = 64 << 20
# Looked at; of more an even sample is. A page takes 0.05 us, a file 10 us: together at most a second.
_MOST_PIECES, _MOST_FILES = 1024, 1 << 16
_BUFFER = 4 << 20
_END = 1 << 62
# MADV_PAGEOUT, which the mmap module does not name.
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
    """The result of dropping files from the page cache.

    Attributes:
        held: whether less than COLD of them lies in memory now.
        before, after: the share that lay in memory, and that lies there now; None: it cannot be told.
        note: a sentence: why it did not hold; empty: it did.
    """

    held: bool
    before: float | None
    after: float | None
    note: str


@final
class Mount(NamedTuple):
    """A mounted file system: where, of which kind, what is mounted, and its options."""

    point: str
    kind: str
    source: str
    options: str

    @property
    def is_network(self) -> bool:
        """Whether this is a network file system."""
        return self.kind in NETWORK_FILE_SYSTEMS


def find_mount(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The file system on which a path lies; None where the kernel does not say."""
    best, inside = None, f"{os.path.realpath(path)}/"
    with suppress(OSError), mounts.open(errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            if len(place := left.split()) < 5 or len(file_system := right.split()) < 3:
                continue
            # A blank is \040.
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place[4])
            if inside.startswith(f"{point.rstrip('/')}/") and (best is None or len(point) >= len(best.point)):
                best = Mount(point, *file_system[:3])
    return best


def measure_resident_share(files: Files) -> float | None:
    """The share of the files' pages that lies in memory; of many or large files, an even sample is looked at.

    None: there is no page, or it cannot be told: this is no Linux, or the files are another user's, of which the
    kernel says nothing (Linux 5.2).
    """
    return _measure_share(_align_ranges(files))


def evict(files: Files) -> Eviction:
    """Has the files read from the disk next time, and looks whether that holds.

    It cannot hold for files that lie in memory (tmpfs), or that another process maps. Mappings of this process stay as
    they are. Where it cannot be told what lies in memory, nothing is done.
    """
    ranges = _align_ranges(files := list(files))
    before = after = _measure_share(ranges)
    if before is not None:
        _drop_pages(ranges, synced=False)
        after = _measure_share(ranges)
        if after is not None and after >= COLD:
            # Not written to the disk yet, or parts of larger pieces.
            _drop_pages(_align_ranges(files, _FOLIO), synced=True)
            after = _measure_share(ranges)
    held = after is not None and after < COLD
    return Eviction(held, before, after, "" if held else _explain_failure(ranges, after))


def load(files: Files) -> int:
    """Reads files into memory, as much of them as is free; returns how many bytes were read."""
    view, done, room = memoryview(bytearray(_BUFFER)), 0, free_memory_bytes()
    for path, ranges in _align_ranges(files).items():
        with suppress(OSError), _open_file(path) as (number, size):
            for low, high in ranges:
                end = min(high, size)
                while low < end and (count := os.preadv(number, [view[: min(end - low, room - done)]], low)):
                    low, done = low + count, done + count
    return done


@contextmanager
def restore_residency(files: Files) -> Iterator[None]:
    """Leaves in memory, after what is done inside, what of the files lay there before."""
    ranges = _align_ranges(files, _FOLIO)
    before = [] if _measure_share(ranges) is None else list(_find_resident_spans(ranges))
    try:
        yield
    finally:
        load(before)


def _align_ranges(files: Files, align: int = _PAGE) -> _Ranges:
    """Of each file the bytes [low, high) that are meant, in whole pieces of `align` bytes, the last beyond its end."""
    found: dict[Path, list[tuple[int, int]]] = {}
    for one in files:
        span = one if isinstance(one, FileSpan) else FileSpan(one)
        high = _END if span.end is None else -(-span.end // align) * align
        if span.begin < high:
            found.setdefault(span.path, []).append((span.begin // align * align, high))
    return {path: _merge_ranges(ranges) for path, ranges in found.items()}


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
    """(descriptor, size in bytes) of a file."""
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
                # One that is gone has no pages.
                if not _may_query(path, number):
                    return None
                pieces = list(_split_ranges(ranges[path], size))
                most = max(1, _MOST_PIECES // len(ranges))
                for low, high in pieces[:: -(-len(pieces) // most) or 1]:
                    found = _read_page_flags(number, low, high)
                    here, pages = here + int(np.count_nonzero(found)), pages + len(found)
    except OSError:
        # A file system without mappings, or a file that may not be read.
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
    """Whether each page of bytes [low, high) of an open file lies in memory; low is a page's first byte."""
    address = _LIBC.mmap(None, high - low, mmap.PROT_READ, mmap.MAP_SHARED, number, low)
    if address == _FAILED:
        raise _build_os_error()
    try:
        found = np.empty(-(-(high - low) // _PAGE), np.uint8)
        if _LIBC.mincore(address, high - low, found.ctypes.data):
            raise _build_os_error()
        return (found & 1).view(np.bool_)
    finally:
        _LIBC.munmap(address, high - low)


def _build_os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@cache
def _is_mincore_reliable() -> bool:
    """Whether mincore is to be trusted: in some sandboxes it says that even a hole lies in memory."""
    try:
        number = os.memfd_create("hole")
    except (AttributeError, OSError):
        # No Linux; or it is forbidden.
        return False
    try:
        os.ftruncate(number, _PAGE)
        return not _read_page_flags(number, 0, _PAGE).any()
    except OSError:
        return False
    finally:
        os.close(number)


def _may_query(path: Path, number: int) -> bool:
    """Whether mincore tells this user of a file. Of others' files it says that all lies in memory."""
    return os.geteuid() in (0, os.fstat(number).st_uid) or os.access(path, os.W_OK, effective_ids=True)


def _drop_pages(ranges: _Ranges, *, synced: bool) -> None:
    mapped = _find_mappings()
    for path, some in ranges.items():
        with suppress(OSError), _open_file(path) as (number, size):
            if synced:
                with suppress(OSError):
                    # A file system that cannot be written.
                    os.fdatasync(number)
            views = mapped.get(os.fstat(number).st_ino, ())
            for low, high in some:
                for address, first, last in views:
                    begin, end = max(low, first), min(high, last)
                    if begin < end:
                        _LIBC.madvise(address + begin - first, end - begin, _PAGEOUT)
                # In whole pages, and to the end by a length of 0: a page that is named in part stays.
                os.posix_fadvise(number, low, 0 if high >= size else high - low, os.POSIX_FADV_DONTNEED)


def _find_mappings() -> Mapping[int, list[tuple[int, int, int]]]:
    """The files that this process maps, by inode: the address of each mapping, and which bytes [low, high) it shows.

    Two files of two file systems may have one inode: MADV_PAGEOUT loses nothing of whatever lies at an address.
    """
    found: dict[int, list[tuple[int, int, int]]] = {}
    with suppress(OSError), open("/proc/self/maps", errors="replace") as lines:
        for line in lines:
            place, rights, offset, _, inode, *_ = line.split(None, 5)
            if rights.endswith("s") and inode != "0":
                first, last = (int(part, 16) for part in place.split("-"))
                low = int(offset, 16)
                found.setdefault(int(inode), []).append((first, low, low + last - first))
    return found


def _explain_failure(ranges: _Ranges, after: float | None) -> str:
    if not ranges:
        return "There is no file to read."
    if after is None and not _is_mincore_reliable():
        return "This system does not say what of a file lies in memory."
    mount = find_mount(next(iter(ranges)))
    if mount is not None and mount.kind in _IN_MEMORY:
        return f"The files lie in memory: their file system is {mount.kind}."
    if after is None:
        return "Nothing can be told of the files: they are empty, or gone, or another user's."
    kind = f"their file system ({mount.kind})" if mount is not None else "their file system"
    return f"{after:.0%} of the files stayed in memory: another process maps or reads them, or {kind} keeps them."
