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
import ctypes
import errno
import mmap
import os
import shutil
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
from headway.data.tiers.layout import Ids, Layout
from headway.data.tiers.locks import ByteLocks

USED, WRITE, EVICT, READ, FETCH = 0, 1, 2, 4, 16
PACKS, STATE_FILE, LOCKS_FILE = "packs", "state", "locks"

_MAGIC = 0x31_45_52_4F_54_53_57_48  # "HWSTORE1"
_HEADER_BYTES = 4096
_KIND, _COUNT, _KEPT, _SIDE, _LAST_USE, _TOTAL = range(6)
"""Words of the header: magic number, samples, bytes kept, the side of READ, seconds since 1970, bytes of the set."""
_PATIENCE_S = 2.0
"""How long a process waits for another one that holds a lock for a moment; a stopped one may hold it for ever."""
_SHARES_S = 1.0
"""How long what other sets of the folder take is not looked at again."""
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


@final
class Lease:
    """While it lives, the bytes that were present after it was made stay where they are."""

    __slots__ = ("_drop", "_side")

    def __init__(self, drop: Callable[[int], None], side: int) -> None:
        self._drop, self._side = drop, side

    def __del__(self) -> None:
        self._drop(self._side)


@final
class Store:
    """Records of `dataset`, kept in `root / packs / fingerprint`.

    Args:
        dataset: its columns; its own bytes are not touched.
        root: the cache folder; holds the stores of other sets too.
        budget_bytes: that all sets in the folder may take together. A set that no process uses is removed when another
            one needs its room; those in use share the budget in proportion to their size.

    Raises:
        OSError: the folder cannot be written, is full, or cannot hold sparse files.
    """

    def __init__(self, dataset: Dataset, root: Path, budget_bytes: int) -> None:
        self._root, self._budget_bytes = root / PACKS, budget_bytes
        self.folder = self._root / dataset.fingerprint
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_holes(self.folder)
        shards = dataset.description.shards
        self._names = [shard.name for shard in shards]
        columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
        self._layout = Layout(columns, shards, max(4096, os.statvfs(self.folder).f_bsize))
        self._mapped = MappedShards(self.folder, shards, columns)
        self._files: dict[int, int] = {}
        self._writing_here, self._evicting_here = threading.Lock(), threading.Lock()
        self._holding, self._held, self._dropped = threading.Lock(), [0, 0], deque[int]()
        self._shared_until, self._closed = 0.0, False
        self._locks, alone = self._enter()
        try:
            self._state = self._open_state(len(dataset), alone)
            if alone:
                self._repair()
                self._locks.attempt(USED, shared=True)
            self.share_bytes = self._share()
        except BaseException:
            self._locks.close()
            raise

    def present(self, ids: Ids) -> NDArray[np.bool_]:
        """Which records are here; bool [k]."""
        found: NDArray[np.bool_] = self._present[ids] != 0
        return found

    @property
    def kept_bytes(self) -> int:
        """What the records here take on the disk, at most."""
        return int(self._header[_KEPT])

    def lease(self) -> Lease:
        """Take one before `present` and `read`, and keep it for as long as the bytes are in use."""
        with self._holding:
            while True:
                side = int(self._header[_SIDE]) & 1
                # A side that is being emptied is not the header's any more.
                if not self._held[side] and not self._locks.attempt(READ + side, shared=True):
                    continue
                if int(self._header[_SIDE]) & 1 == side:
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
        return np.array([self._locks.attempt(FETCH + sample) for sample in ids.tolist()], np.bool_)

    def unclaim(self, ids: Ids) -> None:
        for sample in ids.tolist():
            self._locks.release(FETCH + sample)

    def keep(self, ids: Ids, extents: Sequence[NDArray[np.uint8]]) -> bool:
        """Writes records, given as their bytes in the shard; False where there is no room for all of them.

        Raises OSError: the disk is full, or cannot be written.
        """
        self._look_at_others()
        with self._writing() as mine:
            absent = self._present[ids] == 0
            new = dict(zip(ids.tolist(), extents, strict=True))
            found = self._layout.extents(ids[absent])
            need = self._layout.bytes_in_blocks(found)
            if not mine or self._header[_KEPT] + need > self.share_bytes:
                return False
            for sample, shard, start in found.places():
                _write(self._file(shard), new[sample], start)
            self._present[found.ids] = 1
            self._header[_KEPT] += need
            return True

    def forget(self, ids: Ids) -> None:
        """Marks records absent whose bytes turned out to be wrong; the next `keep` overwrites them."""
        with self._writing() as mine:
            if mine:
                self._present[ids] = 0

    def make_room(self, ids: Ids, next_use: Callable[[Ids], NDArray[np.int64]], before: int) -> bool:
        """Takes away records that are needed latest until these fit.

        Args:
            next_use: the position at which each of some samples is needed next.
            before: what is needed before this position stays.

        Returns:
            Whether they fit now.
        """
        with self._evicting_here:
            if not self._locks.attempt(EVICT, patience_s=_PATIENCE_S):
                return False
            try:
                self.share_bytes = self._share()
                need_bytes = self._layout.bytes_in_blocks(self._layout.extents(ids))
                return self._make_room(need_bytes, next_use, before)
            finally:
                self._locks.release(EVICT)

    def close(self) -> None:
        """Leaves the set; Records that were read stay for as long as they live."""
        self._closed = True
        with self._writing_here:
            for number in self._files.values():
                os.close(number)
            self._files = {}
        self._settle()

    # Entering and leaving

    def _enter(self) -> tuple[ByteLocks, bool]:
        """The lock file, locked for use, and whether no other process uses the set."""
        deadline = time.monotonic() + 5 * _PATIENCE_S
        while time.monotonic() < deadline:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # someone removes the set just now
                locks = ByteLocks(self.folder / LOCKS_FILE)
                alone = locks.attempt(USED)
                mine = alone or locks.attempt(USED, shared=True)  # neither: someone is repairing it
                if mine and os.path.samestat(os.stat(self.folder / LOCKS_FILE), os.fstat(locks.number)):
                    return locks, alone
                locks.close()
            time.sleep(0.01)
        raise OSError(errno.EBUSY, "another process holds the cache")

    def _open_state(self, samples: int, alone: bool) -> mmap.mmap:
        path, size = self.folder / STATE_FILE, _HEADER_BYTES + samples
        total = int(self._layout.sizes.sum())
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            head = np.frombuffer(os.pread(number, 16, 0).ljust(16, b"\0"), np.int64)
            good = head[_KIND] == _MAGIC and head[_COUNT] == samples and os.fstat(number).st_size == size
            if not good and not alone:
                raise OSError(errno.EIO, "the cache's state is damaged and in use")
            if not good:
                os.ftruncate(number, 0)
                # With its blocks: a write to a mapped hole kills the process where the disk is full.
                os.posix_fallocate(number, 0, size)
                os.ftruncate(number, size)
            state = mmap.mmap(number, size)
        finally:
            os.close(number)
        self._header = np.frombuffer(state, np.int64, _HEADER_BYTES // 8)
        self._present = np.frombuffer(state, np.uint8, samples, _HEADER_BYTES)
        if not good:
            self._header[[_COUNT, _TOTAL]] = samples, total
            self._header[_KIND] = _MAGIC
        self._header[_LAST_USE] = int(time.time())
        return state

    def _repair(self) -> None:
        """Makes true again what killed processes left: what is kept, and blocks that hold no record."""
        sizes = self._layout.sizes
        whole = [
            os.path.getsize(path) == size if (path := self.folder / name).is_file() else False
            for name, size in zip(self._names, sizes.tolist(), strict=True)
        ]
        kept = self._layout.extents(np.flatnonzero(self._present))
        self._present[kept.ids[~np.array([*whole, False])[np.minimum(kept.shard, len(whole))]]] = 0
        self._recount()
        self._sweep()

    def _sweep(self) -> None:
        """Makes holes of everything absent where the files hold more than the records need."""
        held = sum(os.stat(path).st_blocks * 512 for name in self._names if (path := self.folder / name).is_file())
        own = self.kept_bytes // 64 + (
            len(self._names) << 16
        )  # blocks of the file system's own, in which it notes holes
        if held > self.kept_bytes + own:
            kept = self._layout.extents(np.flatnonzero(self._present))
            self._punch(self._layout.blocks_without(self._layout.extents(np.flatnonzero(self._present == 0)), kept))

    # Making room

    def _make_room(self, need_bytes: int, next_use: Callable[[Ids], NDArray[np.int64]], before: int) -> bool:
        with self._writing() as mine:
            if not mine:
                return False
            self._recount()
        surplus = self.kept_bytes + need_bytes - self.share_bytes
        if surplus <= 0:
            return True
        here = np.flatnonzero(self._present)
        when = next_use(here)
        late = np.flatnonzero(when > before)
        late = late[np.argsort(-when[late], kind="stable")]
        found = self._layout.extents(here[late])
        sizes = np.zeros(len(self._present), np.int64)
        sizes[found.ids] = found.end - found.start
        # A little more than asked, so that choosing is rare; ends of records that share a block with a kept one stay.
        enough = np.searchsorted(np.cumsum(sizes[here[late]]), surplus + self.share_bytes // 32) + 1
        taken = here[late[:enough]]
        if not len(taken) or not self._empty(taken):
            return False
        return self.kept_bytes + need_bytes <= self.share_bytes

    def _empty(self, taken: Ids) -> bool:
        """Takes these records away; False, and they stay, where someone keeps Records in use."""
        old = int(self._header[_SIDE]) & 1
        # The other side may still be held since an attempt that gave up; its holders have seen these records too.
        if not self._drained(1 - old):
            return False
        self._locks.release(READ + 1 - old)
        self._present[taken] = 0
        self._header[_SIDE] = 1 - old
        drained = self._drained(old)
        try:
            with self._writing() as mine:
                if not drained or not mine:
                    self._present[taken] = 1
                    return False
                kept = self._layout.extents(np.flatnonzero(self._present))
                gone = self._layout.extents(taken[self._present[taken] == 0])
                self._punch(self._layout.blocks_without(gone, kept))
                self._recount()
                self._sweep()
                return True
        finally:
            if drained:
                self._locks.release(READ + old)

    def _drained(self, side: int) -> bool:
        """Waits until nobody holds Records of a side, which is then locked."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with self._holding:
                if not self._held[side] and self._locks.attempt(READ + side):
                    return True
            self._settle()
            if self._closed or time.monotonic() > deadline:
                return False
            time.sleep(0.001)

    def _punch(self, gaps: list[tuple[int, int, int]]) -> None:
        for shard, begin, end in gaps:
            punch(self._file(shard), begin, end - begin)

    def _recount(self) -> None:
        self._header[_KEPT] = self._layout.bytes_in_blocks(self._layout.extents(np.flatnonzero(self._present)))

    # What several threads and processes share

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """The right to change what is there; False where another process keeps it."""
        with self._writing_here:
            mine = not self._closed and self._locks.attempt(WRITE, patience_s=_PATIENCE_S)
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

    def _file(self, shard: int) -> int:
        number = self._files.get(shard)
        if number is None:
            path = self.folder / self._names[shard]
            path.parent.mkdir(parents=True, exist_ok=True)
            number = self._files[shard] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if os.fstat(number).st_size != self._layout.sizes[shard]:
                os.ftruncate(number, int(self._layout.sizes[shard]))
        return number

    def _look_at_others(self) -> None:
        if time.monotonic() > self._shared_until:
            self.share_bytes = self._share()

    def _share(self) -> int:
        """What this set may take of the budget; removes sets that nobody uses where it needs their room."""
        self._shared_until = time.monotonic() + _SHARES_S
        mine = int(self._header[_TOTAL])
        total, used = mine, 0
        idle: list[tuple[int, int, Path]] = []
        for folder in self._root.iterdir():
            head = _header_of(folder)
            if folder == self.folder or head is None:
                continue
            if in_use(folder):
                total, used = total + head[_TOTAL], used + head[_KEPT]
            else:
                idle.append((head[_LAST_USE], head[_KEPT], folder))
        share = self._budget_bytes * mine // max(1, total)
        # Blocks at both ends of records: a set never takes more than twice its bytes, mostly hardly more.
        wanted = min(share, 2 * mine)
        for _, kept, folder in sorted(idle):
            if used + sum(kept for _, kept, _ in idle) + wanted <= self._budget_bytes:
                break
            if remove(folder):
                idle = [entry for entry in idle if entry[2] != folder]
        return max(0, min(share, self._budget_bytes - used - sum(kept for _, kept, _ in idle)))


def in_use(folder: Path) -> bool:
    """Whether a process uses the set in a folder."""
    try:
        locks = ByteLocks(folder / LOCKS_FILE)
    except OSError:
        return False
    try:
        return not locks.attempt(USED)
    finally:
        locks.close()


def remove(folder: Path) -> bool:
    """Removes a set that no process uses; False where one does."""
    try:
        locks = ByteLocks(folder / LOCKS_FILE)
    except OSError:
        return False
    try:
        if not locks.attempt(USED):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        locks.close()


def punch(number: int, begin: int, length: int) -> None:
    """Makes a hole in a file. Raises OSError, where its file system has no holes too."""
    if _LIBC.fallocate(number, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_holes(folder: Path) -> None:
    """Raises OSError where files of a folder cannot be sparse, or holes cannot be made in them."""
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.unlink(path)
    try:
        os.ftruncate(number, 64 << 20)
        os.pwrite(number, bytes(8192), 32 << 20)
        if os.fstat(number).st_blocks * 512 > 16 << 20:
            raise OSError(errno.EOPNOTSUPP, "its file system has no sparse files")
        punch(number, 32 << 20, 8192)
    finally:
        os.close(number)


def _header_of(folder: Path) -> list[int] | None:
    try:
        with open(folder / STATE_FILE, "rb") as file:
            words: list[int] = np.frombuffer(file.read(64), np.int64).tolist()
    except (OSError, ValueError):
        return None
    return words if len(words) == 8 and words[_KIND] == _MAGIC else None


def _write(number: int, data: NDArray[np.uint8], start: int) -> None:
    view = data.data
    while len(view):
        done = os.pwrite(number, view, start)
        view, start = view[done:], start + done
