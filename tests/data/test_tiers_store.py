"""The local copy: what lies where, locks, room, and what killed processes leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data._remote import make_pack

from headway.data import dataset
from headway.data.columns import FLAG_SPLIT, Shard
from headway.data.dataset import Dataset
from headway.data.tiers.layout import GAP_BYTES, RUN_BYTES, Extents, Layout
from headway.data.tiers.locks import ByteLocks
from headway.data.tiers.store import EVICT, READ, USED, WRITE, Store, in_use, remove

BLOCK = 4096
ALL = np.arange(60)
Ids = NDArray[np.int64]


# Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
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
    return Layout({name: np.array(columns[name], kinds[name])[mixed] for name in columns}, shards, BLOCK)


def some_of(layout: Layout, data: st.DataObject) -> tuple[Ids, Ids]:
    """Some records, and the others."""
    n = len(layout.extents(np.arange(len(layout._columns["shard"]))))
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
def test_blocks_are_counted_once_and_freed_where_nothing_kept_lies(layout: Layout, data: st.DataObject) -> None:
    taken, kept = (layout.extents(ids) for ids in some_of(layout, data))
    assert layout.bytes_in_blocks(kept) == len(blocks_of(kept)) * BLOCK
    free: set[tuple[int, int]] = set()
    for shard, begin, end in layout.blocks_without(taken, kept):
        assert begin % BLOCK == end % BLOCK == 0
        blocks = {(shard, block) for block in range(begin // BLOCK, end // BLOCK)}
        assert not blocks & free
        free |= blocks
    assert not free & blocks_of(kept)
    assert blocks_of(taken) - blocks_of(kept) <= free


@settings(deadline=None, max_examples=80)
@given(layout=layouts(), data=st.data())
def test_runs_hold_each_record_once_and_are_neither_long_nor_full_of_gaps(layout: Layout, data: st.DataObject) -> None:
    wanted, _ = some_of(layout, data)
    runs = layout.runs(wanted)
    assert sorted(np.concatenate([np.empty(0, np.int64), *(run.ids for run in runs)]).tolist()) == wanted.tolist()
    for run in runs:
        assert len(set(run.shard.tolist())) == 1
        assert (run.start[1:] - run.end[:-1] <= GAP_BYTES).all()
        assert run.end[-1] - run.start[0] <= RUN_BYTES + int((run.end - run.start).max())


def test_a_record_outside_of_its_shard_has_no_bytes() -> None:
    columns = {
        "shard": np.array([0, 0, 7], np.uint16),
        "offset": np.array([10, 90, 0], np.uint64),
        "length": np.array([20, 20, 20], np.uint32),
        "flags": np.zeros(3, np.uint8),
    }
    found = Layout(columns, [Shard(name="a", size=100)]).extents(np.arange(3))
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
    found = Layout(columns, [Shard(name="a", size=1000)]).extents(np.arange(3))
    assert found.ids.tolist() == [1, 2, 0]
    assert found.end.tolist() == [300, 400, 1000]


# Locks


def test_a_lock_keeps_other_openings_out_and_goes_with_its_own(tmp_path: Path) -> None:
    one, two = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert one.attempt(5)
    assert one.attempt(5)
    assert not two.attempt(5)
    assert not two.attempt(5, shared=True)
    assert two.attempt(6)
    one.release(5)
    assert two.attempt(5, shared=True)
    assert one.attempt(5, shared=True)
    assert not one.attempt(5)  # the other one still shares it
    two.close()
    assert one.attempt(5)
    one.close()
    one.release(5)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys, time
from headway.data.tiers.locks import ByteLocks
locks = ByteLocks(pathlib.Path({os.fspath(tmp_path / "locks")!r}))
assert locks.attempt(3)
print("held", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    mine = ByteLocks(tmp_path / "locks")
    assert not mine.attempt(3)
    child.kill()
    child.communicate()
    assert mine.attempt(3, patience_s=5)
    mine.close()


def test_a_forked_child_neither_holds_nor_frees_its_parents_locks(tmp_path: Path) -> None:
    mine, other = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    mine.attempt(1)
    child = os.fork()
    if not child:
        mine.release(1)
        mine.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not other.attempt(1)
    mine.close()
    assert other.attempt(1)
    other.close()


# Store


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 records of about 6 kB: several blocks each, the outer ones shared with their neighbours."""
    return dataset.open(make_pack(tmp_path_factory.mktemp("store"), size=(90, 60), shard_bytes=150_000))


@pytest.fixture
def stores(packed: Dataset, tmp_path: Path) -> Iterator[list[Store]]:
    opened: list[Store] = []
    yield opened
    for store in opened:
        store.close()


