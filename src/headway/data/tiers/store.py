"""RecordStore: records of one data set in local files, shared by the processes of a host.

Each shard has a sparse local copy that holds a record at its own offset, so a kept record is read by mapping, as in a
local pack. A record that is removed becomes a hole. A mapped file has one byte a sample, 1 if the record is present. It
is set after the record is written, so a process may be killed at any moment. After a power failure the byte may have
reached the disk before the record; the checksum at each process's first read of the record shows that.

Locks are single bytes of the file `locks`: USED (shared, by every process that uses the set), WRITE (to change which
records are present), EVICT (to make room), READ and READ + 1 (shared, by processes that hold Records), and FETCH + i
(to fetch sample i). To make room, a process marks records absent, moves new Records from side READ to READ + 1 or back,
waits until nobody holds the old side, and only then punches holes. So bytes in use stay.
"""

from __future__ import annotations

import contextlib
import errno
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
from headway.data.tiers.state import LOCKS_FILE, STATE_FILE, USED, StoreState, compute_share

PACKS = "packs"
WRITE, EVICT, READ, FETCH = 1, 2, 4, 16

_PATIENCE_S = 2.0
"""Longest wait for a lock that is held only for moments; a stopped process may hold it for ever."""
_SHARE_S = 1.0
"""Time for which the shares of the sets in the folder are not recomputed."""

NextUse = Callable[[Ids], NDArray[np.int64]]


@final
class Lease:
    """While it lives, records that were present after its creation stay in place."""

    __slots__ = ("_drop", "_side")

    def __init__(self, drop: Callable[[int], None], side: int) -> None:
        self._drop, self._side = drop, side

    def __del__(self) -> None:
        self._drop(self._side)


