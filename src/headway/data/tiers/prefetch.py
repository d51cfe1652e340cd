"""Fetcher: brings remote records near on threads of its own: those that are asked for, and those that will be."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.records import Records
from headway.data.tiers.fetch_run import FetchedRecord, RunFetcher
from headway.data.tiers.layout import Ids, RecordLayout, extract_image
from headway.data.tiers.next_use import HostSlots, ReadForecast
from headway.data.tiers.store import Lease, RecordStore
from headway.storage.remote_folder import RemoteFolder
from headway.storage.transport import StoppedError

THREADS = 16
"""They wait for the network most of the time: at 20 ms an answer and 110 kB a record, 16 bring 90 MB/s."""
AHEAD_BYTES = 256 << 20
"""Read ahead of need where records are kept in memory; with a store also, unless the Order's window is larger."""

_POLL_S = 0.02
"""How often a record that another process fetches is looked for."""
_PATIENCE_S = 1.0
"""After so long, a record that another process was fetching is fetched here too."""
_NOW = -1


@dataclass(slots=True, eq=False)
class _Run:
    """Records of one shard that are read at once."""

    ids: Ids
    reader: int = 0
    """Number of the read that waits for it; 0: it is read ahead."""
    forced: bool = False
    """Also what another process seems to fetch."""
    started: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """What will be read at once: positions from `low` on."""

    low: int
    high: int
    ids: Ids
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Ahead:
    """What the reader said that it will read, and how far that is planned."""

    spans: Iterator[tuple[int, int]] = field(default_factory=lambda: iter(()))
    order: Order | None = None
    slots: HostSlots | None = None
    limit_bytes: int = AHEAD_BYTES
    position: int = 0
    chunks: deque[_Chunk] = field(default_factory=deque)
    size_bytes: int = 0
    due: Counter[int] = field(default_factory=Counter)
    """How often each sample comes in `chunks`."""
    ended: bool = False

    def build_forecast(self, samples: int) -> ReadForecast:
        return ReadForecast(self.position, samples, self.order, self.slots)


