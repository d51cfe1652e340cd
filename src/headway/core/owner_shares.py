"""Division of whole tensors over owners."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_largest_first(sizes: Sequence[float], owners: int) -> list[int]:
    """Returns the owner of each tensor, such that the shares are about equal.

    The largest tensor goes first, always to the owner with the least so far: longest processing time first, at most 4/3
    of the optimum (Graham 1969, doi:10.1137/0117039). Of equal tensors the first goes first.
    """
    chosen = [0] * len(sizes)
    loads = [(0.0, owner) for owner in range(owners)]
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        load, owner = loads[0]
        chosen[index] = owner
        heapq.heapreplace(loads, (load + sizes[index], owner))
    return chosen
