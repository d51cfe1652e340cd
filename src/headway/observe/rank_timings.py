"""Board: where the ranks write down how long they took, so that one of them can see all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray


class TimingStore(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@final
class RankTimings:
    """A key of each rank in the store of one generation, with its two newest intervals. Nobody waits for anybody.

    To write is to send without an answer. Whoever reads may come before others have written their newest interval; the
    one before it they have, as each wrote it before the step in which all have met since.

    Args:
        store: may be used by other threads at the same time; None in a world of one.
        rank, size: of this process.
    """

    def __init__(self, store: TimingStore | None, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._written: list[tuple[int, list[float]]] = []
        self._read = 0

    def write(self, step: int, numbers: Sequence[float]) -> None:
        """This rank's numbers of the interval that ends with `step`; finite, as many on each rank."""
        self._written = [*self._written[-1:], (step, list(numbers))]
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone: the next step tells why
                self._store.set(self._build_key(self._rank), json.dumps(self._written))

    def read(self) -> tuple[int, NDArray[np.float64]] | None:
        """(last step, [ranks, numbers]) of the newest interval that all ranks have written, each once."""
        if self._store is None:
            return None
        keys = [self._build_key(rank) for rank in range(self._size)]
        try:
            if not self._store.check(keys):  # to get what is not there would be to wait
                return None
            found = [dict(json.loads(text)) for text in self._store.multi_get(keys)]
        except RuntimeError:
            return None
        step = max(set(found[0]).intersection(*found[1:]), default=0)
        if step <= self._read:
            return None
        self._read = step
        return step, np.array([one[step] for one in found], np.float64)

    def _build_key(self, rank: int) -> str:
        return f"stages/{rank}"
