"""Adasum: a sum of gradients that adds orthogonal parts and averages parallel ones (arXiv 2006.02924).

Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; more vectors go pairwise, in a binary tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.core.world import Group


def adasum_all_reduce(buffer: torch.Tensor, counts: Sequence[int], group: Group) -> None:
    """Combines a buffer over the ranks of a group, in place: each tensor in it by its own coefficients.

    In log2(N) steps two ranks swap their whole vectors; all ranks have the same bits afterwards.

    Args:
        buffer: floating point, flat, of any length.
        counts: elements of each tensor in the buffer.
        group: its size is a power of two.
    """
    distance = 1
    while distance < group.size:
        partner = group.rank ^ distance
        theirs = torch.empty_like(buffer)
        # Not send and receive: on NCCL two ranks that both send first would wait for each other.
        splits = [buffer.numel() if rank == partner else 0 for rank in range(group.size)]
        group.all_to_all(theirs, buffer, splits, splits).wait()
        lower, upper = (buffer, theirs) if group.rank < partner else (theirs, buffer)
        pieces = [whole.split(list(counts)) for whole in (lower, upper, buffer)]
        for a, b, out in zip(*pieces, strict=True):
            out.copy_(combine_pair(a, b))
        distance *= 2


def combine_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Combines two vectors; the coefficients and the sum are computed in float64."""
    # A zero vector is parallel to everything: its coefficient does not matter, but must be finite.
    wide_a, wide_b = a.double(), b.double()
    half = wide_a.dot(wide_b) / 2
    of_a, of_b = (torch.where(square > 0, half / square, 0) for square in (wide_a.dot(wide_a), wide_b.dot(wide_b)))
    return ((1 - of_a) * wide_a + (1 - of_b) * wide_b).to(a.dtype)
