"""Reads LMDB: finds the values of a database in its file, without the lmdb package.

A value is contiguous in the file, in a leaf page or in overflow pages of its own, and does not move while nobody
writes; so a finished database is read like any other shard, by offset and length. The lmdb package cannot be used,
as it returns values, not their offsets.

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
MAGIC_OFFSET = 16

_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_LAST_PAGE_AND_TRANSACTION = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG_VALUE, _SUB_DATABASE, _DUPLICATE_VALUES = 1, 2, 4
_NO_PAGE = (1 << 64) - 1
_DUPLICATE_KEYS = 4
_MAX_DEPTH = 32
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
    """Yields keys (as text, Latin-1) and the places of their values, in the order of the keys.

    Raises DataError if the file is not an LMDB database, is damaged, or holds several values a key.
    """
    view = map_path(path)
    meta = _read_meta(view, path)
    # The header counts the entries; a tree that differs is damaged.
    num_left = meta.entries
    for member in _walk_tree(view, meta, path):
        num_left -= 1
        if num_left < 0:
            break
        yield member
    if num_left:
        what = f"its tree does not hold the {meta.entries:,} entries that its header promises"
        raise DataError(what, where=str(path), fix=_COPY_AGAIN)


def _read_meta(view: memoryview, path: Path) -> _Meta:
    """Returns the meta page of the last transaction. Raises DataError if the file is not a usable database."""
    try:
        # Two meta pages are written in turn, so that a crash leaves one intact.
        first = _read_meta_at(view, 0)
        second = _read_meta_at(view, first.page_bytes)
    except (struct.error, ValueError) as error:
        raise DataError("this is not an LMDB database, or it is damaged", where=str(path), fix=_COPY_AGAIN) from error
    meta = max(second, first, key=lambda candidate: candidate.transaction)
    # A truncated database would read as zeros or raise SIGBUS.
    size = (meta.last_page + 1) * meta.page_bytes
    if size > len(view):
        what = f"the database is cut: {len(view):,} of {size:,} bytes"
        raise DataError(what, where=str(path), fix=_COPY_AGAIN)
    if meta.flags & _DUPLICATE_KEYS:
        raise DataError("its keys have several values each", where=str(path), fix="Keep one value for each key.")
    return meta


def _read_meta_at(view: memoryview, offset: int) -> _Meta:
    magic, version, _, _ = _META.unpack_from(view, offset + MAGIC_OFFSET)
    offset += MAGIC_OFFSET + _META.size
    page_bytes = _TREE.unpack_from(view, offset)[0]
    _, flags, _, _, _, _, count, root = _TREE.unpack_from(view, offset + _TREE.size)
    last_page, transaction = _LAST_PAGE_AND_TRANSACTION.unpack_from(view, offset + 2 * _TREE.size)
    if struct.pack("<I", magic) != MAGIC or version != 1 or page_bytes not in _PAGE_SIZES:
        raise ValueError
    return _Meta(page_bytes, root, flags, last_page, count, transaction)


def _walk_tree(view: memoryview, meta: _Meta, path: Path) -> Iterator[ArchiveMember]:
    """Yields the entries of the B+ tree in the order of their keys, depth first."""
    pending = [] if meta.root == _NO_PAGE else [(meta.root, 0)]
    # A tree has each page once; this count ends the walk of a damaged one that has a cycle.
    num_pages_left = meta.last_page + 1
    while pending:
        page_number, depth = pending.pop()
        page_offset = page_number * meta.page_bytes
        where = f"{path}, page {page_number}"
        num_pages_left -= 1
        if page_number > meta.last_page or num_pages_left < 0 or depth > _MAX_DEPTH:
            raise DataError("its tree is damaged", where=where, fix=_COPY_AGAIN)
        _, _, page_flags, lower, _ = _PAGE.unpack_from(view, page_offset)
        if not _PAGE.size <= lower <= meta.page_bytes or not page_flags & (_BRANCH | _LEAF):
            raise DataError("a damaged page", where=where, fix=_COPY_AGAIN)
        # The list of node offsets ends at the lower end of the free space.
        node_offsets = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", view, page_offset + _PAGE.size)
        if any(not lower <= node_offset <= meta.page_bytes - _NODE.size for node_offset in node_offsets):
            raise DataError("a damaged page", where=where, fix=_COPY_AGAIN)
        if page_flags & _BRANCH:
            nodes = (_NODE.unpack_from(view, page_offset + node_offset) for node_offset in reversed(node_offsets))
            # Reversed, since the stack returns the last child first and keys are in order.
            pending.extend(
                (page_low | page_middle << 16 | page_high << 32, depth + 1)
                for page_low, page_middle, page_high, _ in nodes
            )
        else:
            for node_offset in node_offsets:
                yield _read_entry(view, meta, page_offset, node_offset, where)


def _read_entry(view: memoryview, meta: _Meta, page_offset: int, node_offset: int, where: str) -> ArchiveMember:
    """Returns key and value range of one leaf node. Raises DataError if it is damaged or a database itself."""
    size_low, size_high, flags, key_size = _NODE.unpack_from(view, page_offset + node_offset)
    size = size_low | size_high << 16
    key_offset = node_offset + _NODE.size
    value_offset = key_offset + key_size
    page_end = meta.page_bytes
    if flags & (_SUB_DATABASE | _DUPLICATE_VALUES):
        raise DataError(
            "it contains several databases", where=where, fix="Copy the one with the images into a database of its own."
        )
    if value_offset + (8 if flags & _BIG_VALUE else size) > page_end:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    name = view[page_offset + key_offset : page_offset + value_offset].tobytes().decode("latin-1")
    # A small value follows its key; a large one is in overflow pages, and its page number follows the key.
    if not flags & _BIG_VALUE:
        return ArchiveMember(name, page_offset + value_offset, size)
    (overflow_page,) = struct.unpack_from("<Q", view, page_offset + value_offset)
    offset = overflow_page * meta.page_bytes + _PAGE.size
    if overflow_page > meta.last_page or offset + size > (meta.last_page + 1) * meta.page_bytes:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    if not _PAGE.unpack_from(view, overflow_page * meta.page_bytes)[2] & _OVERFLOW:
        raise DataError("a damaged entry", where=where, fix=_COPY_AGAIN)
    return ArchiveMember(name, offset, size)
