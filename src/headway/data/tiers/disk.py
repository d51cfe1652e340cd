"""DiskTier: remote records, fetched ahead of need and kept on the local disk, or in memory until they are read."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from headway.core.files import describe_os_error
from headway.core.mounts import is_on_network
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.records import Records
from headway.data.tiers.next_use import HostSlots
from headway.data.tiers.prefetch import FETCH_THREADS, Prefetcher
from headway.data.tiers.store import RecordStore
from headway.data.tiers.tier import Ids, Spans, Tier
from headway.storage.remote_folder import RemoteFolder

LOG = logging.getLogger("headway.data")


@final
class DiskTier(Tier):
    """Records of a remote data set.

    Args:
        remote: the folder of its shards.
        folder: the cache folder, which other sets and other processes of the host may share. None keeps records in
            memory until they are read; so does a folder that cannot be used, which the log reports once.
        budget_bytes: limit of all sets in the folder together.
        why: reason for the choice, as part of a sentence.
        threads: number of threads that fetch.

    A forked child starts its own threads and connections at its first read.
    """

    def __init__(
        self,
        dataset: Dataset,
        remote: RemoteFolder,
        folder: Path | None,
        budget_bytes: int,
        *,
        why: str,
        threads: int = FETCH_THREADS,
    ) -> None:
        # Without a folder it is the tier `none` of the recipe.
        super().__init__(dataset, "disk" if folder else "none", why)
        self._dataset = dataset
        self._remote = remote
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._num_threads = threads
        self._prefetcher = self._start_prefetcher()
        self._process = os.getpid()
        # Also ends the threads of a tier that is dropped without `close`.
        self._end = weakref.finalize(self, self._prefetcher.close)

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the records of these samples; see `Prefetcher.read`."""
        return self._get_prefetcher().read(np.asarray(ids, np.int64))

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Announces the next reads; see `Tier.expect`."""
        self._get_prefetcher().expect(spans, order, slots)

    def close(self) -> None:
        """Ends the threads, and releases the store."""
        self._end()

    def _get_prefetcher(self) -> Prefetcher:
        if self._process != os.getpid():
            # The threads exist only in the parent, so there is nothing to end here.
            self._end.detach()
            self._prefetcher = self._start_prefetcher()
            self._process = os.getpid()
            self._end = weakref.finalize(self, self._prefetcher.close)
        return self._prefetcher

    def _start_prefetcher(self) -> Prefetcher:
        shards = self._dataset.description.shards
        # New connections, as other threads may use those of the data set.
        remote = self._remote.reopen({shard.name: shard.size for shard in shards})
        return Prefetcher(self._dataset, remote, self._open_store(), self._num_threads)

    def _open_store(self) -> RecordStore | None:
        """Opens the store in the cache folder; returns None, and logs the reason, if that is not possible."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Byte locks and holes are unreliable on network file systems.
            if not is_on_network(self._folder):
                return RecordStore(self._dataset, self._folder, self._budget_bytes)
            reason = "it lies on a network file system"
        except OSError as error:
            reason = describe_os_error(error)
        LOG.warning(
            "The cache folder %s cannot be used (%s): records are read from the network each time.",
            self._folder,
            reason,
        )
        return None
