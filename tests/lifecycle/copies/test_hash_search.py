"""Search for hashes that differ in few bits: the pairs of a slow loop, with tables and without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lifecycle.copies import hash_search
from headway.lifecycle.copies.hash_search import MAX_BITS, HashSearch, count_bits


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20))
def test_bits_are_counted(words: list[int]) -> None:
    array = np.array(words, np.uint64)
    expected = [word.bit_count() for word in words]
    assert count_bits(array).tolist() == expected
    assert hash_search._count_bits_by_halves(array).tolist() == expected, "as with numpy before 2.0"


@given(st.integers(0, 10_000), st.integers(1, 400), st.booleans())
def test_pairs_are_those_of_a_slow_loop(seed: int, candidates: int, uses_tables: bool) -> None:
    """Whatever the size of a block. Each pair comes once, also if several tables have it."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 1 << 64, size=60, dtype=np.uint64)
    # Most are others with up to 14 bits changed, in one quarter or in all of them.
    for place in range(10, 60):
        flipped = generator.choice(64 if place % 2 else 16, size=generator.integers(0, 15), replace=False)
        words[place] = words[generator.integers(0, 10)] ^ np.uint64(sum(1 << int(bit) for bit in flipped))
    words = words[generator.permutation(60)]
    added, asked = words[:40], words[40:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_search, "CANDIDATES", candidates)
        patch.setattr(hash_search, "FEW_ASKED", 0)
        patch.setattr(hash_search, "TABLE_WORDS", 12 if uses_tables else 1 << 14)
        search = HashSearch()
        for part in np.array_split(added, 3):
            search.add(part)
            list(search.find(asked[:1]))
        assert bool(search._tables) == uses_tables
        found = [(int(row), int(number)) for part in search.find(asked) for row, number in zip(*part, strict=True)]
    assert len(search) == 40
    expected = [
        (row, number)
        for row in range(20)
        for number in range(40)
        if (int(asked[row]) ^ int(added[number])).bit_count() <= MAX_BITS
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("table_words", [10, 1 << 14])
def test_a_search_ends_where_the_caller_says(monkeypatch: pytest.MonkeyPatch, table_words: int) -> None:
    """A word that many are near to does not cost all of them."""
    monkeypatch.setattr(hash_search, "CANDIDATES", 64)
    monkeypatch.setattr(hash_search, "FEW_ASKED", 0)
    monkeypatch.setattr(hash_search, "TABLE_WORDS", table_words)
    search = HashSearch()
    search.add(np.zeros(1000, np.uint64))
    is_open, parts = np.ones(2, np.bool_), 0
    for rows, numbers in search.find(np.array([0, (1 << 64) - 1], np.uint64), is_open):
        assert set(rows.tolist()) <= {0}
        is_open[rows], parts = False, parts + len(numbers)
    assert is_open.tolist() == [False, True]
    assert parts in (32, 1000), "one part without tables, one lookup with them"


def test_nothing_is_found_in_nothing() -> None:
    search = HashSearch()
    assert [len(rows) for rows, _ in search.find(np.zeros(3, np.uint64))] == []
    search.add(np.zeros(2, np.uint64))
    assert sum(len(rows) for rows, _ in search.find(np.empty(0, np.uint64))) == 0
