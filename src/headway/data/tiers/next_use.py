"""When a sample is needed next, which the Order knows: so what is needed latest is taken away first (Belady 1966, "A
study of replacement algorithms for a virtual-storage computer").

In an epoch every sample comes once, so a cache of c records cannot be hit more than c times in it, and of two that are
needed again in the same epoch it does not matter which one is kept. So a record makes way only for one that is needed
again in an earlier epoch: there are as few misses as ever, and on a host that goes through the whole set, a full cache
is not written to any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.data.batch_plan import BatchPlan
from headway.data.order import Order

NEVER = np.iinfo(np.int64).max
_EPOCHS = 8
"""So far ahead is looked where other hosts take a part of every epoch; what comes later is as good as never."""


class HostSlots(NamedTuple):
    """The slots of every step that the ranks [first, last) of `world` take, which are those of this host."""

    plan: BatchPlan
    first: int
    last: int
    world: int

    def find_taken(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each position is among them; of the shape of `positions`."""
        slot, size = self.plan.locate_slots(positions)
        taken: NDArray[np.bool_] = (slot >= self.first * size // self.world) & (slot < self.last * size // self.world)
        return taken


@final
@dataclass(frozen=True, slots=True)
class ReadForecast:
    """What is known of the positions to come.

    Args:
        position: the next one.
        samples: size of the data set.
        order: None: index order, again and again.
        slots: which positions this host takes; None: all.
    """

    position: int
    samples: int
    order: Order | None = None
    slots: HostSlots | None = None

    def find_next_use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position at which this host needs each sample; NEVER where none of the next epochs has one."""
        found = np.full(len(ids), NEVER)
        first = self.position // self.samples
        for epoch in range(first, first + (2 if self.slots is None else _EPOCHS)):
            unknown = np.flatnonzero(found == NEVER)
            if not unknown.size:
                break
            some = ids[unknown]
            at = self.order.find_positions(epoch, some) if self.order else epoch * self.samples + some
            needed = at >= self.position
            if self.slots is not None:
                needed &= self.slots.find_taken(at)
            found[unknown[needed]] = at[needed]
        return found

    def find_eviction_start(self, ids: NDArray[np.int64]) -> int:
        """The position from which on the next use of a record has to be that makes way for these, which are about to be
        used: after the first epoch in which one of them is needed again; NEVER where none is."""
        used = self.find_next_use(ids)
        coming = used[used < NEVER]
        if not coming.size:
            return NEVER
        later = replace(self, position=(int(coming.max()) // self.samples + 1) * self.samples)
        again = int(later.find_next_use(ids).min())
        return NEVER if again == NEVER else (again // self.samples + 1) * self.samples
