"""Store: records of one data set in files of the local disk, shared by the processes of a host.

Each shard has a sparse local copy in which a record lies at its own offset, so a kept record is read by mapping, as in
a local pack. What is taken away becomes a hole. A mapped file holds one byte a sample: 1 where the record is there. It
is set after the bytes are written, so a process may be killed at any moment; after a power failure the byte may have
reached the disk before the record, and the checksum at each record's first touch by a process shows that.

Locks, one byte each of the file `locks`: USED (shared: by every process that uses the set), WRITE (of whoever changes
what is there), EVICT (of whoever makes room), READ and READ + 1 (shared: by processes that hold Records), FETCH + i (of
whoever fetches sample i). Making room marks records absent, turns the side on which new Records are held from READ to
READ + 1 or back, waits until nobody holds the old side, and only then makes the holes: bytes in use stay.
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
"""How long a process waits for another one that holds a lock for a moment; a stopped one may hold it for ever."""
_SHARE_S = 1.0
"""How long what the other sets of the folder take is not looked at again."""

NextUse = Callable[[Ids], NDArray[np.int64]]


@final
class Lease:
    """While it lives, the bytes that were present after it was made stay where they are."""

    __slots__ = ("_drop", "_side")

    def __init__(self, drop: Callable[[int], None], side: int) -> None:
        self._drop, self._side = drop, side

    def __del__(self) -> None:
        self._drop(self._side)


@final
class RecordStore:
    """Records of `dataset`, kept in `root / packs / fingerprint`.

    Args:
        dataset: its columns; its own bytes are not touched.
        root: the cache folder; holds the stores of other sets too.
        budget_bytes: that all sets in the folder may take together; see `share_of`.

    Raises:
        OSError: the folder cannot be written, is full, or cannot hold sparse files.
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
        """Which records are here; bool [k]."""
        found: NDArray[np.bool_] = self._state.present[ids] != 0
        return found

    @property
    def kept_bytes(self) -> int:
        """What the records here take on the disk, at most."""
        return self._state.kept_bytes

    def lease(self) -> Lease:
        """Take one before `present` and `read`, and keep it for as long as the bytes are in use."""
        with self._holding:
            while True:
                side = self._state.side
                # A side that is being emptied is not the state's any more.
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
        """Where the bytes of present records lie; as `Dataset.read`."""
        return self._mapped.read(ids)

    def claim(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of these records no other process is fetching; this one does now, until `unclaim`."""
        return np.array([self._locks.try_lock(FETCH + sample) for sample in ids.tolist()], np.bool_)

    def unclaim(self, ids: Ids) -> None:
        for sample in ids.tolist():
            self._locks.release(FETCH + sample)

    def keep(self, ids: Ids, extents: Sequence[NDArray[np.uint8]]) -> bool:
        """Writes records, given as their bytes in the shard; False where there is no room for all of them.

        Raises OSError: the disk is full, or cannot be written.
        """
        if time.monotonic() > self._divided_s + _SHARE_S:
            self._divide()
        with self._lock_for_writing() as mine:
            new = dict(zip(ids.tolist(), extents, strict=True))
            found = self._layout.locate(ids[self._state.present[ids] == 0])
            need_bytes = self._layout.count_block_bytes(found)
            if not mine or self.kept_bytes + need_bytes > self.share_bytes:
                return False
            for sample, shard, start in found.iterate_places():
                self._files.write(shard, start, new[sample])
            self._state.present[found.ids] = 1
            self._state.kept_bytes += need_bytes
            return True

    def forget(self, ids: Ids) -> None:
        """Marks records absent whose bytes turned out to be wrong; the next `keep` overwrites them."""
        with self._lock_for_writing() as mine:
            if mine:
                self._state.present[ids] = 0

    def make_room(self, ids: Ids, next_use: NextUse, first: int) -> bool:
        """Takes away records that are needed latest until these fit.

        Args:
            next_use: the position at which each of some samples is needed next.
            first: what is needed before this position stays, unless the set takes more than its share.

        Returns:
            Whether they fit now.
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
        """Leaves the set; Records that were read stay for as long as they live."""
        self._closed = True
        with self._writing_here:
            self._files.close()
        self._settle()

    # Entering

    def _enter(self) -> tuple[ByteLocks, bool]:
        """The lock file, locked for use, and whether no other process uses the set."""
        deadline = time.monotonic() + 5 * _PATIENCE_S
        while time.monotonic() < deadline:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # someone removes the set just now
                locks = ByteLocks(self.folder / LOCKS_FILE)
                alone = locks.try_lock(USED)
                mine = alone or locks.try_lock(USED, shared=True)  # neither: someone is repairing it
                if mine and os.path.samestat(os.stat(self.folder / LOCKS_FILE), os.fstat(locks.number)):
                    return locks, alone
                locks.close()
            time.sleep(0.01)
        raise OSError(errno.EBUSY, "another process holds it")

    def _repair(self) -> None:
        """Makes true again what killed processes left: what is kept, and blocks that hold no record."""
        kept = self._layout.locate(self._state.list_present())
        whole = self._files.find_complete()
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
        order = np.argsort(-when, kind="stable")
        freed = np.cumsum(self._layout.get_lengths(here[order]))
        # A little more than asked, so that choosing is rare.
        asked = int(np.searchsorted(freed, surplus + self.share_bytes // 32)) + 1
        over = int(np.searchsorted(freed, self.kept_bytes - self.share_bytes)) + (self.kept_bytes > self.share_bytes)
        taken = here[order[: max(over, min(asked, np.count_nonzero(when >= first)))]]
        if not len(taken) or not self._take_away(taken):
            return False
        return self.kept_bytes + need_bytes <= self.share_bytes

    def _take_away(self, taken: Ids) -> bool:
        """Makes holes of these records; False, and they stay, where someone keeps Records in use."""
        old = self._state.side
        # The other side may still be held since an attempt that gave up; its holders have seen these records too.
        if not self._wait_until_drained(1 - old):
            return False
        self._locks.release(READ + 1 - old)
        self._state.present[taken] = 0
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
        """Waits until nobody holds Records of a side, which is then locked."""
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
        """Makes holes of everything absent where the files take more than the records need."""
        # The file system notes holes in blocks of its own, which count too.
        own_bytes = self.kept_bytes // 64 + (len(self._layout.sizes) << 16)
        if self._files.measure_disk_bytes() > self.kept_bytes + own_bytes:
            self._punch(np.flatnonzero(self._state.present == 0))

    # What several threads and processes share

    @contextlib.contextmanager
    def _lock_for_writing(self) -> Iterator[bool]:
        """The right to change what is there; False where another process keeps it."""
        with self._writing_here:
            mine = not self._closed and self._locks.try_lock(WRITE, patience_s=_PATIENCE_S)
            try:
                yield mine
            finally:
                if mine:
                    self._locks.release(WRITE)

    def _drop(self, side: int) -> None:
        """Ends a lease. Python may call this anywhere, also in a thread that is inside of `lease`: it never waits."""
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
