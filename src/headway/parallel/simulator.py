"""Asynchronous training in one process: an event queue instead of clocks, with the ledger and weights of the server.

So any number of workers and any speeds can be tried where there are not so many processors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from torch import Tensor

from headway.parallel.buffers import SharedBuffers
from headway.parallel.ledger import Ledger, Update
from headway.parallel.shards import WeightShard


def simulate(
    workers: int,
    steps: int,
    shard: WeightShard,
    buffers: SharedBuffers,
    compute: Callable[[int], tuple[list[Tensor | None], list[Tensor]]],
    lr_at: Callable[[int], float],
    draw_seconds: Callable[[int, int], float],
    *,
    ahead: int | None = None,
) -> tuple[Sequence[Update], float]:
    """Trains `steps` updates with simulated workers.

    Args:
        compute, lr_at: see `replay`.
        draw_seconds: time that a worker takes for a step.
        ahead: see `Ledger`.

    Returns:
        The updates in their order, and the simulated seconds.
    """
    ledger = Ledger(0, steps, tuple(range(workers)), ahead)
    # Workers that compute, by the time at which they are done.
    running: list[tuple[float, int]] = []
    computed: dict[int, tuple[list[Tensor | None], list[Tensor]]] = {}
    idle, now = list(range(workers)), 0.0
    updates: list[Update] = []
    while idle or running:
        still_idle = []
        for worker in idle:
            lease = ledger.take(worker)
            if lease is None:
                still_idle.append(worker)
                continue
            shard.note_read(worker)
            buffers.note_read(worker)
            computed[worker] = compute(lease.step)
            heapq.heappush(running, (now + draw_seconds(worker, lease.step), worker))
        if not running:
            break
        now, worker = heapq.heappop(running)
        update = ledger.complete(worker)
        gradients, changed = computed.pop(worker)
        shard.apply(worker, gradients, lr_at(update.applied - 1), is_stale=update.staleness > 0)
        buffers.add(worker, changed, is_stale=update.staleness > 0)
        updates.append(update)
        idle = [*still_idle, worker]
    return updates, now
