"""LMDB: finds the values of a database in its file, without the lmdb package.

A value is contiguous in the file, in a leaf page or in overflow pages of its own, and does not move while nobody
writes; so a finished database is read like any other shard, by offset and length. Offsets are why the lmdb package
does not do here: it returns values, not their place.

The file is pages (layout: LMDB 0.9, mdb.c; 64-bit, little-endian): two of metadata, of which the later transaction
counts, and a B+ tree. A page is u64 number, u16, u16 kind, u16 lower and u16 upper end of its free space (u32 number
of pages in overflow pages), and u16 offsets of its nodes. A node is u16 low and u16 high half of the value's size, u16
flags, u16 size of the key, key, value; in a branch page the first three are the number of the child's page, and there
is no value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import DataError
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.tar import ArchiveMember

MAGIC = struct.pack("<I", 0xBEEFC0DE)
MAGIC_AT = 16

_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_ENDS = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUB, _DUPLICATES = 1, 2, 4
_NO_PAGE = (1 << 64) - 1
_DUPLICATE_KEYS = 4
_DEPTH_LIMIT = 32
_COPY_AGAIN = "Copy it again."
_PAGE_SIZES = frozenset(1 << bit for bit in range(8, 17))


class _Meta(NamedTuple):
    page_bytes: int
    root: int
    flags: int
    last_page: int
    entries: int
    transaction: int


def read_entries(path: Path) -> Iterator[ArchiveMember]:
    """Yields keys (as text, Latin-1) and the places of their values, in the order of the keys. Raises DataError."""
    view = map_path(path)
    meta = _read_meta(view, path)
    # The header counts the entries; a tree that differs is damaged.
    left = meta.entries
    for member in _walk_tree(view, meta, path):
        left -= 1
        if left < 0:
            break
        yield member
    if left:
        what = f"its tree does not hold the {meta.entries:,} entries that its header promises"
        raise DataError(what, where=str(path), fix=_COPY_AGAIN)


def _read_meta(view: memoryview, path: Path) -> _Meta:
    try:
        # Two meta pages are written in turn, so that a crash leaves one intact.
        first = _read_meta_at(view, 0)
        second = _read_meta_at(view, first.page_bytes)
    except (struct.error, ValueError) as error:
        raise DataError("this is not an LMDB database, or it is damaged", where=str(path), fix=_COPY_AGAIN) from error
    meta = max(second, first, key=lambda found: found.transaction)
    # A database that is cut would read as zeros or raise SIGBUS.
    size = (meta.last_page + 1) * meta.page_bytes
    if size > len(view):
        what = f"the database is cut: {len(view):,} of {size:,} bytes"
        raise DataError(what, where=str(path), fix=_COPY_AGAIN)
    if meta.flags & _DUPLICATE_KEYS:
        raise DataError("its keys have several values each", where=str(path), fix="Keep one value for each key.")
    return meta


def _read_meta_at(view: memoryview, at: int) -> _Meta:
    magic, version, _, _ = _META.unpack_from(view, at + MAGIC_AT)
    at += MAGIC_AT + _META.size
    page_bytes = _TREE.unpack_from(view, at)[0]
    _, flags, _, _, _, _, count, root = _TREE.unpack_from(view, at + _TREE.size)
    last_page, transaction = _ENDS.unpack_from(view, at + 2 * _TREE.size)
    if struct.pack("<I", magic) != MAGIC or version != 1 or page_bytes not in _PAGE_SIZES:
        raise ValueError
    return _Meta(page_bytes, root, flags, last_page, count, transaction)


def _walk_tree(view: memoryview, meta: _Meta, path: Path) -> Iterator[ArchiveMember]:
    waiting = [] if meta.root == _NO_PAGE else [(meta.root, 0)]
    # A tree visits each page once; this count ends a damaged one that leads in a circle.
    left = meta.last_page + 1
    while waiting:
        number, depth = waiting.pop()
        at = number * meta.page_bytes
        where = f"{path}, page {number}"
        left -= 1
        if number > meta.last_page or left < 0 or depth > _DEPTH_LIMIT:
            raise DataError("its tree is damaged", where=where, fix=_COPY_AGAIN)
        _, _, kind, lower, _ = _PAGE.unpack_from(view, at)
        if not _PAGE.size <= lower <= meta.page_bytes or not kind & (_BRANCH | _LEAF):
            raise DataError("a damaged page", where=where, fix=_COPY_AGAIN)
        # The list of node offsets ends at the lower end of the free space.
        places = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", view, at + _PAGE.size)
        if any(not lower <= place <= meta.page_bytes - _NODE.size for place in places):
            raise DataError("a damaged page", where=where, fix=_COPY_AGAIN)
        if kind & _BRANCH:
            nodes = (_NODE.unpack_from(view, at + place) for place in reversed(places))
            # Reversed, since the stack returns the last child first and keys are in order.
            waiting.extend((low | high << 16 | flags << 32, depth + 1) for low, high, flags, _ in nodes)
        else:
            for place in places:
                yield _read_entry(view, meta, at, place, where)


def _read_entry(view: memoryview, meta: _Meta, at: int, place: int, where: str) -> ArchiveMember:
    low, high, flags, key_size = _NODE.unpack_from(view, at + place)
    size, key = low | high << 16, place + _NODE.size
    value, end = key + key_size, meta.page_bytes
    if flags & (_SUB | _DUPLICATES):
        raise DataError(
            "it contains several databases", where=where, fix="Copy the one with the images into a database of its own."
        )
    if value + (8 if flags & _BIG else size) > end:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    name = view[at + key : at + value].tobytes().decode("latin-1")
    # A small value follows its key; a large one is in overflow pages, and its page number follows the key.
    if not flags & _BIG:
        return ArchiveMember(name, at + value, size)
    (number,) = struct.unpack_from("<Q", view, at + value)
    offset = number * meta.page_bytes + _PAGE.size
    if number > meta.last_page or offset + size > (meta.last_page + 1) * meta.page_bytes:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    if not _PAGE.unpack_from(view, number * meta.page_bytes)[2] & _OVERFLOW:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    return ArchiveMember(name, offset, size)
