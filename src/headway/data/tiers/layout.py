"""RecordLayout: the places of records in shards, in bytes and in blocks of the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import FLAG_SPLIT, Shard
from headway.data.formats import recordio

Ids = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]

GAP_BYTES = 64 << 10
"""Records with smaller gaps are read in one request: reading so many bytes costs less than another request."""
RUN_BYTES = 4 << 20
"""Limit of one request, except for a single larger record."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Byte ranges [start, end) of records in their shards; int64 [k], sorted by shard and start."""

    ids: Ids
    shard: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, low: int, high: int) -> Extents:
        """Returns entries [low, high)."""
        return Extents(self.ids[low:high], self.shard[low:high], self.start[low:high], self.end[low:high])

    def slice_bytes(self, low: int, data: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Returns the bytes of each record, from those of a shard that begin at byte `low`."""
        bounds = zip((self.start - low).tolist(), (self.end - low).tolist(), strict=True)
        return [data[begin:end] for begin, end in bounds]

    def iterate_places(self) -> Iterator[tuple[int, int, int]]:
        """Yields (sample, shard, start) of each record."""
        return zip(self.ids.tolist(), self.shard.tolist(), self.start.tolist(), strict=True)


@final
class RecordLayout:
    """The places of a data set's records.

    Args:
        columns: shard, offset, length and flags of a data set.
        block: bytes of a block of the disk.
    """

    def __init__(self, columns: Columns, shards: Sequence[Shard], block: int = 4096) -> None:
        self._columns, self.block = columns, block
        self.sizes = np.array([shard.size for shard in shards], np.int64)
        self._split = np.flatnonzero(columns["flags"] & FLAG_SPLIT)
        self._split_end = self._find_split_ends()

    def get_lengths(self, ids: Ids) -> NDArray[np.int64]:
        """Returns the bytes of the samples' records."""
        return self._columns["length"][ids].astype(np.int64)

    def locate(self, ids: Ids) -> Extents:
        """Returns the byte ranges of these samples; a record outside its shard has none."""
        columns = self._columns
        shard, start = columns["shard"][ids].astype(np.int64), columns["offset"][ids].astype(np.int64)
        end = start + columns["length"][ids]
        if self._split.size:
            place = np.minimum(np.searchsorted(self._split, ids), len(self._split) - 1)
            end = np.where(self._split[place] == ids, self._split_end[place], end)
        size = np.where(shard < len(self.sizes), self.sizes[np.minimum(shard, len(self.sizes) - 1)], 0)
        # A damaged column must not lead to a request outside the shard.
        outside = (start < 0) | (end > size)
        shard, start, end = (np.where(outside, 0, part) for part in (shard, start, end))
        extents = Extents(ids, shard, start, end)
        key = _compute_sort_keys(extents)
        # Already sorted in a pack of Headway if ids ascend; sorting would cost three times the rest.
        if (key[1:] >= key[:-1]).all():
            return extents
        order = np.argsort(key, kind="stable")
        return Extents(ids[order], shard[order], start[order], end[order])

    def group_into_runs(self, ids: Ids) -> list[Extents]:
        """Returns these samples in groups that one request reads: adjacent, or nearly so."""
        extents = self.locate(ids)
        if not len(extents):
            return []
        # A run ends at a new shard, at a large gap, and at the size limit.
        cut = np.ones(len(extents), np.bool_)
        cut[1:] = (extents.shard[1:] != extents.shard[:-1]) | (extents.start[1:] - extents.end[:-1] > GAP_BYTES)
        begin = extents.start[np.maximum.accumulate(np.where(cut, np.arange(len(extents)), 0))]
        piece = (extents.start - begin) // RUN_BYTES
        cut[1:] |= piece[1:] != piece[:-1]
        places = [*np.flatnonzero(cut).tolist(), len(extents)]
        return [extents.select(low, high) for low, high in pairwise(places)]

    def count_block_bytes(self, extents: Extents) -> int:
        """Returns the bytes of all blocks that contain a byte of a record; a shared block counts once."""
        first, last = extents.start // self.block, np.maximum(extents.end - 1, extents.start) // self.block
        # Neighbours share a block if one begins in the block where the other ends.
        shared = np.count_nonzero((extents.shard[1:] == extents.shard[:-1]) & (first[1:] == last[:-1]))
        return (int((last - first + 1).sum()) - int(shared)) * self.block

    def find_free_blocks(self, taken: Extents, kept: Extents) -> list[tuple[int, int, int]]:
        """Returns (shard, begin, end) of the whole blocks with bytes of `taken` records and none of `kept` ones."""
        # Blocks that the taken records touch, shrunk by those of the nearest kept neighbours.
        begin, end = taken.start // self.block * self.block, -(-taken.end // self.block) * self.block
        if len(kept):
            place = np.searchsorted(_compute_sort_keys(kept), _compute_sort_keys(taken))
            before, after = np.maximum(place - 1, 0), np.minimum(place, len(kept) - 1)
            has_before = (place > 0) & (kept.shard[before] == taken.shard)
            has_after = (place < len(kept)) & (kept.shard[after] == taken.shard)
            begin = np.where(has_before, np.maximum(begin, -(-kept.end[before] // self.block) * self.block), begin)
            end = np.where(has_after, np.minimum(end, kept.start[after] // self.block * self.block), end)
        some = begin < end
        shard, begin, end = taken.shard[some], begin[some], end[some]
        # Adjacent ranges are merged: one call punches them all.
        cut = np.flatnonzero((shard[1:] != shard[:-1]) | (begin[1:] > end[:-1])) + 1
        first, last = np.concatenate([[0], cut]), np.concatenate([cut - 1, [len(shard) - 1]])
        if not len(shard):
            return []
        return list(zip(shard[first].tolist(), begin[first].tolist(), end[last].tolist(), strict=True))

    def _find_split_ends(self) -> NDArray[np.int64]:
        """Returns the ends of split records: the next record's start, as the columns lack their full length."""
        if not self._split.size:
            return np.zeros(0, np.int64)
        shard, start = self._columns["shard"].astype(np.int64), self._columns["offset"].astype(np.int64)
        order = np.lexsort((start, shard))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        after = place[self._split] + 1
        following = order[np.minimum(after, len(order) - 1)]
        here = np.minimum(shard[self._split], len(self.sizes) - 1)
        # The last record of a shard ends with the shard.
        alone = (after == len(order)) | (shard[following] != shard[self._split])
        return np.where(alone, self.sizes[here], start[following])


def _compute_sort_keys(extents: Extents) -> NDArray[np.int64]:
    # One integer sorts by shard, then by start; a shard is smaller than 2^47 bytes.
    return (extents.shard << 47) | extents.start


def extract_image(columns: Columns, sample: int, extent: NDArray[np.uint8]) -> memoryview | bytes:
    """Returns a record's image from its bytes in the shard; empty if its parts are damaged."""
    if not columns["flags"][sample] & FLAG_SPLIT:
        return extent.data
    try:
        return recordio.join_record(extent.data, 0, int(columns["length"][sample]))
    except DataError:
        return b""
