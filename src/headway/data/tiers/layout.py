"""Where records lie in shards, in bytes and in blocks of the disk."""

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
"""Records that lie no further apart are read at once: so much costs less than another request."""
RUN_BYTES = 4 << 20
"""Most bytes of one request, but for one large record."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Bytes [start, end) of some records in their shards; int64 [k], in the order of shard and start."""

    ids: Ids
    shard: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, low: int, high: int) -> Extents:
        return Extents(self.ids[low:high], self.shard[low:high], self.start[low:high], self.end[low:high])

    def slice_bytes(self, low: int, data: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The bytes of each, of a shard's bytes from `low` on."""
        bounds = zip((self.start - low).tolist(), (self.end - low).tolist(), strict=True)
        return [data[begin:end] for begin, end in bounds]

    def iterate_places(self) -> Iterator[tuple[int, int, int]]:
        """(sample, shard, start) of each."""
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
        """Bytes of the samples' records."""
        return self._columns["length"][ids].astype(np.int64)

    def locate(self, ids: Ids) -> Extents:
        """Of these samples. A record that its shard does not hold has no bytes there."""
        columns = self._columns
        shard, start = columns["shard"][ids].astype(np.int64), columns["offset"][ids].astype(np.int64)
        end = start + columns["length"][ids]
        if self._split.size:
            place = np.minimum(np.searchsorted(self._split, ids), len(self._split) - 1)
            end = np.where(self._split[place] == ids, self._split_end[place], end)
        size = np.where(shard < len(self.sizes), self.sizes[np.minimum(shard, len(self.sizes) - 1)], 0)
        outside = (start < 0) | (end > size)
        shard, start, end = (np.where(outside, 0, part) for part in (shard, start, end))
        found = Extents(ids, shard, start, end)
        key = _compute_sort_keys(found)
        if (key[1:] >= key[:-1]).all():  # as in a pack of ours where ids ascend; sorting costs three times the rest
            return found
        order = np.argsort(key, kind="stable")
        return Extents(ids[order], shard[order], start[order], end[order])

    def group_into_runs(self, ids: Ids) -> list[Extents]:
        """Of these samples, those together that are read at once: they lie side by side, or nearly."""
        found = self.locate(ids)
        if not len(found):
            return []
        cut = np.ones(len(found), np.bool_)
        cut[1:] = (found.shard[1:] != found.shard[:-1]) | (found.start[1:] - found.end[:-1] > GAP_BYTES)
        begin = found.start[np.maximum.accumulate(np.where(cut, np.arange(len(found)), 0))]
        piece = (found.start - begin) // RUN_BYTES
        cut[1:] |= piece[1:] != piece[:-1]
        places = [*np.flatnonzero(cut).tolist(), len(found)]
        return [found.select(low, high) for low, high in pairwise(places)]

    def count_block_bytes(self, found: Extents) -> int:
        """Bytes of all blocks that hold a byte of one of them; a block that two of them share counts once."""
        first, last = found.start // self.block, np.maximum(found.end - 1, found.start) // self.block
        shared = np.count_nonzero((found.shard[1:] == found.shard[:-1]) & (first[1:] == last[:-1]))
        return (int((last - first + 1).sum()) - int(shared)) * self.block

    def find_free_blocks(self, taken: Extents, kept: Extents) -> list[tuple[int, int, int]]:
        """(shard, begin, end) of the whole blocks that hold bytes of `taken` records and none of a `kept` one."""
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
        cut = np.flatnonzero((shard[1:] != shard[:-1]) | (begin[1:] > end[:-1])) + 1
        first, last = np.concatenate([[0], cut]), np.concatenate([cut - 1, [len(shard) - 1]])
        if not len(shard):
            return []
        return list(zip(shard[first].tolist(), begin[first].tolist(), end[last].tolist(), strict=True))

    def _find_split_ends(self) -> NDArray[np.int64]:
        """A split record ends before the next record's image; how long it is is not in the columns."""
        if not self._split.size:
            return np.zeros(0, np.int64)
        shard, start = self._columns["shard"].astype(np.int64), self._columns["offset"].astype(np.int64)
        order = np.lexsort((start, shard))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        after = place[self._split] + 1
        following = order[np.minimum(after, len(order) - 1)]
        here = np.minimum(shard[self._split], len(self.sizes) - 1)
        alone = (after == len(order)) | (shard[following] != shard[self._split])
        return np.where(alone, self.sizes[here], start[following])


def _compute_sort_keys(found: Extents) -> NDArray[np.int64]:
    return (found.shard << 47) | found.start


def extract_image(columns: Columns, sample: int, extent: NDArray[np.uint8]) -> memoryview | bytes:
    """A record's bytes, of those that it takes in its shard; none where its parts are damaged."""
    if not columns["flags"][sample] & FLAG_SPLIT:
        return extent.data
    try:
        return recordio.join_record(extent.data, 0, int(columns["length"][sample]))
    except DataError:
        return b""
