"""Bringer: one run of remote records, read, checked and kept."""

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
    """A record that was read: its bytes in the shard, and whether they are in the store now."""

    sample: int
    extent: NDArray[np.uint8]
    kept: bool


@final
class RunFetcher:
    """Brings records from a remote to a store, from any number of threads.

    Args:
        dataset: what was found good is noted in it.
        store: None: nothing is kept.
        say: is told once what went wrong with the store.

    Attributes:
        storing: whether records are kept; no more once the store could not be written.
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
        self.storing = store is not None
        self._full_at: int | None = None
        self._lock = threading.Lock()

    def find_stored(self, ids: Ids) -> NDArray[np.bool_]:
        """Which records are in the store and good; each is checked at its first touch by this process. The caller
        holds a lease."""
        if self._store is None:
            return np.zeros(len(ids), np.bool_)
        near = self._store.find_present(ids)
        look = np.flatnonzero(near & self._dataset.select_unchecked(ids))
        if look.size:
            records = self._store.read(ids[look])
            good = np.array([crc32c(data) for data in records], np.uint32) == self._dataset.crc32c[ids[look]]
            self._dataset.mark_checked(ids[look[good]])
            if not good.all():
                self._store.forget(ids[look[~good]])
                near[look[~good]] = False
        return near

    def fetch(self, ids: Ids, forecast: ReadForecast, *, forced: bool) -> list[FetchedRecord]:
        """Reads what is not in the store, of records that lie side by side in one shard.

        Args:
            forced: also what another process is fetching; without it, that is left to the other one.
        """
        store = self._store
        if store is None:
            return self._read(ids, forecast)
        lease = store.lease()
        ids = ids[~self.find_stored(ids)]
        del lease
        claimed = np.zeros(0, np.int64)
        try:
            if not forced:
                ids = claimed = ids[store.claim(ids)]
            ids = ids[~store.find_present(ids)]  # another process may just have brought it
            return self._read(ids, forecast) if len(ids) else []
        finally:
            store.unclaim(claimed)

    def _read(self, ids: Ids, forecast: ReadForecast) -> list[FetchedRecord]:
        found = self._layout.locate(ids)
        name = self._names[int(found.shard[0])]
        low = int(found.start.min())
        data = self._remote.read(name, low, int(found.end.max()) - low)
        extents, good = found.slice_bytes(low, data), np.ones(len(found), np.bool_)
        for place, (sample, _, start) in enumerate(found.iterate_places()):
            if not self._is_intact(sample, extents[place]):
                self._remote.read_version(name)  # raises where the file was changed
                extents[place] = self._remote.read(name, start, len(extents[place]))
                good[place] = self._is_intact(sample, extents[place])
        self._dataset.mark_checked(found.ids[good])
        kept = self._store_records(
            found.ids[good], [extents[place] for place in np.flatnonzero(good).tolist()], forecast
        )
        return [
            FetchedRecord(sample, extent, kept and fine)
            for sample, extent, fine in zip(found.ids.tolist(), extents, good.tolist(), strict=True)
        ]

    def _is_intact(self, sample: int, extent: NDArray[np.uint8]) -> bool:
        return bool(crc32c(extract_image(self._columns, sample, extent)) == self._dataset.crc32c[sample])

    def _store_records(self, ids: Ids, extents: list[NDArray[np.uint8]], forecast: ReadForecast) -> bool:
        """Writes records to the store; False where they have no room there. A store that fails is used no more."""
        if self._store is None or not self.storing:
            return False
        try:
            if self._store.keep(ids, extents):
                return True
            if self._full_at == forecast.position:  # nothing was read since it was found full
                return False
            if self._store.make_room(
                ids, forecast.find_next_use, forecast.find_eviction_start(ids)
            ) and self._store.keep(ids, extents):
                return True
            self._full_at = forecast.position
        except OSError as error:
            with self._lock:
                first, self.storing = self.storing, False
            if first:
                self._say(
                    f"The cache {self._store.folder} cannot be written ({error.strerror}): "
                    "what is not in it is read from the network each time."
                )
        return False
