"""Tier: the interface of the caches that records are read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.records import Records
from headway.data.tiers.next_use import HostSlots

TierName = Literal["device", "memory", "disk", "none"]
Ids = NDArray[np.int64]
Spans = Iterator[tuple[int, int]]
"""Iterator of positions [low, high) of reads."""


class Tier(ABC):
    """A cache that records are read from. `choose_tier` builds one; close it after use.

    Attributes:
        name: value of `data.cache` in a recipe.
        why: reason for the choice, as part of a sentence.
        flags, width, height, crc32c: columns of the records that `read` returns; shape [n]. Those of the data set,
            or of pixels if the tier keeps pixels.
        damaged: `DecodeStatus` of each sample when the tier was filled, uint8 [n]; None if the tier keeps no pixels.
    """

    name: TierName
    why: str
    flags: NDArray[np.uint8]
    width: NDArray[np.uint32]
    height: NDArray[np.uint32]
    crc32c: NDArray[np.uint32]
    damaged: NDArray[np.uint8] | None

    def __init__(self, dataset: Dataset, name: TierName, why: str) -> None:
        self.name = name
        self.why = why
        self.damaged = None
        # Tiers that keep pixels replace these columns when they are filled.
        self.flags, self.width, self.height = dataset.flags, dataset.width, dataset.height
        self.crc32c = dataset.crc32c

    @abstractmethod
    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the records of these samples. Raises DataError if they cannot be read."""

    @abstractmethod
    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Announces the next reads, so that their records can be fetched in time.

        Args:
            spans: positions [low, high) of each coming `read`; may be endless. They are taken as needed, in another
                thread. A new call replaces the spans of the last one.
            order: maps positions to samples; None is index order.
            slots: the slots of every step that this host reads; None: all.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the threads and releases the records of the tier. Records that were read stay valid."""


@final
class MappedTier(Tier):
    """The data set's local files, which the kernel's page cache keeps."""

    def __init__(self, dataset: Dataset, why: str) -> None:
        super().__init__(dataset, "none", why)
        self._dataset = dataset

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the records of these samples; see `Dataset.read`."""
        return self._dataset.read(ids)

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Does nothing: the page cache reads local files ahead."""

    def close(self) -> None:
        """Does nothing: whoever opened the data set closes it."""