def extents_of(data: Dataset, ids: Ids) -> list[NDArray[np.uint8]]:
    return [np.frombuffer(record, np.uint8) for record in data.read(ids)]


def keep(store: Store, data: Dataset, ids: Ids) -> bool:
    return store.keep(ids, extents_of(data, ids))


def same(store: Store, data: Dataset, ids: Ids) -> bool:
    return [bytes(record) for record in store.read(ids)] == [bytes(record) for record in data.read(ids)]


def on_disk(store: Store) -> int:
    return sum(path.stat().st_blocks * 512 for path in store.folder.glob("*.rec"))


def by_number(ids: Ids) -> Ids:
    return ids + 1000


def emptied(store: Store) -> bool:
    """Asks for so much room that everything has to go; whether it went."""
    store.make_room(np.tile(ALL, 5), by_number, -1)
    return not store.present(ALL).any()


def test_what_is_kept_is_read_back_and_nothing_else_is_there(
    packed: Dataset, tmp_path: Path, stores: list[Store]
) -> None:
    store = Store(packed, tmp_path, 10**9)
    stores.append(store)
    some = np.array([3, 17, 40, 41, 59])
    assert not store.present(ALL).any()
    assert keep(store, packed, some)
    assert np.flatnonzero(store.present(ALL)).tolist() == some.tolist()
    assert same(store, packed, some)
    assert on_disk(store) <= store.kept_bytes < 8 * 4096 * len(some)
    second = Store(packed, tmp_path, 10**9)  # as another process would
    stores.append(second)
    assert same(second, packed, some)
    assert keep(second, packed, ALL)
    assert store.present(ALL).all()
    assert same(store, packed, ALL)


def test_it_never_takes_more_than_its_budget(packed: Dataset, tmp_path: Path, stores: list[Store]) -> None:
    budget = 150_000
    store = Store(packed, tmp_path, budget)
    stores.append(store)
    rng = np.random.default_rng(1)
    made = 0
    for step in range(300):
        sample = rng.integers(0, 60, 1)
        if not keep(store, packed, sample):
            assert store.make_room(sample, by_number, -1)
            made += 1
            assert keep(store, packed, sample)
        assert on_disk(store) <= store.kept_bytes <= budget, step
        here = np.flatnonzero(store.present(ALL))
        assert same(store, packed, here)
    assert made > 5


def test_what_is_needed_latest_goes_and_what_is_needed_sooner_stays(
    packed: Dataset, tmp_path: Path, stores: list[Store]
) -> None:
    store = Store(packed, tmp_path, 200_000)
    stores.append(store)
    ids = np.random.default_rng(2).permutation(60)
    for sample in ids:
        if not keep(store, packed, np.array([sample])):
            break
    here = np.flatnonzero(store.present(ALL))
    absent = np.setdiff1d(ALL, here)
    assert store.make_room(absent[:8], by_number, 1000 + 20)
    left = np.flatnonzero(store.present(ALL))
    gone = np.setdiff1d(here, left)
    assert 0 < len(gone) < 20
    assert gone.min() > left.max()
    assert not store.make_room(ALL, by_number, 1000 + 20)  # the samples up to 20 are needed sooner
    left = np.flatnonzero(store.present(ALL))
    assert left.tolist() == [sample for sample in here if sample <= 20]
    assert same(store, packed, left)


