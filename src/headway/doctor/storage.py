"""Measures the storage of a data set: how fast records arrive when nothing is decoded.

Records are read as a run reads them: in its order, batch by batch. Mapped shards are read by touching their pages on as
many threads as decode, other files one record after the other, remote ones through the fetching threads. So read-ahead,
page faults and the number of requests under way are those of a run.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from headway.core.cpu_count import choose_thread_count
from headway.core.errors import DataError
from headway.core.mounts import Mount, find_mount
from headway.core.profile import Throughput
from headway.core.random_keys import UInt64
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.records import Records
from headway.data.shards import LooseFiles, MappedShards
from headway.data.tiers.choice import DEFAULT_BUDGET_BYTES
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.layout import RecordLayout
from headway.data.tiers.prefetch import FETCH_THREADS
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.tiers.state import STATE_FILE
from headway.data.tiers.store import PACKS_FOLDER, name_cached_set
from headway.doctor.page_cache import COLD, FileSpan, evict, measure_resident_share, restore_residency
from headway.doctor.rate_measurement import build_window, measure_rate
from headway.storage.addresses import get_cache_folder

Ids = NDArray[np.int64]

# Length of a window of cold records: longer than a disk's hiccups.
WINDOW_S = 0.25
# Warm records that are read again and again: more than the processor's caches hold.
WARM_BYTES = 256 << 20
# Records requested one at a time to measure the latency.
ALONE = 16
# Records checked for the share of a set in memory.
SAMPLE = 1024

# IOV_MAX: buffers per call of pwritev.
_VECTORS = 1024
_CALL_BYTES = 16 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.pwritev.restype = ctypes.c_ssize_t
_LIBC.pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


@final
@dataclass(frozen=True)
class StorageRate:
    """Rate of a storage."""

    images_s: Throughput
    bytes_s: float
    # Median latency of a single record; None: not measured.
    latency_s: float | None
    # The records were checked not to be in memory (remote set: not in the cache folder).
    cold: bool
    # What was measured, and what it leaves out.
    note: str


@final
@dataclass(frozen=True)
class StorageLocation:
    """Location and size of a data set."""

    # Folder or address.
    at: str
    # File system of the folder; None: it is remote, or the kernel does not say.
    mount: Mount | None
    # Number of files; 0 if remote.
    files: int
    # Bytes of all records, and the mean of one.
    bytes: int
    record_bytes: float
    # Share in memory, by a sample; None: unknown.
    resident: float | None


def describe_location(dataset: Dataset, mounts: Path = Path("/proc/self/mountinfo")) -> StorageLocation:
    """Describes a data set's storage without measuring it."""
    near = not isinstance(dataset.source, RemoteShards)
    n, size = len(dataset), int(dataset.length.sum(dtype=np.int64))
    some = np.unique(np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.int64))
    return StorageLocation(
        at=_format_location(dataset),
        mount=find_mount(dataset.folder, mounts) if near else None,
        files=_count_files(dataset),
        bytes=size,
        record_bytes=size / max(1, n),
        resident=measure_resident_share(build_span_finder(dataset)(some)) if near else None,
    )


def list_files(dataset: Dataset) -> list[Path]:
    """Returns the local files of a data set's records; empty for a remote set."""
    if isinstance(dataset.source, RemoteShards):
        return []
    if isinstance(dataset.source, LooseFiles):
        return [dataset.folder / dataset.name(sample) for sample in range(len(dataset))]
    return [dataset.folder / shard.name for shard in dataset.description.shards]


def build_span_finder(dataset: Dataset) -> Callable[[Ids], list[FileSpan]]:
    """Builds a function from samples of a local data set to the file spans of their records; neighbours are merged."""
    if isinstance(dataset.source, LooseFiles):
        return lambda ids: [FileSpan(dataset.folder / dataset.name(sample)) for sample in np.unique(ids).tolist()]
    columns = {name: getattr(dataset, name) for name in ("shard", "offset", "length", "flags")}
    shards = dataset.description.shards
    layout = RecordLayout(columns, shards)

    def find_spans(ids: Ids) -> list[FileSpan]:
        return [
            FileSpan(dataset.folder / shards[int(run.shard[0])].name, int(run.start[0]), int(run.end.max()))
            for run in layout.group_into_runs(np.unique(ids))
            # Damaged records have no place.
            if run.end.max() > 0
        ]

    return find_spans


