"""Sampling: what a device and its host do, read again and again by a thread of its own while a run trains."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import final

INTERVAL_S = 0.5
"""Between two readings. One of the host takes 0.05 ms of a processor, and its row 0.015 ms (two cores, Linux 6)."""
INTERVAL_SHARE = 1 / 3600
"""Later they are rarer: each is of so much of the run so far, so that a week has four times the rows of an hour."""

LoadRow = tuple[float, ...]
"""A number for each of a source's columns; NaN where it is not known."""


class LoadSource(ABC):
    """Something whose load is read."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the file of rows."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """What a row holds; the first is `seconds`, of the run's clock, at the end of the time that it is of."""

    @abstractmethod
    def read(self, now_s: float) -> list[LoadRow]:
        """What has been since it was read last, or made; oldest first."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it holds."""


@final
class LoadSampler:
    """Reads sources in a thread of its own for as long as its block lasts.

    Args:
        write: takes each row, in that thread; where it raises OSError, as on a full disk, no more are read.
        since_s: seconds of the run's clock at this moment.

    Attributes:
        latest: the newest number of each column, as `KIND_COLUMN`.
    """

    def __init__(
        self, sources: Sequence[LoadSource], write: Callable[[LoadSource, LoadRow], None], since_s: float = 0.0
    ) -> None:
        self._sources, self._write = sources, write
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
            self._read()  # of what is left
        except OSError:  # the run itself says that nothing can be written
            return

    def _read(self) -> None:
        self._last_s = now_s = perf_counter() - self._origin
        latest: dict[str, float] = {}
        for source in self._sources:
            for row in source.read(now_s):
                self._write(source, row)
                latest |= {f"{source.kind}_{name}": value for name, value in zip(source.columns, row, strict=True)}
        self.latest = self.latest | latest
