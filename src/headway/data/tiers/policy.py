"""When a sample is needed next, which the Order knows: so what is needed latest is taken away first (Belady 1966, "A
study of replacement algorithms for a virtual-storage computer")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.data.order import Order

NEVER = np.iinfo(np.int64).max
_EPOCHS = 8
"""So far ahead is looked where other hosts take a part of every epoch; what comes later is as good as never."""


class Slots(NamedTuple):
    """Slots [low, high) of every step of `batch` positions: those that the ranks of this host take."""

    low: int
    high: int
    batch: int


def next_use(
    ids: NDArray[np.int64], *, position: int, samples: int, order: Order | None, slots: Slots | None = None
) -> NDArray[np.int64]:
    """The first position from `position` on at which this host needs each sample.

    Args:
        ids: int64 [k].
        samples: size of the data set.
        order: None: index order, again and again.
        slots: None: this host takes all positions.

    Returns:
        int64 [k]; NEVER where it is not needed within the next epochs.
    """
    found = np.full(len(ids), NEVER)
    first = position // samples
    for epoch in range(first, first + (2 if slots is None else _EPOCHS)):
        unknown = np.flatnonzero(found == NEVER)
        if not unknown.size:
            break
        at = order.position_of(epoch, ids[unknown]) if order else epoch * samples + ids[unknown]
        needed = at >= position
        if slots is not None:
            slot = at % slots.batch
            needed &= (slot >= slots.low) & (slot < slots.high)
        found[unknown[needed]] = at[needed]
    return found
