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


def assign_evenly(sizes: Sequence[Sequence[float]], owners: int) -> list[int]:
    """Returns the owner of each tensor, such that the shares of several sizes, such as bytes and work, are about equal.

    The tensor with the largest sum of shares goes first, always to the owner whose largest share stays smallest. With
    one kind of size this is `assign_largest_first`.

    Args:
        sizes: of each kind of size, that of every tensor.
    """
    totals = [sum(kind) or 1.0 for kind in sizes]
    tensors = list(zip(*sizes, strict=True))
    chosen = [0] * len(tensors)
    loads = [[0.0] * len(totals) for _ in range(owners)]

    def compute_largest(owner: int, tensor: Sequence[float]) -> float:
        added = zip(loads[owner], tensor, totals, strict=True)
        return max((load + size) / total for load, size, total in added)

    def sum_shares(tensor: Sequence[float]) -> float:
        return sum(size / total for size, total in zip(tensor, totals, strict=True))

    for index in sorted(range(len(tensors)), key=lambda one: -sum_shares(tensors[one])):
        tensor = tensors[index]
        owner = min(range(owners), key=lambda one: compute_largest(one, tensor))
        chosen[index] = owner
        loads[owner] = [load + size for load, size in zip(loads[owner], tensor, strict=True)]
    return chosen


def find_largest_share(sizes: Sequence[float], chosen: Sequence[int]) -> float:
    """Returns the share of all sizes that the owner with the most of them has; 0 if all sizes are 0.

    Args:
        chosen: the owner of each tensor.
    """
    loads: dict[int, float] = {}
    for size, owner in zip(sizes, chosen, strict=True):
        loads[owner] = loads.get(owner, 0.0) + size
    return max(loads.values(), default=0.0) / (sum(sizes) or 1.0)
