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

NO_NEXT_USE = np.iinfo(np.int64).max
_MAX_LOOKAHEAD_EPOCHS = 8
"""Epochs to look ahead if other hosts read a part of each; a later use counts as `NO_NEXT_USE`."""


class HostSlots(NamedTuple):
    """This host's slots of every step: those of ranks [first, last) of `world`."""

    plan: BatchPlan
    first: int
    last: int
    world: int

    def select_owned(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask of the positions that this host reads; bool, of the shape of `positions`."""
        # Ranks share the slots of a step in equal, consecutive parts.
        slots, step_slots = self.plan.locate_slots(positions)
        is_owned: NDArray[np.bool_] = (slots >= self.first * step_slots // self.world) & (
            slots < self.last * step_slots // self.world
        )
        return is_owned


@final
@dataclass(frozen=True, slots=True)
class ReadForecast:
    """The reads of this host from a position on.

    Args:
        position: the next position.
        samples: size of the data set.
        order: maps positions to samples; None is index order, repeated.
        slots: the positions that this host reads; None: all.
    """

    position: int
    samples: int
    order: Order | None = None
    slots: HostSlots | None = None

    def find_next_use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the next position at which this host reads each sample, or NO_NEXT_USE; int64 [k]."""
        next_use = np.full(len(ids), NO_NEXT_USE)
        first_epoch = self.position // self.samples
        # A host that reads everything needs every sample in the next epoch, so two epochs suffice.
        for epoch in range(first_epoch, first_epoch + (2 if self.slots is None else _MAX_LOOKAHEAD_EPOCHS)):
            # Epoch by epoch, only for samples without a use so far.
            unknown = np.flatnonzero(next_use == NO_NEXT_USE)
            if not unknown.size:
                break
            unknown_ids = ids[unknown]
            positions = (
                self.order.find_positions(epoch, unknown_ids) if self.order else epoch * self.samples + unknown_ids
            )
            is_needed = positions >= self.position
            if self.slots is not None:
                is_needed &= self.slots.select_owned(positions)
            next_use[unknown[is_needed]] = positions[is_needed]
        return next_use

    def find_eviction_start(self, ids: NDArray[np.int64]) -> int:
        """Returns the position from which on a record's next use must lie, so that it may be evicted for `ids`.

        The samples `ids` are about to be used. The position is the end of the first epoch in which one of them is
        needed again, or NO_NEXT_USE.
        """
        next_uses = self.find_next_use(ids)
        coming_uses = next_uses[next_uses < NO_NEXT_USE]
        if not coming_uses.size:
            return NO_NEXT_USE
        # The use after the coming one decides, since the coming one happens in any case.
        later = replace(self, position=(int(coming_uses.max()) // self.samples + 1) * self.samples)
        next_repeat = int(later.find_next_use(ids).min())
        return NO_NEXT_USE if next_repeat == NO_NEXT_USE else (next_repeat // self.samples + 1) * self.samples
