"""Tier: where the bytes of samples are kept while they are in use."""

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


class Tier(ABC):
    """A place from which records are read. `choose` makes one; close it after use.

    Attributes:
        name: of the place, as a recipe says it.
        why: a sentence's part: why it was chosen.
        flags, width, height, crc32c: columns of what `read` brings; shape [n]. As the data set's, or of pixels where
            the tier keeps those.
        damaged: uint8 [n]: the decoder's `Status` of each sample when the tier was filled; None where it decodes none.
    """

    name: TierName
    why: str
    flags: NDArray[np.uint8]
    width: NDArray[np.uint32]
    height: NDArray[np.uint32]
    crc32c: NDArray[np.uint32]
    damaged: NDArray[np.uint8] | None

    def __init__(self, dataset: Dataset, name: TierName, why: str) -> None:
        self.name, self.why, self.damaged = name, why, None
        self.flags, self.width, self.height = dataset.flags, dataset.width, dataset.height
        self.crc32c = dataset.crc32c

    @abstractmethod
    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Where the samples' bytes lie. Raises DataError where they cannot be had."""

    @abstractmethod
    def expect(
        self, spans: Iterator[tuple[int, int]], order: Order | None = None, slots: HostSlots | None = None
    ) -> None:
        """Says what will be read, so that it is there in time.

        Args:
            spans: positions [low, high) of each `read` to come; may be without end. They are taken as they are needed,
                in another thread. What was expected before is forgotten.
            order: which samples these are; None: index order.
            slots: which part of every step this host takes, where there are others.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends its threads and lets go of what it keeps. Records that were read stay for as long as they live."""


@final
class MappedTier(Tier):
    """The data set itself: local files, which the kernel's page cache keeps."""

    def __init__(self, dataset: Dataset, why: str) -> None:
        super().__init__(dataset, "none", why)
        self._dataset = dataset

    def read(self, ids: Sequence[int] | Ids) -> Records:
        return self._dataset.read(ids)

    def expect(
        self, spans: Iterator[tuple[int, int]], order: Order | None = None, slots: HostSlots | None = None
    ) -> None:
        """Nothing is brought: local files are near."""

    def close(self) -> None:
        """The data set is its opener's."""
