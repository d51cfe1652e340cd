"""Search for 64-bit hashes that differ in few bits, among hashes that are added as they come.

The first hashes are compared one by one with all. Of a million of them that would take half an hour, so most are kept
in tables: two words that differ in at most 10 bits differ in at most 2 of the 16 bits of one quarter (Norouzi, Punjani
and Fleet 2012, "Fast search in Hamming space with multi-index hashing"). A lookup of the 137 values near a quarter
then finds them among a hundredth of all words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

MAX_BITS = 10
"""Largest number of different bits of a pair that is found. Unrelated photographs differ in about 32."""
QUARTERS, QUARTER_BITS = 4, 16
TABLE_WORDS = 1 << 14
"""Words that are compared one by one before they go into the tables: a lookup takes as long as some 10,000 of them."""
FEW_ASKED = 128
"""Words that are searched for before tables are built, which takes as long as comparing each word with some 100."""
CANDIDATES = 1 << 22
"""Words compared at once: 32 MB of XORs, which stay near the processor."""

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]


@final
class HashSearch:
    """Words that can be searched. They are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._words: Words = np.empty(0, np.uint64)
        self._count = 0
        # For each quarter: numbers of the words sorted by its value, and where each value begins there.
        self._tables: list[tuple[Ids, Ids]] = []
        self._in_tables = 0
        self._asked = 0

    def __len__(self) -> int:
        return self._count

    def add(self, words: Words) -> None:
        """Adds words."""
        end = self._count + len(words)
        if end > len(self._words):
            # Doubled, so that many small additions copy each word about once.
            grown = np.empty(max(end, 2 * len(self._words)), np.uint64)
            grown[: self._count] = self._words[: self._count]
            self._words = grown
        self._words[self._count : end] = words
        self._count = end

    def find(self, words: Words, is_open: NDArray[np.bool_] | None = None) -> Iterator[tuple[Ids, Ids]]:
        """Yields (rows, numbers): places in `words`, and numbers of added words within MAX_BITS bits of them.

        Each pair comes once. Rows are sorted in each part; numbers are, too, unless there are so many words that they
        are in tables.

        Args:
            is_open: words that are searched for, bool [k]; read again for each part, so that the caller can end the
                search for those that have found what they need. None: all, to the end.
        """
        self._asked += len(words)
        if self._asked > FEW_ASKED and self._count - self._in_tables > TABLE_WORDS:
            self._tables = [_build_table(values) for values in _list_quarters(self._words[: self._count])]
            self._in_tables = self._count
        is_open = np.ones(len(words), np.bool_) if is_open is None else is_open
        for quarter in range(len(self._tables)):
            yield from self._look_up(words, np.flatnonzero(is_open), quarter)
        low = self._in_tables
        while low < self._count and (asked := np.flatnonzero(is_open)).size:
            high = min(self._count, low + max(1, CANDIDATES // len(asked)))
            bits = count_bits(words[asked, None] ^ self._words[None, low:high])
            rows, places = np.nonzero(bits <= MAX_BITS)
            yield asked[rows], places + low
            low = high

    def _look_up(self, words: Words, asked: Ids, quarter: int) -> Iterator[tuple[Ids, Ids]]:
        """Yields the pairs of one table that the tables before it do not have."""
        order, start = self._tables[quarter]
        near = _list_quarters(words[asked])[quarter][:, None] ^ _MASKS[None, :]
        begin = start[near]
        sizes = start[near + 1] - begin
        # As many words at once as have CANDIDATES between them; one may have more.
        ends = np.cumsum(sizes.sum(axis=1))
        low = 0
        while low < len(asked):
            before = ends[low - 1] if low else 0
            high = max(low + 1, int(np.searchsorted(ends, before + CANDIDATES, side="right")))
            rows, numbers = _expand(begin[low:high], sizes[low:high], order)
            rows = asked[rows + low]
            differ = words[rows] ^ self._words[numbers]
            is_new = count_bits(differ) <= MAX_BITS
            for earlier in _list_quarters(differ)[:quarter]:
                is_new &= count_bits(earlier.astype(np.uint64)) > _RADIUS
            yield rows[is_new], numbers[is_new]
            low = high


def count_bits(words: Words) -> NDArray[np.uint8]:
    """Returns the number of set bits of each word."""
    # numpy has it since 2.0; it is three times as fast.
    if (count := getattr(np, "bitwise_count", None)) is not None:
        return np.asarray(count(words), np.uint8)
    return _count_bits_by_halves(words)


def _count_bits_by_halves(words: Words) -> NDArray[np.uint8]:
    # Sums of 2, 4 and 8 neighbouring bits; the product then adds up the eight bytes (Warren, Hacker's Delight, 5-1).
    masks = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
    ones, twos, fours = (np.uint64(mask) for mask in masks)
    words = words - ((words >> np.uint64(1)) & ones)
    words = (words & twos) + ((words >> np.uint64(2)) & twos)
    words = (words + (words >> np.uint64(4))) & fours
    return ((words * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint8)


_RADIUS = MAX_BITS // QUARTERS
_VALUES = np.arange(1 << QUARTER_BITS, dtype=np.int64)
_MASKS = _VALUES[count_bits(_VALUES.astype(np.uint64)) <= _RADIUS]


def _list_quarters(words: Words) -> list[Ids]:
    shifted = [words >> np.uint64(QUARTER_BITS * quarter) for quarter in range(QUARTERS)]
    return [(one & np.uint64((1 << QUARTER_BITS) - 1)).astype(np.int64) for one in shifted]


def _build_table(values: Ids) -> tuple[Ids, Ids]:
    start = np.zeros((1 << QUARTER_BITS) + 1, np.int64)
    np.cumsum(np.bincount(values, minlength=1 << QUARTER_BITS), out=start[1:])
    return np.argsort(values.astype(np.uint16), kind="stable"), start


def _expand(begin: Ids, sizes: Ids, order: Ids) -> tuple[Ids, Ids]:
    """Returns the row of each word in these ranges of a table, and its number."""
    sizes_by_range = sizes.reshape(-1)
    ends = np.cumsum(sizes_by_range)
    # Place of each word in the table: its place in the result, shifted by where its range begins.
    places = np.arange(ends[-1]) + np.repeat(begin.reshape(-1) - (ends - sizes_by_range), sizes_by_range)
    return np.repeat(np.arange(len(sizes)), sizes.sum(axis=1)), order[places]
