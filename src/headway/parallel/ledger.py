"""The ledger of asynchronous training: who computes which step, at which version of the weights, and who has to wait.

A step is the batch at one place of the order. Each is leased to one worker at a time, so fast workers take more of
them, and a step is applied once. The version of the weights is the number of updates applied so far.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, final

from headway.core.errors import UsageError


class Update(NamedTuple):
    """One update of the weights, as the log has it.

    Attributes:
        worker: rank of the worker that computed it.
        step: the step that it computed; its samples begin at step * batch.
        read: version of the weights that its gradient was computed at.
        applied: version of the weights after it. Its staleness is applied - 1 - read.
    """

    worker: int
    step: int
    read: int
    applied: int

    @property
    def staleness(self) -> int:
        """Number of updates between reading and applying."""
        return self.applied - 1 - self.read


class Lease(NamedTuple):
    """A step that a worker is to compute.

    Attributes:
        step: the step.
        version: version of the weights that the worker reads for it.
        next: the step that it will probably get afterwards, whose samples it may load; None: probably none.
    """

    step: int
    version: int
    next: int | None


@final
class Ledger:
    """Leases the steps of one segment of a run, between two points at which all workers meet.

    Args:
        start, stop: the first step and the end. All steps before the first one are applied.
        workers: ranks of the workers.
        ahead: updates that a worker may be ahead of the slowest one when it begins a step, so that it is ahead by one
            more after it (Ho et al. 2013, stale synchronous parallel); None: no limit.
    """

    def __init__(self, start: int, stop: int, workers: tuple[int, ...], ahead: int | None) -> None:
        self.version = self.start = start
        self._next, self._stop, self._ahead = start, stop, ahead
        self._returned: list[int] = []
        self._hints: dict[int, int] = {}
        self._leases: dict[int, Lease] = {}
        self._counts = dict.fromkeys(workers, 0)

    @property
    def is_drained(self) -> bool:
        """True once no step is left to lease and all leased ones are applied."""
        return not self._leases and not self._has_steps

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that are still there."""
        return tuple(self._counts)

    def stop_leasing(self) -> None:
        """Ends the segment early: no further step begins, and those that were leased or promised are still computed."""
        # Promised ones too: the steps that are applied must have no gap.
        self._stop = min(self._stop, self._next)

    def take(self, worker: int) -> Lease | None:
        """Leases a step to a worker. Returns None if it has to wait: for slower workers, or for the end."""
        if worker in self._leases:
            raise UsageError(f"worker {worker} asks for a step before it has returned step {self._leases[worker].step}")
        if not self._has_steps or self._is_too_far(worker):
            return None
        step = self._hints.pop(worker, None)
        if self._returned:
            # A step that a lost worker left comes first; the one that was promised is free again.
            if step is not None:
                heapq.heappush(self._returned, step)
            step = heapq.heappop(self._returned)
        elif step is None:
            step = self._take_new()
        hint = self._take_new() if self._next < self._stop else None
        if hint is not None:
            self._hints[worker] = hint
        lease = self._leases[worker] = Lease(step, self.version, hint)
        return lease

    def complete(self, worker: int) -> Update:
        """Counts a worker's step as applied, as the next version."""
        lease = self._leases.pop(worker)
        self.version += 1
        self._counts[worker] += 1
        return Update(worker, lease.step, lease.version, self.version)

    def drop(self, worker: int) -> None:
        """Forgets a worker that is gone; the steps that it had are leased to others."""
        self._counts.pop(worker, None)
        lease, hint = self._leases.pop(worker, None), self._hints.pop(worker, None)
        for step in (None if lease is None else lease.step, hint):
            if step is not None:
                heapq.heappush(self._returned, step)

    @property
    def _has_steps(self) -> bool:
        return bool(self._returned or self._hints) or self._next < self._stop

    def _take_new(self) -> int:
        if self._next < self._stop:
            self._next += 1
            return self._next - 1
        # All are promised: the last promise to another worker is taken back, as a promise is no lease.
        worker = max(self._hints, key=lambda one: self._hints[one])
        return self._hints.pop(worker)

    def _is_too_far(self, worker: int) -> bool:
        return self._ahead is not None and self._counts[worker] - min(self._counts.values()) > self._ahead
