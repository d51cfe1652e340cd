"""RecordLayout: byte ranges of records in shards, and the disk blocks they occupy."""

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

MAX_GAP_BYTES = 64 << 10
"""Records with smaller gaps are read in one request: reading so many extra bytes costs less than another request."""
MAX_RUN_BYTES = 4 << 20
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
        """Returns views of `data` (the bytes of one shard from byte `low` on), one for each record."""
        bounds = zip((self.start - low).tolist(), (self.end - low).tolist(), strict=True)
        return [data[start:end] for start, end in bounds]

    def iterate_starts(self) -> Iterator[tuple[int, int, int]]:
        """Yields (sample, shard, start) of each record."""
        return zip(self.ids.tolist(), self.shard.tolist(), self.start.tolist(), strict=True)


@final
class RecordLayout:
    """Byte ranges of a data set's records in its shards.

    Args:
        columns: shard, offset, length and flags of a data set.
        block_bytes: size of a disk block.

    Attributes:
        shard_bytes: size of each shard; int64 [shards].
    """

    def __init__(self, columns: Columns, shards: Sequence[Shard], block_bytes: int = 4096) -> None:
        self._columns = columns
        self._block_bytes = block_bytes
        self.shard_bytes = np.array([shard.size for shard in shards], np.int64)
        self._split_ids = np.flatnonzero(columns["flags"] & FLAG_SPLIT)
        self._split_ends = self._find_split_ends()

    def get_lengths(self, ids: Ids) -> NDArray[np.int64]:
        """Returns the bytes of the samples' images; int64 [k]."""
        return self._columns["length"][ids].astype(np.int64)

    def locate(self, ids: Ids) -> Extents:
        """Returns the byte ranges of these samples, sorted; that of a record outside its shard is empty."""
        columns = self._columns
        shard, start = columns["shard"][ids].astype(np.int64), columns["offset"][ids].astype(np.int64)
        end = start + columns["length"][ids]
        if self._split_ids.size:
            place = np.minimum(np.searchsorted(self._split_ids, ids), len(self._split_ids) - 1)
            end = np.where(self._split_ids[place] == ids, self._split_ends[place], end)
        size = np.where(
            shard < len(self.shard_bytes), self.shard_bytes[np.minimum(shard, len(self.shard_bytes) - 1)], 0
        )
        # A damaged column must not lead to a request outside the shard.
        outside = (start < 0) | (end > size)
        shard, start, end = (np.where(outside, 0, column) for column in (shard, start, end))
        extents = Extents(ids, shard, start, end)
        keys = _compute_sort_keys(extents)
        # Already sorted in a pack of Headway if ids ascend; sorting would cost three times the rest.
        if (keys[1:] >= keys[:-1]).all():
            return extents
        order = np.argsort(keys, kind="stable")
        return Extents(ids[order], shard[order], start[order], end[order])

    def group_into_runs(self, ids: Ids) -> list[Extents]:
        """Groups these samples into runs that one request reads each: adjacent, or with small gaps."""
        extents = self.locate(ids)
        if not len(extents):
            return []
        # A run ends at a new shard, at a large gap, and at the size limit.
        starts_run = np.ones(len(extents), np.bool_)
        starts_run[1:] = (extents.shard[1:] != extents.shard[:-1]) | (
            extents.start[1:] - extents.end[:-1] > MAX_GAP_BYTES
        )
        run_start = extents.start[np.maximum.accumulate(np.where(starts_run, np.arange(len(extents)), 0))]
        piece_index = (extents.start - run_start) // MAX_RUN_BYTES
        starts_run[1:] |= piece_index[1:] != piece_index[:-1]
        bounds = [*np.flatnonzero(starts_run).tolist(), len(extents)]
        return [extents.select(low, high) for low, high in pairwise(bounds)]

    def count_block_bytes(self, extents: Extents) -> int:
        """Returns the total size of all blocks that contain a byte of a record; a shared block counts once."""
        first_block, last_block = (
            extents.start // self._block_bytes,
            np.maximum(extents.end - 1, extents.start) // self._block_bytes,
        )
        # Neighbours share a block if one begins in the block where the other ends.
        num_shared = np.count_nonzero((extents.shard[1:] == extents.shard[:-1]) & (first_block[1:] == last_block[:-1]))
        return (int((last_block - first_block + 1).sum()) - int(num_shared)) * self._block_bytes

    def find_free_blocks(self, removed: Extents, kept: Extents) -> list[tuple[int, int, int]]:
        """Returns (shard, begin, end) of the whole blocks with bytes of `removed` records and none of `kept` ones."""
        # Blocks that the taken records touch, shrunk by those of the nearest kept neighbours.
        begin, end = (
            removed.start // self._block_bytes * self._block_bytes,
            -(-removed.end // self._block_bytes) * self._block_bytes,
        )
        if len(kept):
            next_kept = np.searchsorted(_compute_sort_keys(kept), _compute_sort_keys(removed))
            previous, following = np.maximum(next_kept - 1, 0), np.minimum(next_kept, len(kept) - 1)
            has_before = (next_kept > 0) & (kept.shard[previous] == removed.shard)
            has_after = (next_kept < len(kept)) & (kept.shard[following] == removed.shard)
            begin = np.where(
                has_before, np.maximum(begin, -(-kept.end[previous] // self._block_bytes) * self._block_bytes), begin
            )
            end = np.where(
                has_after, np.minimum(end, kept.start[following] // self._block_bytes * self._block_bytes), end
            )
        is_whole_block = begin < end
        shard, begin, end = removed.shard[is_whole_block], begin[is_whole_block], end[is_whole_block]
        # Adjacent ranges are merged: one call punches them all.
        breaks = np.flatnonzero((shard[1:] != shard[:-1]) | (begin[1:] > end[:-1])) + 1
        first, last = np.concatenate([[0], breaks]), np.concatenate([breaks - 1, [len(shard) - 1]])
        if not len(shard):
            return []
        return list(zip(shard[first].tolist(), begin[first].tolist(), end[last].tolist(), strict=True))

    def _find_split_ends(self) -> NDArray[np.int64]:
        """Returns the ends of split records: the next record's start, as the columns lack their full length."""
        if not self._split_ids.size:
            return np.zeros(0, np.int64)
        shard, start = self._columns["shard"].astype(np.int64), self._columns["offset"].astype(np.int64)
        order = np.lexsort((start, shard))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        next_rank = rank[self._split_ids] + 1
        following = order[np.minimum(next_rank, len(order) - 1)]
        own_shard = np.minimum(shard[self._split_ids], len(self.shard_bytes) - 1)
        # The last record of a shard ends with the shard.
        is_last = (next_rank == len(order)) | (shard[following] != shard[self._split_ids])
        ends = np.where(is_last, self.shard_bytes[own_shard], start[following])
        # The next record that a version of a store has may lie much farther in the shard.
        most = recordio.compute_split_record_bound(self._columns["length"][self._split_ids].astype(np.int64))
        bounded: NDArray[np.int64] = np.minimum(ends, start[self._split_ids] + most)
        return bounded


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