@final
class Prefetcher:
    """Records of a remote data set.

    Args:
        dataset: its columns; what was found good is noted in it.
        remote: where the shards lie; closed with the fetcher.
        store: where records are kept; None: in memory, until they are read. Closed with the fetcher.
        say: is told once what went wrong with the store.
    """

    def __init__(
        self,
        dataset: Dataset,
        remote: RemoteFolder,
        store: RecordStore | None,
        say: Callable[[str], object],
        threads: int = THREADS,
    ) -> None:
        self._dataset, self._remote, self._store = dataset, remote, store
        self._columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
        self._layout = RecordLayout(self._columns, dataset.description.shards)
        self._run_fetcher = RunFetcher(dataset, self._layout, remote, store, say)
        self._changed, self._planning = threading.Condition(), threading.Lock()
        self._ahead = _Ahead(ended=True)
        self._runs: list[tuple[int, int, _Run]] = []
        self._count = itertools.count()
        self._run_of: dict[int, _Run] = {}
        self._loose: dict[int, NDArray[np.uint8]] = {}
        self._loose_bytes = 0
        self._awaited: Counter[int] = Counter()
        self._failed: dict[int, tuple[int, BaseException]] = {}
        self._reads, self._readers = itertools.count(1), 0
        self._stopped = False
        self._threads = [threading.Thread(target=self._work, name="headway-fetch", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def expect(self, spans: Iterator[tuple[int, int]], order: Order | None, slots: HostSlots | None) -> None:
        """Says what will be read; see `Tier.expect`. What was expected before is forgotten."""
        mean = int(self._dataset.length[:1000].mean()) if len(self._dataset) else 0
        limit = AHEAD_BYTES
        if self._store and order and order.window:
            # A whole window and half of the next, so that its blocks are read from end to end.
            limit = max(limit, 3 * min(order.window, order.samples) * mean)
        with self._planning, self._changed:
            self._ahead = _Ahead(spans, order, slots, limit)
            self._runs = [entry for entry in self._runs if entry[2].started]
            self._run_of = {sample: run for sample, run in self._run_of.items() if run.started}
            for sample in [sample for sample in self._loose if sample not in self._awaited]:
                self._unload(sample)
            self._changed.notify_all()

    def read(self, ids: Ids) -> Records:
        """Bytes of the samples, once they are all there. Raises DataError where one cannot be had."""
        taken: dict[int, NDArray[np.uint8]] = {}
        begun, number = time.monotonic(), next(self._reads)
        with self._changed:
            self._refuse_closed()
            self._readers += 1
            self._awaited.update(ids.tolist())
        try:
            if not self._ahead.chunks:
                self._plan()
            while True:
                lease = self._store.lease() if self._store else None
                near = self._run_fetcher.find_stored(ids)
                missing = self._take(np.unique(ids[~near]), taken)
                if not missing:
                    return self._build_records(ids, near, taken, lease)
                del lease  # while it waits, it keeps nothing from being taken away
                self._wait_for(missing, number, forced=time.monotonic() - begun > _PATIENCE_S)
        finally:
            self._forget_consumed(ids)

    def close(self) -> None:
        """Ends the threads, and whatever they wait for."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._remote.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
        self._remote.close()
        if self._store:
            self._store.close()

    # The reader's side

    def _refuse_closed(self) -> None:
        if self._stopped:
            raise UsageError("this tier is closed", fix="Make another one.")

    def _take(self, ids: Ids, taken: dict[int, NDArray[np.uint8]]) -> list[int]:
        """Moves what lies in memory to `taken`; returns what does not."""
        with self._changed:
            missing = []
            for sample in ids.tolist():
                if sample not in taken:
                    if sample in self._loose:
                        taken[sample] = self._loose[sample]
                    else:
                        missing.append(sample)
            return missing

    def _wait_for(self, missing: list[int], number: int, *, forced: bool) -> None:
        with self._changed:
            self._refuse_closed()
            for sample in missing:
                reader, error = self._failed.get(sample, (0, None))
                if error is not None and reader == number:  # what failed before this read began is tried again
                    raise error
            for run in [self._run_of[sample] for sample in missing if sample in self._run_of]:
                if not run.started and run.reader != number:
                    run.reader = number  # it goes before the others; its older entry is skipped when it comes
                    heapq.heappush(self._runs, (_NOW, next(self._count), run))
            rest = np.array([sample for sample in missing if sample not in self._run_of], np.int64)
            self._push(rest, None, number, forced)
            self._changed.notify_all()
            self._changed.wait(_POLL_S)

    def _build_records(
        self, ids: Ids, near: NDArray[np.bool_], taken: dict[int, NDArray[np.uint8]], lease: Lease | None
    ) -> Records:
        address, length = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint64)
        kept = self._store.read(ids[near]) if self._store and near.any() else None
        if kept is not None:
            address[near], length[near] = kept.address, kept.length
        loose = Records.from_buffers(
            [extract_image(self._columns, sample, taken[sample]) for sample in ids[~near].tolist()]
        )
        address[~near], length[~near] = loose.address, loose.length
        return Records(address, length, (lease, kept, loose))

    def _forget_consumed(self, ids: Ids) -> None:
        with self._changed:
            self._readers -= 1
            self._awaited.subtract(ids.tolist())
            ahead = self._ahead
            if ahead.chunks and np.array_equal(ahead.chunks[0].ids, ids):
                chunk = ahead.chunks.popleft()
                ahead.size_bytes -= chunk.size_bytes
                ahead.position = chunk.high
                ahead.due.subtract(ids.tolist())
            for sample in ids.tolist():
                if self._awaited[sample] <= 0:
                    del self._awaited[sample]
                    self._failed.pop(sample, None)
                if ahead.due[sample] <= 0:
                    del ahead.due[sample]
                    if sample not in self._awaited:
                        self._unload(sample)
            self._changed.notify_all()

    def _unload(self, sample: int) -> None:
        self._loose_bytes -= len(self._loose.pop(sample, ()))

    # Planning

    def _plan(self) -> None:
        """Looks as far ahead as the limit allows, and queues what is missing."""
        with self._planning:
            ahead, new = self._ahead, list[_Chunk]()
            while self._wants_more(new):
                span = next(ahead.spans, None)
                if span is None:
                    ahead.ended = True
                    break
                positions = np.arange(*span)
                ids = ahead.order(positions)[1] if ahead.order else positions
                new.append(_Chunk(*span, ids, int(self._dataset.length[ids].sum())))
            if not new:
                return
            ids, first = np.unique(np.concatenate([chunk.ids for chunk in new]), return_index=True)
            wanted = np.ones(len(ids), np.bool_)
            if self._store:
                wanted = ~self._store.find_present(ids) | self._dataset.select_unchecked(ids)
            with self._changed:
                for chunk in new:
                    ahead.chunks.append(chunk)
                    ahead.size_bytes += chunk.size_bytes
                    ahead.due.update(chunk.ids.tolist())
                wanted &= [sample not in self._run_of and sample not in self._loose for sample in ids.tolist()]
                self._push(ids[wanted], first[wanted])
                self._changed.notify_all()

    def _wants_more(self, new: Sequence[_Chunk] = (), share: float = 1.0) -> bool:
        """Whether less than this share of the limit is planned, with what is new."""
        ahead, limit = self._ahead, AHEAD_BYTES
        if self._store and self._run_fetcher.storing:  # what has no room there stays in memory
            limit = max(limit, min(ahead.limit_bytes, self._store.share_bytes - self._store.kept_bytes))
        size_bytes = ahead.size_bytes + sum(chunk.size_bytes for chunk in new)
        return not ahead.ended and (size_bytes < share * limit or len(ahead.chunks) + len(new) < 2)

    def _push(self, ids: Ids, need: NDArray[np.int64] | None, reader: int = 0, forced: bool = False) -> None:
        """Queues records in runs, those first that are needed first: `need` counts from now on, None is at once."""
        for found in self._layout.group_into_runs(ids):
            run = _Run(found.ids, reader, forced)
            urgency = _NOW if need is None else int(need[np.searchsorted(ids, run.ids)].min())
            heapq.heappush(self._runs, (urgency, next(self._count), run))
            self._run_of.update(dict.fromkeys(run.ids.tolist(), run))

    # The threads

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._stopped or self._next_run_fits() or self._wants_planning()):
                    self._changed.wait()
                if self._stopped:
                    return
                run = heapq.heappop(self._runs)[2] if self._next_run_fits() else None
                if run is not None:
                    if run.started:
                        continue
                    run.started = True
            if run is None:
                self._plan()
                continue
            failure: BaseException | None = None
            fetched: list[FetchedRecord] = []
            try:
                fetched = self._run_fetcher.fetch(
                    run.ids, self._ahead.build_forecast(len(self._dataset)), forced=run.forced
                )
            except StoppedError:
                return
            except BaseException as error:  # the reader must hear of it, whatever it is
                failure = error
            with self._changed:
                for sample, extent, kept in fetched:
                    if sample in self._awaited or (sample in self._ahead.due and not kept):
                        self._unload(sample)
                        self._loose[sample] = extent.copy()  # not the gaps between
                        self._loose_bytes += len(extent)
                for sample in run.ids.tolist():
                    self._run_of.pop(sample, None)
                    if failure is not None and sample in self._awaited:
                        self._failed[sample] = run.reader, failure
                self._changed.notify_all()

    def _wants_planning(self) -> bool:
        # Half at a time: the more is planned at once, the more lies side by side.
        return self._wants_more(share=0.5) and not self._planning.locked()

    def _next_run_fits(self) -> bool:
        """Whether there is a run that may be started: what is not stored must not fill the memory."""
        if not self._runs:
            return False
        return self._runs[0][0] == _NOW or self._loose_bytes < AHEAD_BYTES
