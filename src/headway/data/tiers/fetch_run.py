"""RunFetcher: fetches one run of remote records, checks them and stores them."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.tiers.layout import Ids, RecordLayout, extract_image
from headway.data.tiers.next_use import ReadForecast
from headway.data.tiers.store import RecordStore
from headway.storage.remote_folder import RemoteFolder

LOG = logging.getLogger("headway.data")


class FetchedRecord(NamedTuple):
    """A record that was fetched: its bytes in the shard, and True if the store has it now."""

    sample: int
    extent: NDArray[np.uint8]
    is_stored: bool


@final
class RunFetcher:
    """Fetches records from a remote folder into a store; any number of threads may use it.

    Args:
        dataset: provides the checksums; verified records are marked as checked in it.
        store: None stores nothing.

    Attributes:
        is_storing: False once the store could not be written, or without one.
    """

    def __init__(self, dataset: Dataset, layout: RecordLayout, remote: RemoteFolder, store: RecordStore | None) -> None:
        self._dataset, self._layout, self._remote, self._store = dataset, layout, remote, store
        self._columns = {name: getattr(dataset, name) for name in ("length", "flags")}
        self._names = [shard.name for shard in dataset.description.shards]
        self.is_storing = store is not None
        self._full_position: int | None = None
        self._lock = threading.Lock()

    def find_stored(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the records that are in the store and intact; bool [k]. The caller holds a lease.

        The checksum of each record is verified at its first use by this process; a damaged one is removed.
        """
        if self._store is None:
            return np.zeros(len(ids), np.bool_)
        is_stored = self._store.find_present(ids)
        unchecked = np.flatnonzero(is_stored & self._dataset.select_unchecked(ids))
        if unchecked.size:
            records = self._store.read(ids[unchecked])
            is_good = np.array([crc32c(data) for data in records], np.uint32) == self._dataset.crc32c[ids[unchecked]]
            self._dataset.mark_checked(ids[unchecked[is_good]])
            if not is_good.all():
                # A power failure may leave the mark of a record without its bytes.
                self._store.forget(ids[unchecked[~is_good]])
                is_stored[unchecked[~is_good]] = False
        return is_stored

    def fetch(self, ids: Ids, forecast: ReadForecast, *, forced: bool) -> list[FetchedRecord]:
        """Fetches the records of one run that are not in the store.

        Args:
            forced: also fetch records that another process has claimed, instead of leaving them to that process.

        Returns:
            the fetched records; not those that were stored already, or claimed by another process.

        Raises:
            DataError: the remote folder cannot be read, or a file has changed.
            StoppedError: the remote folder was stopped meanwhile.
        """
        store = self._store
        if store is None:
            return self._read(ids, forecast)
        lease = store.lease()
        ids = ids[~self.find_stored(ids)]
        # A lease held while waiting for the network would keep other processes from evicting records.
        del lease
        claimed = np.zeros(0, np.int64)
        try:
            if not forced:
                # A record that another process has claimed will be stored by it; the reader waits for that.
                ids = claimed = ids[store.claim(ids)]
            # Another process may have stored them since.
            ids = ids[~store.find_present(ids)]
            return self._read(ids, forecast) if len(ids) else []
        finally:
            store.unclaim(claimed)

    def _read(self, ids: Ids, forecast: ReadForecast) -> list[FetchedRecord]:
        """Fetches records with one request, verifies their checksums and stores the intact ones."""
        located = self._layout.locate(ids)
        name = self._names[int(located.shard[0])]
        run_start = int(located.start.min())
        data = self._remote.read(name, run_start, int(located.end.max()) - run_start)
        extents = located.slice_bytes(run_start, data)
        is_good = np.ones(len(located), np.bool_)
        for index, (sample, _, start) in enumerate(located.iterate_starts()):
            if not self._is_intact(sample, extents[index]):
                # Raises DataError if the remote file was replaced.
                self._remote.read_version(name)
                # A bit may flip in transit; if the second copy fails too, the record itself is damaged.
                extents[index] = self._remote.read(name, start, len(extents[index]))
                is_good[index] = self._is_intact(sample, extents[index])
        self._dataset.mark_checked(located.ids[is_good])
        good_extents = [extents[index] for index in np.flatnonzero(is_good).tolist()]
        are_stored = self._store_records(located.ids[is_good], good_extents, forecast)
        return [
            FetchedRecord(sample, extent, are_stored and is_intact)
            for sample, extent, is_intact in zip(located.ids.tolist(), extents, is_good.tolist(), strict=True)
        ]

    def _is_intact(self, sample: int, extent: NDArray[np.uint8]) -> bool:
        return bool(crc32c(extract_image(self._columns, sample, extent)) == self._dataset.crc32c[sample])

    def _store_records(self, ids: Ids, extents: list[NDArray[np.uint8]], forecast: ReadForecast) -> bool:
        """Stores records, evicting others if needed; returns False if they do not fit. A failing store is abandoned."""
        if self._store is None or not self.is_storing:
            return False
        try:
            if self._store.keep(ids, extents):
                return True
            # Nothing was read since the store was found full.
            if self._full_position == forecast.position:
                return False
            if self._store.make_room(
                ids, forecast.find_next_use, forecast.find_eviction_start(ids)
            ) and self._store.keep(ids, extents):
                return True
            # Until the next read, trying to make room again would find the same.
            self._full_position = forecast.position
        except OSError as error:
            with self._lock:
                is_first_failure, self.is_storing = self.is_storing, False
            if is_first_failure:
                LOG.warning(
                    f"The cache {self._store.folder} cannot be written ({error.strerror}): "
                    "records that are not in it are read from the network each time."
                )
        return False
