"""The local copy: what is kept, what makes way, and what killed processes leave."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.data.tiers._server import make_pack, wait_until

from headway.data import opening
from headway.data.dataset import Dataset
from headway.data.tiers.locks import ByteLocks
from headway.data.tiers.state import USED_LOCK, is_in_use, remove_set
from headway.data.tiers.store import EVICT_LOCK, READ_LOCK, WRITE_LOCK, RecordStore

BLOCK = 4096
ALL = np.arange(60)
Ids = NDArray[np.int64]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 records of about 6 kB: several blocks each, the outer ones shared with their neighbours."""
    return opening.open(make_pack(tmp_path_factory.mktemp("store"), size=(90, 60), shard_bytes=150_000))


@pytest.fixture
def stores(packed: Dataset, tmp_path: Path) -> Iterator[list[RecordStore]]:
    opened: list[RecordStore] = []
    yield opened
    for store in opened:
        store.close()


def extents_of(data: Dataset, ids: Ids) -> list[NDArray[np.uint8]]:
    return [np.frombuffer(record, np.uint8) for record in data.read(ids)]


def keep(store: RecordStore, data: Dataset, ids: Ids) -> bool:
    return store.keep(ids, extents_of(data, ids))


def same(store: RecordStore, data: Dataset, ids: Ids) -> bool:
    return [bytes(record) for record in store.read(ids)] == [bytes(record) for record in data.read(ids)]


def on_disk(store: RecordStore) -> int:
    return sum(path.stat().st_blocks * 512 for path in store.folder.glob("*.rec"))


def by_number(ids: Ids) -> Ids:
    return ids + 1000


def emptied(store: RecordStore) -> bool:
    """Asks for so much room that everything has to go; whether it went."""
    store.make_room(np.tile(ALL, 5), by_number, -1)
    return not store.find_present(ALL).any()


def test_what_is_kept_is_read_back_and_nothing_else_is_there(
    packed: Dataset, tmp_path: Path, stores: list[RecordStore]
) -> None:
    store = RecordStore(packed, tmp_path, 10**9)
    stores.append(store)
    some = np.array([3, 17, 40, 41, 59])
    assert not store.find_present(ALL).any()
    assert keep(store, packed, some)
    assert np.flatnonzero(store.find_present(ALL)).tolist() == some.tolist()
    assert same(store, packed, some)
    assert on_disk(store) <= store.kept_bytes < 8 * 4096 * len(some)
    second = RecordStore(packed, tmp_path, 10**9)  # as another process would
    stores.append(second)
    assert same(second, packed, some)
    assert keep(second, packed, ALL)
    assert store.find_present(ALL).all()
    assert same(store, packed, ALL)


def test_it_never_takes_more_than_its_budget(packed: Dataset, tmp_path: Path, stores: list[RecordStore]) -> None:
    budget = 150_000
    store = RecordStore(packed, tmp_path, budget)
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
        here = np.flatnonzero(store.find_present(ALL))
        assert same(store, packed, here)
    assert made > 5


def test_what_is_needed_latest_goes_and_what_is_needed_sooner_stays(
    packed: Dataset, tmp_path: Path, stores: list[RecordStore]
) -> None:
    store = RecordStore(packed, tmp_path, 200_000)
    stores.append(store)
    ids = np.random.default_rng(2).permutation(60)
    for sample in ids:
        if not keep(store, packed, np.array([sample])):
            break
    here = np.flatnonzero(store.find_present(ALL))
    absent = np.setdiff1d(ALL, here)
    assert store.make_room(absent[:8], by_number, 1021)
    left = np.flatnonzero(store.find_present(ALL))
    gone = np.setdiff1d(here, left)
    assert 0 < len(gone) < 20
    assert gone.min() > left.max()
    assert not store.make_room(ALL, by_number, 1021)  # the samples up to 20 are needed sooner
    left = np.flatnonzero(store.find_present(ALL))
    assert left.tolist() == [sample for sample in here if sample <= 20]
    assert same(store, packed, left)


