"""Repeats an asynchronous run from its log, in one process and bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.parallel.buffers import SharedBuffers
from headway.parallel.ledger import Update
from headway.parallel.shards import WeightShard


def replay(
    updates: Sequence[Update],
    shard: WeightShard,
    buffers: SharedBuffers,
    compute: Callable[[int], tuple[list[Tensor | None], list[Tensor]]],
    lr_at: Callable[[int], float],
    on_update: Callable[[int], None] = lambda applied: None,
) -> None:
    """Repeats updates in the order of their log; the weights and buffers of `shard` and `buffers` follow.

    Args:
        updates: a log from its beginning.
        shard: all weights, as they were at the start.
        compute: computes a step at the weights and buffers of now. It returns gradients and changed buffers, which
            it does not use again.
        lr_at: learning rate of the update with a number, from 0.
        on_update: called after each update, with the number of updates so far.
    """
    # The updates of each worker in order, the next one last.
    waiting: dict[int, list[Update]] = {}
    for update in reversed(updates):
        waiting.setdefault(update.worker, []).append(update)
    computed: dict[int, tuple[list[Tensor | None], list[Tensor]]] = {}

    def read(version: int) -> None:
        # Computed at the version that was read, and kept until it is applied: no older weights are needed.
        for worker, steps in waiting.items():
            if steps and steps[-1].read == version and worker not in computed:
                shard.note_read(worker)
                buffers.note_read(worker)
                computed[worker] = compute(steps[-1].step)

    read(0)
    for update in updates:
        gradients, changed = computed.pop(update.worker)
        waiting[update.worker].pop()
        is_stale = update.staleness > 0
        shard.apply(update.worker, gradients, lr_at(update.applied - 1), is_stale=is_stale)
        with torch.no_grad():
            buffers.add(update.worker, changed, is_stale=is_stale)
        on_update(update.applied)
        read(update.applied)
