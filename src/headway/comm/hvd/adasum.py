"""Adasum: a sum of gradients that adds orthogonal parts and averages parallel ones (arXiv 2006.02924).

Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; more vectors go pairwise, in a binary tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.core.group import Group


def adasum_all_reduce(buffer: torch.Tensor, counts: Sequence[int], group: Group) -> None:
    """Combines a buffer over the ranks of a group, in place: each tensor in it by its own coefficients.

    In log2(N) steps two ranks swap their whole vectors; all ranks have the same bits afterwards.

    Args:
        buffer: floating-point tensor, flat, of any length.
        counts: elements of each tensor in the buffer.
        group: group whose size is a power of two.
    """
    distance = 1
    while distance < group.size:
        partner = group.rank ^ distance
        partner_buffer = torch.empty_like(buffer)
        # Not send and receive: on NCCL two ranks that both send first would wait for each other.
        splits = [buffer.numel() if rank == partner else 0 for rank in range(group.size)]
        group.all_to_all(partner_buffer, buffer, splits, splits).wait()
        lower, upper = (buffer, partner_buffer) if group.rank < partner else (partner_buffer, buffer)
        tensors = [flat.split(list(counts)) for flat in (lower, upper, buffer)]
        for a, b, out in zip(*tensors, strict=True):
            out.copy_(combine_pair(a, b))
        distance *= 2


def combine_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the combination of two vectors; the coefficients and the sum are computed in float64."""
    a64, b64 = a.double(), b.double()
    half_dot = a64.dot(b64) / 2
    # A zero vector is parallel to everything: its coefficient does not matter, but must be finite.
    a_factor, b_factor = (1 - torch.where(square > 0, half_dot / square, 0) for square in (a64.dot(a64), b64.dot(b64)))
    return (a_factor * a64 + b_factor * b64).to(a.dtype)
