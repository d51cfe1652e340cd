"""Step timings that ranks share through the store, so that one rank can compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray


class TimingStore(Protocol):
    """Part of torch.distributed's store that `RankTimings` uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@final
class RankTimings:
    """Shares the two newest intervals of each rank, one key per rank, without any rank waiting for another.

    A write does not wait for an answer. A reader may miss the newest interval of some ranks, but the previous one is
    complete: each rank wrote it before the step that all ranks have finished since.

    Args:
        store: Store of one generation, usable from several threads; None for a single process.
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, store: TimingStore | None, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._written: list[tuple[int, list[float]]] = []
        self._last_read_step = 0

    def write(self, step: int, numbers: Sequence[float]) -> None:
        """Writes this rank's numbers of the interval that ends with `step`: finite, and the same count on each rank."""
        self._written = [*self._written[-1:], (step, list(numbers))]
        if self._store is not None:
            # If the store is gone, the next step fails with the reason.
            with suppress(RuntimeError):
                self._store.set(self._build_key(self._rank), json.dumps(self._written))

    def read(self) -> tuple[int, NDArray[np.float64]] | None:
        """Returns (last step, [ranks, numbers]) of the newest interval that all ranks wrote.

        None if that was returned before, if there is none yet, or if the store is gone.
        """
        if self._store is None:
            return None
        keys = [self._build_key(rank) for rank in range(self._size)]
        try:
            # Getting a key that does not exist would wait for it.
            if not self._store.check(keys):
                return None
            steps_by_rank = [dict(json.loads(text)) for text in self._store.multi_get(keys)]
        except RuntimeError:
            return None
        # Ranks may be one interval apart: the newest step that all of them have.
        step = max(set(steps_by_rank[0]).intersection(*steps_by_rank[1:]), default=0)
        if step <= self._last_read_step:
            return None
        self._last_read_step = step
        return step, np.array([rank_steps[step] for rank_steps in steps_by_rank], np.float64)

    def _build_key(self, rank: int) -> str:
        return f"stages/{rank}"