def test_records_in_use_stay_until_they_are_dropped(
    packed: Dataset, tmp_path: Path, stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.store._PATIENCE_S", 0.05)
    first, second = Store(packed, tmp_path, 10**6), Store(packed, tmp_path, 10**6)
    stores += [first, second]
    assert keep(first, packed, ALL)
    for user, evictor in ((first, second), (second, first), (first, first)):
        lease = user.lease()
        held = user.read(ALL)
        for _ in range(3):  # also when it tries again, from the other side
            assert not emptied(evictor)
            assert [bytes(record) for record in held] == [bytes(record) for record in packed.read(ALL)]
            assert user.present(ALL).all()
        newer = user.lease()
        del lease
        assert not emptied(evictor)
        del newer, held
        assert emptied(evictor)
        assert not user.present(ALL).any()
        assert keep(user, packed, ALL)


def test_a_lease_made_later_does_not_keep_what_went_before(
    packed: Dataset, tmp_path: Path, stores: list[Store]
) -> None:
    store = Store(packed, tmp_path, 10**6)
    stores.append(store)
    keep(store, packed, ALL)
    leases = [store.lease() for _ in range(3)]
    done = []
    thread = threading.Thread(target=lambda: done.append(emptied(store)))
    thread.start()
    try:
        while store.present(ALL).any():
            pass
        later = store.lease()
        del leases
        thread.join()
        assert done == [True]
        del later
    finally:
        thread.join()


def test_a_wrong_record_is_forgotten_and_kept_anew(packed: Dataset, tmp_path: Path, stores: list[Store]) -> None:
    store = Store(packed, tmp_path, 10**9)
    stores.append(store)
    ids = np.array([4, 5])
    store.keep(ids, [np.zeros(int(packed.length[sample]), np.uint8) for sample in ids])
    assert not same(store, packed, ids)
    store.forget(ids[:1])
    assert store.present(ids).tolist() == [False, True]
    keep(store, packed, ids)  # the second one is there already
    assert same(store, packed, ids[:1])
    assert not same(store, packed, ids[1:])


def test_state_of_another_set_or_damaged_begins_anew(packed: Dataset, tmp_path: Path) -> None:
    store = Store(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    store.close()
    for damage in (b"", b"\0" * 4156, b"x" * 4156, os.urandom(100)):
        (store.folder / "state").write_bytes(damage)
        again = Store(packed, tmp_path, 10**9)
        assert not again.present(ALL).any()
        assert on_disk(again) < 20_000  # what the records took is given back, up to the ends of files
        assert keep(again, packed, ALL)
        assert same(again, packed, ALL)
        again.close()


def test_a_shard_that_was_removed_or_cut_is_absent(packed: Dataset, tmp_path: Path) -> None:
    store = Store(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    names = [shard.name for shard in packed.description.shards]
    store.close()
    (store.folder / names[0]).unlink()
    os.truncate(store.folder / names[1], 100)
    again = Store(packed, tmp_path, 10**9)
    here = np.flatnonzero(again.present(ALL))
    assert here.tolist() == np.flatnonzero(packed.shard > 1).tolist()
    assert again.kept_bytes < 250_000
    assert same(again, packed, here)
    again.close()


def test_what_a_killed_process_left_is_given_back_by_the_next_one_alone(packed: Dataset, tmp_path: Path) -> None:
    store = Store(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    store._present[10:] = 0  # as if it had been killed while it made room
    store._header[2] = 7
    store.close()
    again = Store(packed, tmp_path, 10**9)
    assert int(packed.length[:10].sum()) <= again.kept_bytes < 150_000
    assert on_disk(again) < 150_000
    assert same(again, packed, np.arange(10))
    again.close()


@pytest.mark.parametrize("byte", [USED, WRITE, EVICT, READ, READ + 1])
def test_no_lock_that_another_process_holds_for_ever_hangs_it(
    packed: Dataset, tmp_path: Path, stores: list[Store], byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.store._PATIENCE_S", 0.02)
    if byte != USED:
        store = Store(packed, tmp_path, 10**6)
        stores.append(store)
        keep(store, packed, np.arange(30))
    else:
        (tmp_path / "packs" / packed.fingerprint).mkdir(parents=True)
    other = ByteLocks(tmp_path / "packs" / packed.fingerprint / "locks")
    assert other.attempt(byte, shared=byte >= READ)
    try:
        if byte == USED:
            with pytest.raises(OSError, match="another process"):
                Store(packed, tmp_path, 10**6)
            return
        assert keep(store, packed, np.arange(30, 60)) == (byte != WRITE)
        emptied(store)
        lease = store.lease()
        here = np.flatnonzero(store.present(ALL))
        assert same(store, packed, here)
        del lease
    finally:
        other.close()
    assert emptied(store)


# Several sets in one folder


def test_sets_in_use_share_the_budget_and_idle_ones_make_way(tmp_path: Path, packed: Dataset) -> None:
    small = dataset.open(make_pack(tmp_path / "small", count=20, size=(91, 60)))
    root = tmp_path / "cache"
    first = Store(packed, root, 10**6)
    keep(first, packed, ALL)
    took = first.kept_bytes
    assert in_use(first.folder)
    assert not remove(first.folder)
    budget = took + 40_000
    second = Store(small, root, budget)
    assert second.share_bytes <= 40_000
    first.close()
    assert not in_use(first.folder)
    second.make_room(np.arange(20), by_number, -1)  # the idle set has to go
    assert not first.folder.exists()
    assert keep(second, small, np.arange(20))
    third = Store(packed, root, budget)
    assert third.share_bytes + second.kept_bytes <= budget
    second.make_room(np.arange(1), by_number, -1)
    assert third.share_bytes + second.share_bytes <= budget
    assert third.share_bytes > second.share_bytes
    for store in (second, third):
        store.close()
    packed.close()
    shutil.rmtree(root)