def measure_storage(
    dataset: Dataset,
    order: Order,
    batch: int,
    *,
    cold: bool,
    seconds: float,
    threads: int | None = None,
    folder: Path | None = None,
) -> StorageRate:
    """Reads the records of a run's first batches until their rate is known to 3 %.

    The page cache is as before afterwards. For a remote set, a cold measurement keeps nothing, and a warm one leaves
    its records in the cache folder, as a run does.

    Args:
        batch: samples read at once.
        cold: read records that are not in memory (remote set: not in the cache folder); otherwise ones that are.
        seconds: no window begins later.
        threads: threads that touch mapped records; None: as many as would decode.
        folder: cache folder of remote records; None: the user's.

    Raises:
        DataError: records cannot be read.
    """
    threads = threads or choose_thread_count()
    source = dataset.source
    if not isinstance(source, RemoteShards):
        with _RecordReader(dataset, dataset.read, threads if isinstance(source, MappedShards) else 0) as reader:
            return (_measure_cold if cold else _measure_warm)(dataset, order, batch, reader, seconds)
    if cold:
        return _measure_remote(dataset, source, order, batch, seconds)
    root = folder or get_cache_folder()
    with (
        closing(DiskTier(dataset, source.remote, root, DEFAULT_BUDGET_BYTES, why="")) as tier,
        _RecordReader(dataset, tier.read, threads) as reader,
    ):
        warm = _measure_warm(dataset, order, batch, reader, seconds)
    if (root / PACKS_FOLDER / name_cached_set(dataset) / STATE_FILE).exists():
        return replace(warm, note=f"Records in the cache folder {root}.")
    return replace(warm, note=f"The cache folder {root} cannot be used: each read went to {_format_location(dataset)}.")


