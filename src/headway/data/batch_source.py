"""BatchSource: the part of a Loader that makes its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Generic, TypeVar

from headway.data.epoch_cursor import EpochCursor
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderStats
from headway.data.workers.stream_cursor import StreamCursor

AnyBatch = TypeVar("AnyBatch")


class BatchSource(ABC, Generic[AnyBatch]):
    """Makes the batches at any positions.

    Attributes:
        spec: the options, with the order that they give.
        cursor: epoch and position.
    """

    spec: LoaderSpec
    cursor: EpochCursor | StreamCursor

    @abstractmethod
    def serve(self, start: int, stop: float) -> Generator[AnyBatch, None, None]:
        """Yields the batches of the steps that begin at these positions. Closing the iterator ends its threads."""

    @abstractmethod
    def make_stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""

    @abstractmethod
    def describe(self) -> str:
        """Returns the batches' images or samples in a few words."""

    @abstractmethod
    def close(self) -> None:
        """Ends worker processes. The next iteration starts them again."""
