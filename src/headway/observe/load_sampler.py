"""Samples the load of device and host in a thread of its own while a run trains."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import final

# Seconds between two readings. One of the host takes 0.25 ms of a core, and its row 0.015 ms (two cores, Linux 6).
INTERVAL_S = 0.5
# The interval grows to this share of the run so far, so that a week has only four times the rows of an hour.
INTERVAL_SHARE = 1 / 3600

LoadRow = tuple[float, ...]
"""One number for each column of a source; NaN if unknown."""


class LoadSource(ABC):
    """Device or host whose load can be read."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the row file."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns of a row. The first is `seconds` of the run's clock, at the end of the interval that it describes."""

    @abstractmethod
    def read(self, now_s: float) -> list[LoadRow]:
        """Returns the load since the last call, oldest row first. `now_s` is the present time of the run's clock."""

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of the source."""


@final
class LoadSampler:
    """Reads sources in a thread for the duration of the block, and closes them.

    Args:
        sources: Devices and hosts to read.
        write: Takes each row, in that thread. If it raises OSError, as on a full disk, sampling ends.
        since_s: Present time of the run's clock.

    Attributes:
        latest: Newest number of each column, by kind of the source and column (`host_cpu`).
    """

    def __init__(
        self, sources: Sequence[LoadSource], write: Callable[[LoadSource, LoadRow], None], since_s: float = 0.0
    ) -> None:
        self._sources = sources
        self._write = write
        self._origin = perf_counter() - since_s
        self._last_s = since_s
        self.latest: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-sampler", daemon=True)

    def __enter__(self) -> LoadSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for source in self._sources:
            source.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(max(INTERVAL_S, INTERVAL_SHARE * self._last_s)):
                self._read()
            # The last interval is shorter, but belongs to the run.
            self._read()
        # The run reports by itself that nothing can be written.
        except OSError:
            return

    def _read(self) -> None:
        self._last_s = now_s = perf_counter() - self._origin
        latest: dict[str, float] = {}
        for source in self._sources:
            for row in source.read(now_s):
                self._write(source, row)
                latest |= {f"{source.kind}_{name}": value for name, value in zip(source.columns, row, strict=True)}
        # A new dict each time: readers in other threads never see a half-updated one.
        self.latest = self.latest | latest