@final
class _RecordReader:
    """Reads samples as a loader does, until all their bytes have been in this process's memory.

    A thread writes the records to a file in memory, over the previous ones. One call of the kernel takes a thousand of
    them, so Python's own time does not count. If a shard is cut meanwhile, the call fails, while touching a missing
    page would kill the process.

    Attributes:
        threads: threads that touch the records which `read` only maps; 0: `read` brings them.
    """

    def __init__(self, dataset: Dataset, read: Callable[[Ids], Records], threads: int) -> None:
        self._dataset, self._read, self.threads = dataset, read, threads
        self._sinks = [os.memfd_create("records") for _ in range(threads)]
        self._pool = ThreadPoolExecutor(max(1, threads), "headway-storage")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for sink in self._sinks:
            os.close(sink)

    def __call__(self, ids: Ids) -> int:
        """Reads some samples and returns their number."""
        records = self._read(ids)
        count = min(self.threads, len(ids))
        if count == 1:
            self._touch(self._sinks[0], records.address, records.length)
        elif count:
            parts = (np.array_split(column, count) for column in (records.address, records.length))
            list(self._pool.map(self._touch, self._sinks, *parts))
        return len(ids)

    def _touch(self, sink: int, address: UInt64, length: UInt64) -> None:
        # Layout of struct iovec: address and length, 8 bytes each.
        vectors = np.stack([address, length], axis=1)
        most = min(_VECTORS, max(1, _CALL_BYTES // max(1, int(length.max()))))
        for low in range(0, len(vectors), most):
            some = vectors[low : low + most]
            if _LIBC.pwritev(sink, some.ctypes.data, len(some), 0) != int(some[:, 1].sum()):
                fix = "Run headway verify on it, and copy it again."
                raise DataError("records cannot be read to their end", where=str(self._dataset.folder), fix=fix)


def _measure_cold(dataset: Dataset, order: Order, batch: int, reader: _RecordReader, seconds: float) -> StorageRate:
    spans, n = build_span_finder(dataset), len(dataset)
    at, reasons = 0, list[str]()
    with ExitStack() as restored:

        def evict_next(count: int) -> Ids:
            """Evicts the next samples and returns them; at most up to the epoch's end, so that none comes twice."""
            nonlocal at
            low, at = at, min(at + count, (at // n + 1) * n)
            _, ids = order(np.arange(low, at))
            some = spans(ids)
            restored.enter_context(restore_residency(some))
            if not (evicted := evict(some)).held:
                reasons.append(evicted.note)
            return ids

        def time_reads(ids: Ids, at_once: int) -> float:
            begun = perf_counter()
            for first in range(0, len(ids), at_once):
                reader(ids[first : first + at_once])
            return max(perf_counter() - begun, 1e-9)

        latency_s = median(time_reads(ids, 1) for ids in evict_next(ALONE)[:, None])
        if reasons:
            warm = _measure_warm(dataset, order, batch, reader, seconds)
            return replace(warm, note=f"Cold reads are not possible. {reasons[0]} {warm.note}")
        rate = 1 / latency_s

        def read_window() -> float:
            nonlocal rate
            ids = evict_next(batch * max(1, round(WINDOW_S * rate / batch)))
            rate = len(ids) / time_reads(ids, batch)
            return rate

        settled_rate = measure_rate(read_window, limit_s=seconds)
    notes = [_describe_reads(dataset, reader, "Records that were not in memory")]
    if reasons:
        notes.append(reasons[0])
    if isinstance(dataset.source, LooseFiles):
        notes.append("The file names stayed in memory: the first epoch after a reboot is slower.")
    if (mount := find_mount(dataset.folder)) is not None and mount.is_network:
        notes.append(f"They come over {mount.kind}; its server may have had them in memory.")
    return _build_rate(dataset, settled_rate, latency_s, not reasons, " ".join(notes))


def _measure_warm(dataset: Dataset, order: Order, batch: int, reader: _RecordReader, seconds: float) -> StorageRate:
    most = max(batch, min(len(dataset), round(WARM_BYTES / max(1.0, _compute_record_bytes(dataset)))))
    _, ids = order(np.arange(most))
    batches = [ids[low : low + batch] for low in range(0, most, batch)]
    begun, count = perf_counter(), 0
    while count < len(batches) and (not count or perf_counter() - begun < seconds / 2):
        reader(batches[count])
        count += 1
    # The first pass above brings the records into memory; only the repeats are timed.
    again = itertools.cycle(batches[:count])
    rate = measure_rate(build_window(lambda: reader(next(again))), limit_s=seconds / 2)
    note = _describe_reads(dataset, reader, "Records that were in memory")
    if not isinstance(dataset.source, RemoteShards):
        share = measure_resident_share(build_span_finder(dataset)(np.concatenate(batches[:count])))
        if share is not None and share < 1 - COLD:
            note += f" Only {share:.0%} of the records stayed there."
    return _build_rate(dataset, rate, None, False, note)


def _measure_remote(dataset: Dataset, source: RemoteShards, order: Order, batch: int, seconds: float) -> StorageRate:
    def read_one(sample: int) -> float:
        begun = perf_counter()
        source.read(np.array([sample], np.int64))
        return perf_counter() - begun

    def stream() -> Generator[int, None, None]:
        """Yields batch sizes of endless epochs, each through new connections, so nothing is cached."""
        n = len(dataset)
        spans = [(low, min(n, low + batch)) for low in range(0, n, batch)]
        while True:
            with closing(DiskTier(dataset, source.remote, None, 0, why="")) as tier:
                tier.expect(iter(spans), order)
                for low, high in spans:
                    tier.read(order(np.arange(low, high))[1])
                    yield high - low

    _, first = order(np.arange(min(len(dataset), ALONE)))
    latency_s = median(map(read_one, first.tolist()))
    with closing(stream()) as counts:
        # The first batch includes the time to connect.
        next(counts)
        rate = measure_rate(build_window(lambda: next(counts), least_s=WINDOW_S), limit_s=seconds)
    note = (
        f"Records from {_format_location(dataset)}, none of them cached, on {FETCH_THREADS} fetching threads. "
        "The server may have had them in memory."
    )
    return _build_rate(dataset, rate, latency_s, True, note)


def _build_rate(dataset: Dataset, rate: Throughput, latency_s: float | None, cold: bool, note: str) -> StorageRate:
    return StorageRate(rate, rate.value * _compute_record_bytes(dataset), latency_s, cold, note)


def _compute_record_bytes(dataset: Dataset) -> float:
    return float(dataset.length.mean(dtype=np.float64))


def _describe_reads(dataset: Dataset, reader: _RecordReader, which: str) -> str:
    if reader.threads:
        return f"{which}, touched by {pluralise(reader.threads, 'thread')} as decoding does."
    kind = "as single files" if isinstance(dataset.source, LooseFiles) else "from shards"
    return f"{which}, read {kind}, one after the other."


def _format_location(dataset: Dataset) -> str:
    source = dataset.source
    return source.remote.display_uri if isinstance(source, RemoteShards) else str(dataset.folder)


def _count_files(dataset: Dataset) -> int:
    if isinstance(dataset.source, RemoteShards):
        return 0
    return len(dataset) if isinstance(dataset.source, LooseFiles) else len(dataset.description.shards)
