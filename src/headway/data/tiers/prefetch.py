"""Prefetcher: threads that fetch remote records, those a read waits for and those that later reads will need."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
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

FETCH_THREADS = 16
"""Default number of threads. They mostly wait for the network: at 20 ms a request and 110 kB a record, 16 threads
fetch 90 MB/s.
"""
MAX_PREFETCH_BYTES = 256 << 20
"""Limit of the records prefetched into memory; with a store, a larger window of the Order raises it."""

_POLL_INTERVAL_S = 0.02
"""Interval at which a read polls the store for a record that another process fetches."""
_OTHER_PROCESS_TIMEOUT_S = 1.0
"""Time after which a record that another process fetches is fetched here too."""
_URGENT = -1
"""Priority of a run that a read waits for; the others have the position of their first use."""


@dataclass(slots=True, eq=False)
class _Run:
    """Records of one shard that one request reads."""

    ids: Ids
    read_number: int = 0
    """Number of the read that waits for it; 0 if it is prefetched."""
    fetch_claimed: bool = False
    """Also fetch records that another process has claimed."""
    started: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRead:
    """One expected read: the samples at positions [low, high)."""

    low: int
    high: int
    ids: Ids
    size_bytes: int


@dataclass(slots=True, eq=False)
class _PrefetchPlan:
    """The expected reads, and those of them whose records are queued for fetching."""

    spans: Spans = field(default_factory=lambda: iter(()))
    order: Order | None = None
    slots: HostSlots | None = None
    limit_bytes: int = MAX_PREFETCH_BYTES
    position: int = 0
    reads: deque[_PlannedRead] = field(default_factory=deque)
    planned_bytes: int = 0
    pending_uses: Counter[int] = field(default_factory=Counter)
    """Number of times that each sample occurs in `reads`."""
    is_exhausted: bool = False

    def build_forecast(self, samples: int) -> ReadForecast:
        """Returns the forecast of the reads from `position` on, for a data set of so many samples."""
        return ReadForecast(self.position, samples, self.order, self.slots)


@final
class Prefetcher:
    """Prefetches the records of a remote data set on threads, which start at once.

    Args:
        dataset: provides the columns; verified records are marked as checked in it.
        remote: the folder of the shards; `close` closes it.
        store: keeps records on the local disk; None keeps them in memory until they are read. `close` closes it.
    """

    def __init__(
        self, dataset: Dataset, remote: RemoteFolder, store: RecordStore | None, threads: int = FETCH_THREADS
    ) -> None:
        self._dataset = dataset
        self._remote = remote
        self._store = store
        self._columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
        self._layout = RecordLayout(self._columns, dataset.description.shards)
        self._run_fetcher = RunFetcher(dataset, self._layout, remote, store)
        self._condition = threading.Condition()
        self._planning_lock = threading.Lock()
        self._prefetch_plan = _PrefetchPlan(is_exhausted=True)
        # Entries are (priority, tie breaker, run).
        self._run_heap: list[tuple[int, int, _Run]] = []
        self._tie_breaker = itertools.count()
        self._run_by_sample: dict[int, _Run] = {}
        # Records in memory, by sample.
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._buffered_bytes = 0
        # Number of active reads that need each sample.
        self._awaited: Counter[int] = Counter()
        self._failures: dict[int, tuple[int, BaseException]] = {}
        self._read_numbers = itertools.count(1)
        self._num_active_reads = 0
        self._closed = False
        # Daemon threads: a program that never calls `close` must still exit.
        self._threads = [threading.Thread(target=self._work, name="headway-fetch", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def expect(self, spans: Spans, order: Order | None, slots: HostSlots | None) -> None:
        """Replaces the announced reads; see `Tier.expect`. Runs that are being fetched go on."""
        # The first 1,000 records give the size well enough for a limit.
        mean_record_bytes = int(self._dataset.length[:1000].mean()) if len(self._dataset) else 0
        limit_bytes = MAX_PREFETCH_BYTES
        if self._store and order and order.window:
            # A whole window and half of the next, so that blocks are read from end to end.
            limit_bytes = max(limit_bytes, 3 * min(order.window, order.samples) * mean_record_bytes)
        with self._planning_lock, self._condition:
            self._prefetch_plan = _PrefetchPlan(spans, order, slots, limit_bytes)
            # The bytes of started runs are on the way already.
            self._run_heap = [entry for entry in self._run_heap if entry[2].started]
            self._run_by_sample = {sample: run for sample, run in self._run_by_sample.items() if run.started}
            for sample in [sample for sample in self._buffers if sample not in self._awaited]:
                self._drop_buffer(sample)
            self._condition.notify_all()

    def read(self, ids: Ids) -> Records:
        """Returns the records of the samples, in the order of `ids`; blocks until all are fetched.

        Raises:
            UsageError: the prefetcher is closed.
            DataError: a record cannot be fetched.
        """
        buffers: dict[int, NDArray[np.uint8]] = {}
        start_time = time.monotonic()
        read_number = next(self._read_numbers)
        with self._condition:
            self._refuse_closed()
            # `close` waits for the readers, whose records it would release.
            self._num_active_reads += 1
            self._awaited.update(ids.tolist())
        try:
            if not self._prefetch_plan.reads:
                self._plan_reads()
            while True:
                lease = self._store.lease() if self._store else None
                # In the store first: most reads of later epochs end here.
                is_stored = self._run_fetcher.find_stored(ids)
                missing = self._take(np.unique(ids[~is_stored]), buffers)
                if not missing:
                    return self._build_records(ids, is_stored, buffers, lease)
                # A lease held while waiting would keep other processes from evicting records.
                del lease
                fetch_claimed = time.monotonic() - start_time > _OTHER_PROCESS_TIMEOUT_S
                self._wait_for(missing, read_number, fetch_claimed=fetch_claimed)
        finally:
            self._forget_consumed(ids)

    def close(self) -> None:
        """Ends the threads and their requests, waits until no read is active, and closes `remote` and `store`."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._remote.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._condition:
            self._condition.wait_for(lambda: not self._num_active_reads)
        self._remote.close()
        if self._store:
            self._store.close()

    # Called by readers

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("this tier is closed", fix="Make another one.")

    def _take(self, ids: Ids, buffers: dict[int, NDArray[np.uint8]]) -> list[int]:
        """Adds the records that are in memory to `buffers`; returns the samples that are not in memory."""
        with self._condition:
            missing = []
            for sample in ids.tolist():
                if sample not in buffers:
                    if sample in self._buffers:
                        buffers[sample] = self._buffers[sample]
                    else:
                        missing.append(sample)
            return missing

    def _wait_for(self, missing: list[int], read_number: int, *, fetch_claimed: bool) -> None:
        """Queues the missing samples as urgent, then waits for a change. Raises the error of a fetch that failed."""
        with self._condition:
            self._refuse_closed()
            for sample in missing:
                failed_read_number, error = self._failures.get(sample, (0, None))
                # A failure from before this read began is tried again.
                if error is not None and failed_read_number == read_number:
                    raise error
            for run in [self._run_by_sample[sample] for sample in missing if sample in self._run_by_sample]:
                if not run.started and run.read_number != read_number:
                    # It overtakes the others; its older entry in the heap is skipped later.
                    run.read_number = read_number
                    heapq.heappush(self._run_heap, (_URGENT, next(self._tie_breaker), run))
            # In no run: not announced, or claimed by another process.
            unqueued = np.array([sample for sample in missing if sample not in self._run_by_sample], np.int64)
            self._push(unqueued, None, read_number, fetch_claimed)
            self._condition.notify_all()
            self._condition.wait(_POLL_INTERVAL_S)

    def _build_records(
        self, ids: Ids, is_stored: NDArray[np.bool_], buffers: dict[int, NDArray[np.uint8]], lease: Lease | None
    ) -> Records:
        address = np.zeros(len(ids), np.uint64)
        length = np.zeros(len(ids), np.uint64)
        stored_records = self._store.read(ids[is_stored]) if self._store and is_stored.any() else None
        if stored_records is not None:
            address[is_stored], length[is_stored] = stored_records.address, stored_records.length
        fetched_records = Records.from_buffers(
            [extract_image(self._columns, sample, buffers[sample]) for sample in ids[~is_stored].tolist()]
        )
        address[~is_stored], length[~is_stored] = fetched_records.address, fetched_records.length
        return Records(address, length, (lease, stored_records, fetched_records))

    def _forget_consumed(self, ids: Ids) -> None:
        """Ends a read: advances the plan if the read was planned, and drops records that no other read needs."""
        with self._condition:
            self._num_active_reads -= 1
            self._awaited.subtract(ids.tolist())
            plan = self._prefetch_plan
            if plan.reads and np.array_equal(plan.reads[0].ids, ids):
                read = plan.reads.popleft()
                plan.planned_bytes -= read.size_bytes
                # The forecast starts at the first position not yet read.
                plan.position = read.high
                plan.pending_uses.subtract(ids.tolist())
            for sample in ids.tolist():
                if self._awaited[sample] <= 0:
                    del self._awaited[sample]
                    self._failures.pop(sample, None)
                if plan.pending_uses[sample] <= 0:
                    del plan.pending_uses[sample]
                    if sample not in self._awaited:
                        self._drop_buffer(sample)
            self._condition.notify_all()

    def _drop_buffer(self, sample: int) -> None:
        self._buffered_bytes -= len(self._buffers.pop(sample, ()))

    # Planning

    def _plan_reads(self) -> None:
        """Takes announced reads up to the limit, and queues those of their records that must be fetched."""
        with self._planning_lock:
            plan = self._prefetch_plan
            new_reads: list[_PlannedRead] = []
            while self._wants_more(new_reads):
                span = next(plan.spans, None)
                if span is None:
                    plan.is_exhausted = True
                    break
                positions = np.arange(*span)
                ids = plan.order(positions)[1] if plan.order else positions
                new_reads.append(_PlannedRead(*span, ids, int(self._dataset.length[ids].sum())))
            if not new_reads:
                return
            # Planned together and sorted, so that neighbours of different reads share a request.
            ids, first_use = np.unique(np.concatenate([read.ids for read in new_reads]), return_index=True)
            needs_fetch = np.ones(len(ids), np.bool_)
            if self._store:
                # Stored records that this process has not checked yet are checked ahead too.
                needs_fetch = ~self._store.find_present(ids) | self._dataset.select_unchecked(ids)
            with self._condition:
                for read in new_reads:
                    plan.reads.append(read)
                    plan.planned_bytes += read.size_bytes
                    plan.pending_uses.update(read.ids.tolist())
                needs_fetch &= [
                    sample not in self._run_by_sample and sample not in self._buffers for sample in ids.tolist()
                ]
                self._push(ids[needs_fetch], first_use[needs_fetch])
                self._condition.notify_all()

    def _wants_more(self, new_reads: Sequence[_PlannedRead] = (), fraction: float = 1.0) -> bool:
        """Returns True if the planned reads, with those in `new_reads`, are below this fraction of the limit."""
        plan = self._prefetch_plan
        limit_bytes = MAX_PREFETCH_BYTES
        # Records that do not fit into the store stay in memory.
        if self._store and self._run_fetcher.is_storing:
            limit_bytes = max(limit_bytes, min(plan.limit_bytes, self._store.share_bytes - self._store.kept_bytes))
        planned_bytes = plan.planned_bytes + sum(read.size_bytes for read in new_reads)
        return not plan.is_exhausted and (
            planned_bytes < fraction * limit_bytes or len(plan.reads) + len(new_reads) < 2
        )

    def _push(
        self, ids: Ids, next_use: NDArray[np.int64] | None, read_number: int = 0, fetch_claimed: bool = False
    ) -> None:
        """Groups records into runs and queues them by `next_use` (lower first; None: urgent)."""
        for extents in self._layout.group_into_runs(ids):
            run = _Run(extents.ids, read_number, fetch_claimed)
            # The heap returns the run that is needed first; the count keeps the order of equals.
            priority = _URGENT if next_use is None else int(next_use[np.searchsorted(ids, run.ids)].min())
            heapq.heappush(self._run_heap, (priority, next(self._tie_breaker), run))
            self._run_by_sample.update(dict.fromkeys(run.ids.tolist(), run))

    # Run by the threads

    def _work(self) -> None:
        """Loop of one thread: fetches the most urgent run, or plans more reads, until the prefetcher is closed."""
        while True:
            with self._condition:
                while not (self._closed or self._next_run_fits() or self._wants_planning()):
                    self._condition.wait()
                if self._closed:
                    return
                # Chosen under the lock, fetched outside it.
                run = heapq.heappop(self._run_heap)[2] if self._next_run_fits() else None
                if run is not None:
                    if run.started:
                        continue
                    run.started = True
            if run is None:
                self._plan_reads()
                continue
            failure: BaseException | None = None
            fetched: list[FetchedRecord] = []
            try:
                fetched = self._run_fetcher.fetch(
                    run.ids, self._prefetch_plan.build_forecast(len(self._dataset)), forced=run.fetch_claimed
                )
            except StoppedError:
                return
            except BaseException as error:
                # Any error is raised in the read that waits for the record.
                failure = error
            with self._condition:
                for sample, extent, is_stored in fetched:
                    if sample in self._awaited or (sample in self._prefetch_plan.pending_uses and not is_stored):
                        self._drop_buffer(sample)
                        # A copy, since a view would keep the gaps between records in memory.
                        self._buffers[sample] = extent.copy()
                        self._buffered_bytes += len(extent)
                for sample in run.ids.tolist():
                    self._run_by_sample.pop(sample, None)
                    if failure is not None and sample in self._awaited:
                        self._failures[sample] = run.read_number, failure
                self._condition.notify_all()

    def _wants_planning(self) -> bool:
        # Half of the limit at a time: planning much at once finds more neighbours.
        return self._wants_more(fraction=0.5) and not self._planning_lock.locked()

    def _next_run_fits(self) -> bool:
        """Returns True if the first run of the heap may start: an urgent one may, others while memory is left."""
        if not self._run_heap:
            return False
        return self._run_heap[0][0] == _URGENT or self._buffered_bytes < MAX_PREFETCH_BYTES
