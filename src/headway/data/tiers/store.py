"""RecordStore: records of one data set in local files, shared by the processes of a host.

Each shard has a sparse local copy that holds a record at its own offset, so a kept record is read by mapping, as in a
local pack. A record that is removed becomes a hole. A mapped file has one byte a sample, 1 if the record is present. It
is set after the record is written, so a process may be killed at any moment. After a power failure the byte may have
reached the disk before the record; the checksum at each process's first read of the record shows that.

Locks are single bytes of the file `locks`: USED_LOCK (shared, by every process that uses the set), WRITE_LOCK (to
change which records are present), EVICT_LOCK (to make room), READ_LOCK and READ_LOCK + 1 (shared, by processes that
hold Records), and FETCH_LOCK + i (to fetch sample i). Eviction has a grace period, as in read-copy-update: a process
marks records absent, moves new leases from side 0 (READ_LOCK) to side 1 (READ_LOCK + 1) or back, waits until nobody
holds the old side, and only then punches holes. So bytes in use stay.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.records import Records
from headway.data.shards import MappedShards
from headway.data.tiers.layout import Ids, RecordLayout
from headway.data.tiers.locks import ByteLocks
from headway.data.tiers.sparse import SparseFiles
from headway.data.tiers.state import LOCKS_FILE, STATE_FILE, USED_LOCK, StoreState, compute_share_bytes
from headway.data.version_columns import has_sample_ids

PACKS_FOLDER = "packs"
WRITE_LOCK, EVICT_LOCK, READ_LOCK, FETCH_LOCK = 1, 2, 4, 16

_LOCK_TIMEOUT_S = 2.0
"""Longest wait for a lock that is held only for moments; a suspended process may hold it for ever."""
_SHARE_REFRESH_S = 1.0
"""Shortest time between two computations of this set's share of the budget."""

NextUse = Callable[[Ids], NDArray[np.int64]]
"""Callback that returns the next position at which each sample is needed; int64 [k]."""


@final
class Lease:
    """While it lives, records that were present after its creation stay in place."""

    __slots__ = ("_end", "_side")

    def __init__(self, end: Callable[[int], None], side: int) -> None:
        self._end = end
        self._side = side

    def __del__(self) -> None:
        self._end(self._side)


