"""Prefetcher: threads that fetch remote records, those a read waits for and those that later reads will need."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
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
from headway.data.tiers.tier import Spans
from headway.storage.remote_folder import RemoteFolder
from headway.storage.transport import StoppedError

THREADS = 16
"""They mostly wait for the network: at 20 ms a request and 110 kB a record, 16 threads fetch 90 MB/s."""
AHEAD_BYTES = 256 << 20
"""Limit of records fetched ahead into memory; with a store, a larger window of the Order raises it."""

_POLL_S = 0.02
"""Interval at which a read looks for a record that another process fetches."""
_PATIENCE_S = 1.0
"""Time after which a record that another process fetches is fetched here too."""
_NOW = -1


@dataclass(slots=True, eq=False)
class _Run:
    """Records of one shard that one request reads."""

    ids: Ids
    reader: int = 0
    """Number of the read that waits for it; 0 if it is fetched ahead."""
    forced: bool = False
    """Also fetch records that another process seems to fetch."""
    started: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """One expected read: positions from `low` on."""

    low: int
    high: int
    ids: Ids
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Ahead:
    """The expected reads, and how far they are planned."""

    spans: Spans = field(default_factory=lambda: iter(()))
    order: Order | None = None
    slots: HostSlots | None = None
    limit_bytes: int = AHEAD_BYTES
    position: int = 0
    chunks: deque[_Chunk] = field(default_factory=deque)
    size_bytes: int = 0
    due: Counter[int] = field(default_factory=Counter)
    """Number of times that each sample occurs in `chunks`."""
    ended: bool = False

    def build_forecast(self, samples: int) -> ReadForecast:
        return ReadForecast(self.position, samples, self.order, self.slots)


@final
class Prefetcher:
    """Fetches the records of a remote data set ahead of need.

    Args:
        dataset: provides the columns, and keeps note of the records whose checksum is right.
        remote: the folder of the shards; closed with the prefetcher.
        store: keeps records on the disk; None keeps them in memory until they are read. Closed with the prefetcher.
        say: called once, with a message, if the store fails.
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

    def expect(self, spans: Spans, order: Order | None, slots: HostSlots | None) -> None:
        """Announces the next reads, in place of those announced before; see `Tier.expect`."""
        # The first 1,000 records give the size well enough for a limit.
        mean = int(self._dataset.length[:1000].mean()) if len(self._dataset) else 0
        limit = AHEAD_BYTES
        if self._store and order and order.window:
            # A whole window and half of the next, so that blocks are read from end to end.
            limit = max(limit, 3 * min(order.window, order.samples) * mean)
        with self._planning, self._changed:
            self._ahead = _Ahead(spans, order, slots, limit)
            # Runs that have started go on: their bytes are on the way.
            self._runs = [entry for entry in self._runs if entry[2].started]
            self._run_of = {sample: run for sample, run in self._run_of.items() if run.started}
            for sample in [sample for sample in self._loose if sample not in self._awaited]:
                self._unload(sample)
            self._changed.notify_all()

    def read(self, ids: Ids) -> Records:
        """Returns the records of the samples once all are there. Raises DataError if one cannot be fetched."""
        taken: dict[int, NDArray[np.uint8]] = {}
        begun, number = time.monotonic(), next(self._reads)
        with self._changed:
            self._refuse_closed()
            # `close` waits for the readers, whose records it would release.
            self._readers += 1
            self._awaited.update(ids.tolist())
        try:
            if not self._ahead.chunks:
                self._plan()
            while True:
                lease = self._store.lease() if self._store else None
                # In the store first: most reads of later epochs end here.
                near = self._run_fetcher.find_stored(ids)
                missing = self._take(np.unique(ids[~near]), taken)
                if not missing:
                    return self._build_records(ids, near, taken, lease)
                # While it waits, it must not stop other processes from making room.
                del lease
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

    # Called by readers

    def _refuse_closed(self) -> None:
        if self._stopped:
            raise UsageError("this tier is closed", fix="Make another one.")

    def _take(self, ids: Ids, taken: dict[int, NDArray[np.uint8]]) -> list[int]:
        """Moves records in memory to `taken`; returns the samples that are not there."""
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
                # A failure from before this read began is tried again.
                if error is not None and reader == number:
                    raise error
            for run in [self._run_of[sample] for sample in missing if sample in self._run_of]:
                if not run.started and run.reader != number:
                    # It overtakes the others; its older entry in the heap is skipped later.
                    run.reader = number
                    heapq.heappush(self._runs, (_NOW, next(self._count), run))
            # Samples that no run has: not expected, or fetched by another process.
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
                # The forecast starts at the first position not yet read.
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
        """Takes expected reads up to the limit, and queues their missing records."""
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
            # Planned together and sorted, so that neighbours of different reads share a request.
            ids, first = np.unique(np.concatenate([chunk.ids for chunk in new]), return_index=True)
            wanted = np.ones(len(ids), np.bool_)
            if self._store:
                # Stored records that this process has not checked yet are checked ahead too.
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
        """Returns True if the planned reads, with those in `new`, are below this share of the limit."""
        ahead, limit = self._ahead, AHEAD_BYTES
        # Records that do not fit into the store stay in memory.
        if self._store and self._run_fetcher.is_storing:
            limit = max(limit, min(ahead.limit_bytes, self._store.share_bytes - self._store.kept_bytes))
        size_bytes = ahead.size_bytes + sum(chunk.size_bytes for chunk in new)
        return not ahead.ended and (size_bytes < share * limit or len(ahead.chunks) + len(new) < 2)

    def _push(self, ids: Ids, need: NDArray[np.int64] | None, reader: int = 0, forced: bool = False) -> None:
        """Queues records in runs by need: `need` counts positions from the next read, and None is at once."""
        for extents in self._layout.group_into_runs(ids):
            run = _Run(extents.ids, reader, forced)
            # The heap returns the run that is needed first; the count keeps the order of equals.
            urgency = _NOW if need is None else int(need[np.searchsorted(ids, run.ids)].min())
            heapq.heappush(self._runs, (urgency, next(self._count), run))
            self._run_of.update(dict.fromkeys(run.ids.tolist(), run))

    # Run by the threads

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._stopped or self._next_run_fits() or self._wants_planning()):
                    self._changed.wait()
                if self._stopped:
                    return
                # Chosen under the lock, fetched outside it.
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
            except BaseException as error:
                # Any error is raised in the read that waits for the record.
                failure = error
            with self._changed:
                for sample, extent, kept in fetched:
                    if sample in self._awaited or (sample in self._ahead.due and not kept):
                        self._unload(sample)
                        # A copy, since a view would keep the gaps between records in memory.
                        self._loose[sample] = extent.copy()
                        self._loose_bytes += len(extent)
                for sample in run.ids.tolist():
                    self._run_of.pop(sample, None)
                    if failure is not None and sample in self._awaited:
                        self._failed[sample] = run.reader, failure
                self._changed.notify_all()

    def _wants_planning(self) -> bool:
        # Half of the limit at a time: planning much at once finds more neighbours.
        return self._wants_more(share=0.5) and not self._planning.locked()

    def _next_run_fits(self) -> bool:
        """Returns True if a run may start: records outside the store must not fill the memory."""
        if not self._runs:
            return False
        return self._runs[0][0] == _NOW or self._loose_bytes < AHEAD_BYTES