@final
class RecordStore:
    """Records of `dataset`, kept in `root / packs / fingerprint`.

    Args:
        dataset: provides the columns; its records are not read.
        root: the cache folder, which holds the stores of other sets too.
        budget_bytes: limit of all sets in the folder together; see `compute_share`.

    Raises:
        OSError: the folder cannot be written, is full, or its file system has no sparse files.
    """

    def __init__(self, dataset: Dataset, root: Path, budget_bytes: int) -> None:
        self.folder, self._budget_bytes = root / PACKS / dataset.fingerprint, budget_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = dataset.description.shards
        columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
        self._layout = RecordLayout(columns, shards, max(4096, os.statvfs(self.folder).f_bsize))
        self._files, self._mapped = SparseFiles(self.folder, shards), MappedShards(self.folder, shards, columns)
        self._total_bytes = sum(shard.size for shard in shards)
        self._writing_here, self._evicting_here = threading.Lock(), threading.Lock()
        # Leases of this process by side; the byte lock is released with the last one.
        self._holding, self._held, self._dropped = threading.Lock(), [0, 0], deque[int]()
        self._closed = False
        self._locks, alone = self._enter()
        try:
            self._state = StoreState(self.folder / STATE_FILE, len(dataset), self._total_bytes, alone=alone)
            if alone:
                self._repair()
                self._locks.try_lock(USED, shared=True)
            self._divide()
        except BaseException:
            self._locks.close()
            raise

    def find_present(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the records in the store; bool [k]."""
        present: NDArray[np.bool_] = self._state.present[ids] != 0
        return present

    @property
    def kept_bytes(self) -> int:
        """Upper bound of the disk space of the records."""
        return self._state.kept_bytes

    def lease(self) -> Lease:
        """Returns a lease. Take one before `find_present` and `read`, and keep it while the bytes are in use."""
        with self._holding:
            while True:
                side = self._state.side
                # A side that is being drained is no longer the side of the state, so try again.
                if not self._held[side] and not self._locks.try_lock(READ + side, shared=True):
                    continue
                if self._state.side == side:
                    self._held[side] += 1
                    break
                if not self._held[side]:
                    self._locks.release(READ + side)
        self._settle()
        return Lease(self._drop, side)

    def read(self, ids: Ids) -> Records:
        """Returns the bytes of present records, as `Dataset.read`."""
        return self._mapped.read(ids)

    def claim(self, ids: Ids) -> NDArray[np.bool_]:
        """Claims these records for fetching until `unclaim`; returns a mask of those no other process has claimed."""
        return np.array([self._locks.try_lock(FETCH + sample) for sample in ids.tolist()], np.bool_)

    def unclaim(self, ids: Ids) -> None:
        """Releases claimed records."""
        for sample in ids.tolist():
            self._locks.release(FETCH + sample)

    def keep(self, ids: Ids, extents: Sequence[NDArray[np.uint8]]) -> bool:
        """Writes records, given as their bytes in the shard; returns False if there is no room for all of them.

        Raises OSError if the disk is full, or cannot be written.
        """
        # Other sets may have started or ended meanwhile.
        if time.monotonic() > self._divided_s + _SHARE_S:
            self._divide()
        with self._lock_for_writing() as mine:
            new = dict(zip(ids.tolist(), extents, strict=True))
            # Another process may have written some of these records already.
            missing = self._layout.locate(ids[self._state.present[ids] == 0])
            need_bytes = self._layout.count_block_bytes(missing)
            if not mine or self.kept_bytes + need_bytes > self.share_bytes:
                return False
            for sample, shard, start in missing.iterate_places():
                self._files.write(shard, start, new[sample])
            # Set after the bytes are written: readers trust this byte.
            self._state.present[missing.ids] = 1
            self._state.kept_bytes += need_bytes
            return True

    def forget(self, ids: Ids) -> None:
        """Marks records with wrong bytes absent; the next `keep` overwrites them."""
        with self._lock_for_writing() as mine:
            if mine:
                self._state.present[ids] = 0

    def make_room(self, ids: Ids, next_use: NextUse, first: int) -> bool:
        """Removes the records that are needed last until these fit; returns True if they fit.

        Args:
            next_use: returns the next position at which samples are needed.
            first: records needed before this position stay, unless the set takes more than its share.
        """
        with self._evicting_here:
            if not self._locks.try_lock(EVICT, patience_s=_PATIENCE_S):
                return False
            try:
                self._divide()
                return self._make_room(self._layout.count_block_bytes(self._layout.locate(ids)), next_use, first)
            finally:
                self._locks.release(EVICT)

    def close(self) -> None:
        """Stops using the set; Records that were read stay valid."""
        self._closed = True
        with self._writing_here:
            self._files.close()
        self._settle()

    # Start of use

    def _enter(self) -> tuple[ByteLocks, bool]:
        """Returns the lock file, locked for use, and True if no other process uses the set."""
        deadline = time.monotonic() + 5 * _PATIENCE_S
        while time.monotonic() < deadline:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Another process is removing the set.
            with contextlib.suppress(FileNotFoundError):
                locks = ByteLocks(self.folder / LOCKS_FILE)
                # An exclusive lock means that no other process uses the set.
                alone = locks.try_lock(USED)
                # Neither lock: another process is repairing the set.
                mine = alone or locks.try_lock(USED, shared=True)
                if mine and os.path.samestat(os.stat(self.folder / LOCKS_FILE), os.fstat(locks.number)):
                    return locks, alone
                locks.close()
            time.sleep(0.01)
        raise OSError(errno.EBUSY, "another process holds it")

    def _repair(self) -> None:
        """Corrects the state after processes were killed: lost files, kept bytes, and blocks without a record."""
        kept = self._layout.locate(self._state.list_present())
        whole = self._files.find_complete()
        # A copy of the wrong length was created by a process that was killed.
        lost = ~whole[np.minimum(kept.shard, len(whole) - 1)]
        self._state.present[kept.ids[lost]] = 0
        self._recount()
        self._sweep()

    def _divide(self) -> None:
        self.share_bytes = compute_share(self.folder, self._total_bytes, self._budget_bytes)
        self._divided_s = time.monotonic()

    # Making room

    def _make_room(self, need_bytes: int, next_use: NextUse, first: int) -> bool:
        with self._lock_for_writing() as mine:
            if not mine:
                return False
            self._recount()
        surplus = self.kept_bytes + need_bytes - self.share_bytes
        if surplus <= 0:
            return True
        here = self._state.list_present()
        when = next_use(here)
        # Belady: the record that is needed last goes first.
        order = np.argsort(-when, kind="stable")
        # Bytes that are free once the first k of them are gone.
        freed = np.cumsum(self._layout.get_lengths(here[order]))
        # 3 % more than needed, so that choosing is rare.
        asked = int(np.searchsorted(freed, surplus + self.share_bytes // 32)) + 1
        # If the share shrank, records go even if they are needed soon.
        over = int(np.searchsorted(freed, self.kept_bytes - self.share_bytes)) + (self.kept_bytes > self.share_bytes)
        taken = here[order[: max(over, min(asked, np.count_nonzero(when >= first)))]]
        if not len(taken) or not self._take_away(taken):
            return False
        return self.kept_bytes + need_bytes <= self.share_bytes

    def _take_away(self, taken: Ids) -> bool:
        """Punches holes for these records; returns False, and keeps them, if Records in use block it."""
        old = self._state.side
        # The other side may still be held since an attempt that gave up; its holders use these records too.
        if not self._wait_until_drained(1 - old):
            return False
        self._locks.release(READ + 1 - old)
        self._state.present[taken] = 0
        # Readers that come now hold the other side, and see the records as absent.
        self._state.side = 1 - old
        drained = self._wait_until_drained(old)
        try:
            with self._lock_for_writing() as mine:
                if not drained or not mine:
                    self._state.present[taken] = 1
                    return False
                self._punch(taken[self._state.present[taken] == 0])
                self._recount()
                self._sweep()
                return True
        finally:
            if drained:
                self._locks.release(READ + old)

    def _wait_until_drained(self, side: int) -> bool:
        """Waits until nobody holds Records of a side, and locks it."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with self._holding:
                if not self._held[side] and self._locks.try_lock(READ + side):
                    return True
            self._settle()
            if self._closed or time.monotonic() > deadline:
                return False
            time.sleep(0.001)

    def _punch(self, absent: Ids) -> None:
        kept = self._layout.locate(self._state.list_present())
        for shard, begin, end in self._layout.find_free_blocks(self._layout.locate(absent), kept):
            self._files.punch(shard, begin, end)

    def _recount(self) -> None:
        self._state.kept_bytes = self._layout.count_block_bytes(self._layout.locate(self._state.list_present()))

    def _sweep(self) -> None:
        """Punches holes for everything absent if the files take more space than their records."""
        # The file system needs blocks of its own to note holes.
        own_bytes = self.kept_bytes // 64 + (len(self._layout.sizes) << 16)
        if self._files.measure_disk_bytes() > self.kept_bytes + own_bytes:
            self._punch(np.flatnonzero(self._state.present == 0))

    # Shared by threads and processes

    @contextlib.contextmanager
    def _lock_for_writing(self) -> Iterator[bool]:
        """Locks the state for changes; yields False if another process keeps the lock."""
        with self._writing_here:
            mine = not self._closed and self._locks.try_lock(WRITE, patience_s=_PATIENCE_S)
            try:
                yield mine
            finally:
                if mine:
                    self._locks.release(WRITE)

    def _drop(self, side: int) -> None:
        """Ends a lease. Python may call this anywhere, even in a thread inside `lease`, so it never waits."""
        self._dropped.append(side)
        self._settle()

    def _settle(self) -> None:
        while (self._dropped or self._closed) and self._holding.acquire(blocking=False):
            try:
                while self._dropped:
                    side = self._dropped.popleft()
                    self._held[side] -= 1
                    if not self._held[side]:
                        self._locks.release(READ + side)
                if self._closed and not any(self._held):
                    self._locks.close()
                    return
            finally:
                self._holding.release()
            if not self._dropped:
                return
