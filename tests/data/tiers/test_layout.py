"""Where records lie, against a look at every block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.data.columns import FLAG_SPLIT, Shard
from headway.data.tiers.layout import MAX_GAP_BYTES, MAX_RUN_BYTES, Extents, RecordLayout

BLOCK = 4096
ALL = np.arange(60)
Ids = NDArray[np.int64]


@st.composite
def layouts(draw: st.DrawFn) -> RecordLayout:
    """Records of any sizes with gaps between them, in up to three shards, in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    longest, widest = draw(st.sampled_from([(50, 3), (5000, 40), (30_000, 100_000)]))
    shards, columns = [], {name: [] for name in ("shard", "offset", "length", "flags")}
    for number in range(draw(st.integers(1, 3))):
        at = 0
        for _ in range(draw(st.integers(1, 25))):
            at += int(rng.integers(0, widest))
            length = int(rng.integers(1, longest))
            for name, value in zip(columns, (number, at, length, 0), strict=True):
                columns[name].append(value)
            at += length
        shards.append(Shard(name=str(number), size=at + int(rng.integers(0, widest))))
    mixed = rng.permutation(len(columns["shard"]))
    kinds = {"shard": np.uint16, "offset": np.uint64, "length": np.uint32, "flags": np.uint8}
    return RecordLayout({name: np.array(columns[name], kinds[name])[mixed] for name in columns}, shards, BLOCK)


def some_of(layout: RecordLayout, data: st.DataObject) -> tuple[Ids, Ids]:
    """Some records, and the others."""
    n = len(layout.locate(np.arange(len(layout._columns["shard"]))))
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def blocks_of(found: Extents) -> set[tuple[int, int]]:
    return {
        (shard, block)
        for shard, start, end in zip(found.shard.tolist(), found.start.tolist(), found.end.tolist(), strict=True)
        for block in range(start // BLOCK, (end - 1) // BLOCK + 1)
    }


@settings(deadline=None, max_examples=80)
@given(layout=layouts(), data=st.data())
def test_blocks_are_counted_once_and_freed_where_nothing_kept_lies(layout: RecordLayout, data: st.DataObject) -> None:
    taken, kept = (layout.locate(ids) for ids in some_of(layout, data))
    assert layout.count_block_bytes(kept) == len(blocks_of(kept)) * BLOCK
    free: set[tuple[int, int]] = set()
    for shard, begin, end in layout.find_free_blocks(taken, kept):
        assert begin % BLOCK == end % BLOCK == 0
        blocks = {(shard, block) for block in range(begin // BLOCK, end // BLOCK)}
        assert not blocks & free
        free |= blocks
    assert not free & blocks_of(kept)
    assert blocks_of(taken) - blocks_of(kept) <= free


@settings(deadline=None, max_examples=80)
@given(layout=layouts(), data=st.data())
def test_runs_hold_each_record_once_and_are_neither_long_nor_full_of_gaps(
    layout: RecordLayout, data: st.DataObject
) -> None:
    wanted, _ = some_of(layout, data)
    runs = layout.group_into_runs(wanted)
    assert sorted(np.concatenate([np.empty(0, np.int64), *(run.ids for run in runs)]).tolist()) == wanted.tolist()
    for run in runs:
        assert len(set(run.shard.tolist())) == 1
        assert (run.start[1:] - run.end[:-1] <= MAX_GAP_BYTES).all()
        assert run.end[-1] - run.start[0] <= MAX_RUN_BYTES + int((run.end - run.start).max())


def test_a_record_outside_of_its_shard_has_no_bytes() -> None:
    columns = {
        "shard": np.array([0, 0, 7], np.uint16),
        "offset": np.array([10, 90, 0], np.uint64),
        "length": np.array([20, 20, 20], np.uint32),
        "flags": np.zeros(3, np.uint8),
    }
    found = RecordLayout(columns, [Shard(name="a", size=100)]).locate(np.arange(3))
    assert not found.shard.any()
    assert {sample: end - start for sample, start, end in zip(found.ids, found.start, found.end, strict=True)} == {
        0: 20,
        1: 0,
        2: 0,
    }


def test_a_split_record_reaches_to_the_next_one() -> None:
    columns = {
        "shard": np.array([0, 0, 0], np.uint16),
        "offset": np.array([500, 0, 300], np.uint64),
        "length": np.array([100, 250, 100], np.uint32),
        "flags": np.array([FLAG_SPLIT, FLAG_SPLIT, 0], np.uint8),
    }
    found = RecordLayout(columns, [Shard(name="a", size=1000)]).locate(np.arange(3))
    assert found.ids.tolist() == [1, 2, 0]
    assert found.end.tolist() == [300, 400, 1000]
    # Where the next one of a version, or the end of the shard, is far away, no record is so long.
    columns["offset"][0] = 1 << 29
    found = RecordLayout(columns, [Shard(name="a", size=1 << 30)]).locate(np.arange(3))
    assert found.end.tolist() == [300, 400, (1 << 29) + 2 * 100 + (1 << 20)]