def test_records_in_use_stay_until_they_are_dropped(
    packed: Dataset, tmp_path: Path, stores: list[RecordStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.store._LOCK_TIMEOUT_S", 0.05)
    first, second = RecordStore(packed, tmp_path, 10**6), RecordStore(packed, tmp_path, 10**6)
    stores += [first, second]
    assert keep(first, packed, ALL)
    for user, evictor in ((first, second), (second, first), (first, first)):
        lease = user.lease()
        held = user.read(ALL)
        for _ in range(3):  # also when it tries again, from the other side
            assert not emptied(evictor)
            assert [bytes(record) for record in held] == [bytes(record) for record in packed.read(ALL)]
            assert user.find_present(ALL).all()
        newer = user.lease()
        del lease
        assert not emptied(evictor)
        del newer, held
        assert emptied(evictor)
        assert not user.find_present(ALL).any()
        assert keep(user, packed, ALL)


def test_a_lease_made_later_does_not_keep_what_went_before(
    packed: Dataset, tmp_path: Path, stores: list[RecordStore]
) -> None:
    store = RecordStore(packed, tmp_path, 10**6)
    stores.append(store)
    keep(store, packed, ALL)
    leases = [store.lease() for _ in range(3)]
    done = []
    thread = threading.Thread(target=lambda: done.append(emptied(store)))
    thread.start()
    try:
        wait_until(lambda: not store.find_present(ALL).any())
        later = store.lease()
        del leases
        thread.join()
        assert done == [True]
        del later
    finally:
        thread.join()


def test_a_wrong_record_is_forgotten_and_kept_anew(packed: Dataset, tmp_path: Path, stores: list[RecordStore]) -> None:
    store = RecordStore(packed, tmp_path, 10**9)
    stores.append(store)
    ids = np.array([4, 5])
    store.keep(ids, [np.zeros(int(packed.length[sample]), np.uint8) for sample in ids])
    assert not same(store, packed, ids)
    store.forget(ids[:1])
    assert store.find_present(ids).tolist() == [False, True]
    keep(store, packed, ids)  # the second one is there already
    assert same(store, packed, ids[:1])
    assert not same(store, packed, ids[1:])


def test_state_of_another_set_or_damaged_begins_anew(packed: Dataset, tmp_path: Path) -> None:
    store = RecordStore(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    store.close()
    for damage in (b"", b"\0" * 4156, b"x" * 4156, os.urandom(100)):
        (store.folder / "state").write_bytes(damage)
        again = RecordStore(packed, tmp_path, 10**9)
        assert not again.find_present(ALL).any()
        assert on_disk(again) < 20_000  # what the records took is given back, up to the ends of files
        assert keep(again, packed, ALL)
        assert same(again, packed, ALL)
        again.close()


def test_a_shard_that_was_removed_or_cut_is_absent(packed: Dataset, tmp_path: Path) -> None:
    store = RecordStore(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    names = [shard.name for shard in packed.description.shards]
    store.close()
    (store.folder / names[0]).unlink()
    os.truncate(store.folder / names[1], 100)
    again = RecordStore(packed, tmp_path, 10**9)
    here = np.flatnonzero(again.find_present(ALL))
    assert here.tolist() == np.flatnonzero(packed.shard > 1).tolist()
    assert again.kept_bytes < 250_000
    assert same(again, packed, here)
    again.close()


def test_what_a_killed_process_left_is_given_back_by_the_next_one_alone(packed: Dataset, tmp_path: Path) -> None:
    store = RecordStore(packed, tmp_path, 10**9)
    keep(store, packed, ALL)
    store._state.present[10:] = 0  # as if it had been killed while it made room
    store._state.kept_bytes = 7
    store.close()
    again = RecordStore(packed, tmp_path, 10**9)
    assert int(packed.length[:10].sum()) <= again.kept_bytes < 150_000
    assert on_disk(again) < 150_000
    assert same(again, packed, np.arange(10))
    again.close()


@pytest.mark.parametrize("byte", [USED_LOCK, WRITE_LOCK, EVICT_LOCK, READ_LOCK, READ_LOCK + 1])
def test_no_lock_that_another_process_holds_for_ever_hangs_it(
    packed: Dataset, tmp_path: Path, stores: list[RecordStore], byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.store._LOCK_TIMEOUT_S", 0.02)
    if byte != USED_LOCK:
        store = RecordStore(packed, tmp_path, 10**6)
        stores.append(store)
        keep(store, packed, np.arange(30))
    else:
        (tmp_path / "packs" / packed.fingerprint).mkdir(parents=True)
    other = ByteLocks(tmp_path / "packs" / packed.fingerprint / "locks")
    assert other.try_lock(byte, shared=byte >= READ_LOCK)
    try:
        if byte == USED_LOCK:
            with pytest.raises(OSError, match="another process"):
                RecordStore(packed, tmp_path, 10**6)
            return
        assert keep(store, packed, np.arange(30, 60)) == (byte != WRITE_LOCK)
        emptied(store)
        lease = store.lease()
        here = np.flatnonzero(store.find_present(ALL))
        assert same(store, packed, here)
        del lease
    finally:
        other.close()
    assert emptied(store)


def test_sets_in_use_share_the_budget_and_idle_ones_make_way(tmp_path: Path, packed: Dataset) -> None:
    small = opening.open(make_pack(tmp_path / "small", count=20, size=(91, 60)))
    root = tmp_path / "cache"
    first = RecordStore(packed, root, 10**6)
    keep(first, packed, ALL)
    took = first.kept_bytes
    assert is_in_use(first.folder)
    assert not remove_set(first.folder)
    budget = took + 40_000
    second = RecordStore(small, root, budget)
    assert second.share_bytes <= 40_000
    first.close()
    assert not is_in_use(first.folder)
    RecordStore(small, root, 10**6).close()
    assert first.folder.exists()  # there is room for both
    second.make_room(np.arange(20), by_number, -1)  # the idle set has to go
    assert not first.folder.exists()
    assert keep(second, small, np.arange(20))
    third = RecordStore(packed, root, budget)
    assert third.share_bytes + second.kept_bytes <= budget
    second.make_room(np.arange(1), by_number, -1)
    assert third.share_bytes + second.share_bytes <= budget
    assert third.share_bytes > second.share_bytes
    keep(third, packed, ALL[:40])
    fourth = RecordStore(opening.open(make_pack(tmp_path / "fourth", count=60, size=(92, 60))), root, budget)
    assert fourth.share_bytes + second.kept_bytes + third.kept_bytes <= budget
    third.make_room(ALL[50:51], by_number, 10**6)  # everything is needed before, but the set has to give way
    assert third.kept_bytes <= third.share_bytes < budget // 2
    assert same(third, packed, np.flatnonzero(third.find_present(ALL)))
    for store in (second, third, fourth):
        store.close()
    packed.close()
    shutil.rmtree(root)
