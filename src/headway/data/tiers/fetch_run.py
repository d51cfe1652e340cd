"""RunFetcher: fetches one run of remote records, checks them and stores them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.tiers.layout import Ids, RecordLayout, extract_image
from headway.data.tiers.next_use import ReadForecast
from headway.data.tiers.store import RecordStore
from headway.storage.remote_folder import RemoteFolder


class FetchedRecord(NamedTuple):
    """A record that was fetched: its bytes in the shard, and whether the store has it now."""

    sample: int
    extent: NDArray[np.uint8]
    kept: bool


@final
class RunFetcher:
    """Fetches records from a remote folder into a store; any number of threads may use it.

    Args:
        dataset: keeps note of the records whose checksum is right.
        store: None stores nothing.
        say: called once, with a message, if the store fails.

    Attributes:
        is_storing: False once the store could not be written, or without one.
    """

    def __init__(
        self,
        dataset: Dataset,
        layout: RecordLayout,
        remote: RemoteFolder,
        store: RecordStore | None,
        say: Callable[[str], object],
    ) -> None:
        self._dataset, self._layout, self._remote, self._store, self._say = dataset, layout, remote, store, say
        self._columns = {name: getattr(dataset, name) for name in ("length", "flags")}
        self._names = [shard.name for shard in dataset.description.shards]
        self.is_storing = store is not None
        self._full_at: int | None = None
        self._lock = threading.Lock()

    def find_stored(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the records that are in the store and intact. The caller holds a lease.

        A process checks each record at its first use.
        """
        if self._store is None:
            return np.zeros(len(ids), np.bool_)
        near = self._store.find_present(ids)
        look = np.flatnonzero(near & self._dataset.select_unchecked(ids))
        if look.size:
            records = self._store.read(ids[look])
            good = np.array([crc32c(data) for data in records], np.uint32) == self._dataset.crc32c[ids[look]]
            self._dataset.mark_checked(ids[look[good]])
            if not good.all():
                # A power failure may leave the mark of a record without its bytes.
                self._store.forget(ids[look[~good]])
                near[look[~good]] = False
        return near

    def fetch(self, ids: Ids, forecast: ReadForecast, *, forced: bool) -> list[FetchedRecord]:
        """Fetches the records of one run that are not in the store.

        Args:
            forced: also fetch what another process is fetching, instead of leaving it to that process.
        """
        store = self._store
        if store is None:
            return self._read(ids, forecast)
        lease = store.lease()
        ids = ids[~self.find_stored(ids)]
        # Held while waiting for the network, it would stop other processes from making room.
        del lease
        claimed = np.zeros(0, np.int64)
        try:
            if not forced:
                # A claimed record has an owner who will store it; the reader waits for that.
                ids = claimed = ids[store.claim(ids)]
            # Another process may have stored them since.
            ids = ids[~store.find_present(ids)]
            return self._read(ids, forecast) if len(ids) else []
        finally:
            store.unclaim(claimed)

    def _read(self, ids: Ids, forecast: ReadForecast) -> list[FetchedRecord]:
        run = self._layout.locate(ids)
        name = self._names[int(run.shard[0])]
        low = int(run.start.min())
        data = self._remote.read(name, low, int(run.end.max()) - low)
        extents, good = run.slice_bytes(low, data), np.ones(len(run), np.bool_)
        for place, (sample, _, start) in enumerate(run.iterate_places()):
            if not self._is_intact(sample, extents[place]):
                # Raises DataError if the remote file was replaced.
                self._remote.read_version(name)
                # A bit may flip on the way; if the second copy fails too, the record itself is damaged.
                extents[place] = self._remote.read(name, start, len(extents[place]))
                good[place] = self._is_intact(sample, extents[place])
        self._dataset.mark_checked(run.ids[good])
        kept = self._store_records(run.ids[good], [extents[place] for place in np.flatnonzero(good).tolist()], forecast)
        return [
            FetchedRecord(sample, extent, kept and fine)
            for sample, extent, fine in zip(run.ids.tolist(), extents, good.tolist(), strict=True)
        ]

    def _is_intact(self, sample: int, extent: NDArray[np.uint8]) -> bool:
        return bool(crc32c(extract_image(self._columns, sample, extent)) == self._dataset.crc32c[sample])

    def _store_records(self, ids: Ids, extents: list[NDArray[np.uint8]], forecast: ReadForecast) -> bool:
        """Stores records; returns False if they do not fit. A store that fails is not used again."""
        if self._store is None or not self.is_storing:
            return False
        try:
            if self._store.keep(ids, extents):
                return True
            # Nothing was read since the store was found full.
            if self._full_at == forecast.position:
                return False
            if self._store.make_room(
                ids, forecast.find_next_use, forecast.find_eviction_start(ids)
            ) and self._store.keep(ids, extents):
                return True
            # Until the next read, trying to make room again would find the same.
            self._full_at = forecast.position
        except OSError as error:
            with self._lock:
                first, self.is_storing = self.is_storing, False
            if first:
                self._say(
                    f"The cache {self._store.folder} cannot be written ({error.strerror}): "
                    "records that are not in it are read from the network each time."
                )
        return False