@final
class RecordStore:
    """Records of `dataset`, kept in `root / packs / fingerprint`.

    Args:
        dataset: provides the columns; its records are not read.
        root: the cache folder, which holds the stores of other sets too.
        budget_bytes: limit of all sets in the folder together; see `compute_share_bytes`.

    Raises:
        OSError: the folder cannot be written, is full, or its file system has no sparse files.
    """

    def __init__(self, dataset: Dataset, root: Path, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.folder = root / PACKS_FOLDER / name_cached_set(dataset)
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = dataset.description.shards
        columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
        self._layout = RecordLayout(columns, shards, max(4096, os.statvfs(self.folder).f_bsize))
        self._files = SparseFiles(self.folder, shards)
        self._mapped = MappedShards(self.folder, shards, columns)
        self._total_bytes = sum(shard.size for shard in shards)
        self._write_lock = threading.Lock()
        self._eviction_lock = threading.Lock()
        self._lease_lock = threading.Lock()
        # Number of leases of this process on each side; the byte lock is released with the last one.
        self._leases_by_side = [0, 0]
        self._ended_sides = deque[int]()
        self._closed = False
        self._locks, is_exclusive = self._lock_for_use()
        try:
            self._state = StoreState(
                self.folder / STATE_FILE, len(dataset), self._total_bytes, is_exclusive=is_exclusive
            )
            if is_exclusive:
                self._repair()
                self._locks.try_lock(USED_LOCK, shared=True)
            self._update_share()
        except BaseException:
            self._locks.close()
            raise

    def find_present(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the records in the store; bool [k]."""
        is_present: NDArray[np.bool_] = self._state.present[ids] != 0
        return is_present

    @property
    def kept_bytes(self) -> int:
        """Upper bound of the disk space that the records take."""
        return self._state.kept_bytes

    def lease(self) -> Lease:
        """Returns a lease. Take one before `find_present` and `read`, and keep it while the bytes are in use."""
        with self._lease_lock:
            while True:
                side = self._state.side
                # A side that is being drained is no longer the side of the state, so try again.
                if not self._leases_by_side[side] and not self._locks.try_lock(READ_LOCK + side, shared=True):
                    continue
                if self._state.side == side:
                    self._leases_by_side[side] += 1
                    break
                if not self._leases_by_side[side]:
                    self._locks.release(READ_LOCK + side)
        self._release_ended_leases()
        return Lease(self._end_lease, side)

    def read(self, ids: Ids) -> Records:
        """Returns the bytes of present records, as `Dataset.read`."""
        return self._mapped.read(ids)

    def claim(self, ids: Ids) -> NDArray[np.bool_]:
        """Claims these records for fetching, until `unclaim`.

        Returns:
            bool [k], a mask of the claimed records: those that no other process has claimed.
        """
        return np.array([self._locks.try_lock(FETCH_LOCK + sample) for sample in ids.tolist()], np.bool_)

    def unclaim(self, ids: Ids) -> None:
        """Releases records claimed by `claim`."""
        for sample in ids.tolist():
            self._locks.release(FETCH_LOCK + sample)

    def keep(self, ids: Ids, extents: Sequence[NDArray[np.uint8]]) -> bool:
        """Writes records and marks them present.

        Args:
            extents: the bytes of each record in its shard.

        Returns:
            False, with nothing written, if there is no room for all of them or the store cannot be locked.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        # The share changes when processes start or end using other sets.
        if time.monotonic() > self._share_time_s + _SHARE_REFRESH_S:
            self._update_share()
        with self._lock_for_writing() as is_locked:
            extent_by_sample = dict(zip(ids.tolist(), extents, strict=True))
            # Another process may have written some of these records already.
            absent = self._layout.locate(ids[self._state.present[ids] == 0])
            need_bytes = self._layout.count_block_bytes(absent)
            if not is_locked or self.kept_bytes + need_bytes > self.share_bytes:
                return False
            for sample, shard, start in absent.iterate_starts():
                self._files.write(shard, start, extent_by_sample[sample])
            # Set after the bytes are written: readers trust this byte.
            self._state.present[absent.ids] = 1
            self._state.kept_bytes += need_bytes
            return True

    def forget(self, ids: Ids) -> None:
        """Marks records with wrong bytes absent; the next `keep` overwrites them."""
        with self._lock_for_writing() as is_locked:
            if is_locked:
                self._state.present[ids] = 0

    def make_room(self, ids: Ids, next_use: NextUse, eviction_start: int) -> bool:
        """Evicts the records that are needed last until these fit; returns True if they fit.

        Args:
            ids: the samples to make room for.
            next_use: returns the next position at which samples are needed.
            eviction_start: records needed before this position stay, unless the set takes more than its share.
        """
        with self._eviction_lock:
            if not self._locks.try_lock(EVICT_LOCK, timeout_s=_LOCK_TIMEOUT_S):
                return False
            try:
                self._update_share()
                need_bytes = self._layout.count_block_bytes(self._layout.locate(ids))
                return self._make_room(need_bytes, next_use, eviction_start)
            finally:
                self._locks.release(EVICT_LOCK)

    def close(self) -> None:
        """Stops using the set; its lock file is closed with the last lease, and Records that were read stay valid."""
        self._closed = True
        with self._write_lock:
            self._files.close()
        self._release_ended_leases()

    # Start of use

    def _lock_for_use(self) -> tuple[ByteLocks, bool]:
        """Opens the lock file and locks USED_LOCK: exclusively if no other process uses the set, else shared.

        Returns the locks, and True if the lock is exclusive. Raises OSError if another process keeps an exclusive lock.
        """
        deadline = time.monotonic() + 5 * _LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The file is missing while another process removes the set.
            with contextlib.suppress(FileNotFoundError):
                locks = ByteLocks(self.folder / LOCKS_FILE)
                is_exclusive = locks.try_lock(USED_LOCK)
                # Neither lock: another process is repairing the set.
                is_locked = is_exclusive or locks.try_lock(USED_LOCK, shared=True)
                # The file may have been removed between the opening and the lock.
                if is_locked and os.path.samestat(os.stat(self.folder / LOCKS_FILE), os.fstat(locks.descriptor)):
                    return locks, is_exclusive
                locks.close()
            time.sleep(0.01)
        raise OSError(errno.EBUSY, "another process holds it")

    def _repair(self) -> None:
        """Corrects the state after processes were killed: lost files, kept bytes, and blocks without a record."""
        present = self._layout.locate(self._state.list_present())
        is_complete = self._files.find_complete()
        # A copy of the wrong length was created by a process that was killed.
        is_lost = ~is_complete[np.minimum(present.shard, len(is_complete) - 1)]
        self._state.present[present.ids[is_lost]] = 0
        self._recount_kept_bytes()
        self._punch_surplus_blocks()

    def _update_share(self) -> None:
        """Computes this set's share of the budget, `share_bytes`, again."""
        self.share_bytes = compute_share_bytes(self.folder, self._total_bytes, self._budget_bytes)
        self._share_time_s = time.monotonic()

    # Making room

    def _make_room(self, need_bytes: int, next_use: NextUse, eviction_start: int) -> bool:
        """Evicts records until `need_bytes` fit; the caller holds EVICT_LOCK. Returns True if they fit."""
        with self._lock_for_writing() as is_locked:
            if not is_locked:
                return False
            self._recount_kept_bytes()
        surplus = self.kept_bytes + need_bytes - self.share_bytes
        if surplus <= 0:
            return True
        present = self._state.list_present()
        positions = next_use(present)
        # Belady: the record that is needed last is evicted first.
        order = np.argsort(-positions, kind="stable")
        # Bytes freed by evicting the first k of them.
        freed_bytes = np.cumsum(self._layout.get_lengths(present[order]))
        # 3 % more than needed, so that evictions are rare.
        num_wanted = int(np.searchsorted(freed_bytes, surplus + self.share_bytes // 32)) + 1
        # If the share shrank, even records that are needed soon are evicted.
        excess_bytes = self.kept_bytes - self.share_bytes
        num_forced = int(np.searchsorted(freed_bytes, excess_bytes)) + (excess_bytes > 0)
        num_evictable = np.count_nonzero(positions >= eviction_start)
        evicted = present[order[: max(num_forced, min(num_wanted, num_evictable))]]
        if not len(evicted) or not self._evict(evicted):
            return False
        return self.kept_bytes + need_bytes <= self.share_bytes

    def _evict(self, ids: Ids) -> bool:
        """Marks these records absent and punches holes; returns False, and keeps them, if Records in use block it."""
        old_side = self._state.side
        # The other side may still be held since an attempt that timed out; its leases cover these records too.
        if not self._wait_until_drained(1 - old_side):
            return False
        self._locks.release(READ_LOCK + 1 - old_side)
        self._state.present[ids] = 0
        # New leases hold the other side, and their readers see the records as absent.
        self._state.side = 1 - old_side
        is_drained = self._wait_until_drained(old_side)
        try:
            with self._lock_for_writing() as is_locked:
                if not is_drained or not is_locked:
                    self._state.present[ids] = 1
                    return False
                # Another process may have stored some of them again.
                self._punch(ids[self._state.present[ids] == 0])
                self._recount_kept_bytes()
                self._punch_surplus_blocks()
                return True
        finally:
            if is_drained:
                self._locks.release(READ_LOCK + old_side)

    def _wait_until_drained(self, side: int) -> bool:
        """Waits until no process has a lease of a side, and locks the side. Returns False after the timeout."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            with self._lease_lock:
                if not self._leases_by_side[side] and self._locks.try_lock(READ_LOCK + side):
                    return True
            self._release_ended_leases()
            if self._closed or time.monotonic() > deadline:
                return False
            time.sleep(0.001)

    def _punch(self, absent: Ids) -> None:
        present = self._layout.locate(self._state.list_present())
        for shard, begin, end in self._layout.find_free_blocks(self._layout.locate(absent), present):
            self._files.punch(shard, begin, end)

    def _recount_kept_bytes(self) -> None:
        self._state.kept_bytes = self._layout.count_block_bytes(self._layout.locate(self._state.list_present()))

    def _punch_surplus_blocks(self) -> None:
        """Punches holes for all absent records if the files take more space than the present ones."""
        # The file system needs metadata blocks to record holes.
        metadata_bytes = self.kept_bytes // 64 + (len(self._layout.shard_bytes) << 16)
        if self._files.measure_disk_bytes() > self.kept_bytes + metadata_bytes:
            self._punch(np.flatnonzero(self._state.present == 0))

    # Shared by threads and processes

    @contextlib.contextmanager
    def _lock_for_writing(self) -> Iterator[bool]:
        """Locks the state for changes within the block; yields False if another process keeps the lock."""
        with self._write_lock:
            is_locked = not self._closed and self._locks.try_lock(WRITE_LOCK, timeout_s=_LOCK_TIMEOUT_S)
            try:
                yield is_locked
            finally:
                if is_locked:
                    self._locks.release(WRITE_LOCK)

    def _end_lease(self, side: int) -> None:
        """Ends a lease. Python may call this anywhere, even in a thread inside `lease`, so it never waits."""
        self._ended_sides.append(side)
        self._release_ended_leases()

    def _release_ended_leases(self) -> None:
        """Releases the byte locks of sides without leases, unless another thread is doing so."""
        while (self._ended_sides or self._closed) and self._lease_lock.acquire(blocking=False):
            try:
                while self._ended_sides:
                    side = self._ended_sides.popleft()
                    self._leases_by_side[side] -= 1
                    if not self._leases_by_side[side]:
                        self._locks.release(READ_LOCK + side)
                if self._closed and not any(self._leases_by_side):
                    self._locks.close()
                    return
            finally:
                self._lease_lock.release()
            if not self._ended_sides:
                return


def name_cached_set(dataset: Dataset) -> str:
    """Returns the name of a set in a cache folder. Sets share it only if their records lie at the same places."""
    if not has_sample_ids(dataset.columns):
        return dataset.fingerprint
    # Equal versions have equal fingerprints, also where stores have put the same records into other shards.
    digest = hashlib.sha256("\n".join(shard.name for shard in dataset.description.shards).encode())
    for name in ("shard", "offset", "flags"):
        digest.update(dataset.columns[name].tobytes())
    digest.update(dataset.fingerprint.encode())
    return digest.hexdigest()
