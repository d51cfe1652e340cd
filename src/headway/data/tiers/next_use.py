"""ReadForecast: the next use of each sample, known from the Order, so that the record needed last is evicted first.

This is the policy of Belady 1966, "A study of replacement algorithms for a virtual-storage computer".

In an epoch every sample comes once, so a cache of c records has at most c hits in it, and of two records that are
needed again in the same epoch either may be kept. So a record is evicted only for one that is needed again in an
earlier epoch: misses stay minimal, and on a host that reads the whole set, a full cache is no longer written to.
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
"""Epochs to look ahead if other hosts take a part of each; a later use counts as never."""


class HostSlots(NamedTuple):
    """This host's slots of every step: those of ranks [first, last) of `world`."""

    plan: BatchPlan
    first: int
    last: int
    world: int

    def find_taken(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask of the positions that this host takes; of the shape of `positions`."""
        # Ranks share the slots of a step in equal, consecutive parts.
        slot, size = self.plan.locate_slots(positions)
        taken: NDArray[np.bool_] = (slot >= self.first * size // self.world) & (slot < self.last * size // self.world)
        return taken


@final
@dataclass(frozen=True, slots=True)
class ReadForecast:
    """The positions to come.

    Args:
        position: the next one.
        samples: size of the data set.
        order: None is index order, repeated.
        slots: the positions that this host takes; None takes all.
    """

    position: int
    samples: int
    order: Order | None = None
    slots: HostSlots | None = None

    def find_next_use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first position at which this host needs each sample; NEVER if no coming epoch has one."""
        uses = np.full(len(ids), NEVER)
        first = self.position // self.samples
        # A host that reads everything needs every sample in the next epoch, so two epochs suffice.
        for epoch in range(first, first + (2 if self.slots is None else _EPOCHS)):
            # Epoch by epoch, only for samples without a use so far.
            unknown = np.flatnonzero(uses == NEVER)
            if not unknown.size:
                break
            some = ids[unknown]
            at = self.order.find_positions(epoch, some) if self.order else epoch * self.samples + some
            needed = at >= self.position
            if self.slots is not None:
                needed &= self.slots.find_taken(at)
            uses[unknown[needed]] = at[needed]
        return uses

    def find_eviction_start(self, ids: NDArray[np.int64]) -> int:
        """Returns the position from which the next use of a record must be, for it to be evicted for these samples.

        `ids` are about to be used. It is the end of the first epoch in which one of them is needed again, or NEVER.
        """
        used = self.find_next_use(ids)
        coming = used[used < NEVER]
        if not coming.size:
            return NEVER
        # The use after the coming one decides, since the coming one happens in any case.
        later = replace(self, position=(int(coming.max()) // self.samples + 1) * self.samples)
        again = int(later.find_next_use(ids).min())
        return NEVER if again == NEVER else (again // self.samples + 1) * self.samples
