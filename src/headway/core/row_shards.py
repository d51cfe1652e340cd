"""Rows of all weights on each of N ranks, as FSDP2 divides them: who has which, bytes at rest, at work and on links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.rows import Range


def get_rows(rows: int, rank: int, ranks: int) -> Range:
    """Returns the rows of a parameter that a rank has: equal numbers, but for the last ranks, which may have none."""
    each = -(-rows // ranks)
    return Range(min(rank * each, rows), min((rank + 1) * each, rows))


def find_row_share(shapes: Iterable[Sequence[int]], ranks: int) -> float:
    """Returns the share of parameters of these shapes for which each rank has room, from 1 / ranks to 1."""
    held = total = 0
    for rows, *others in shapes:
        row = 1
        for size in others:
            row *= size
        held += -(-rows // ranks) * row
        total += rows * row
    return held / total if total else 1.0


def count_sent_bytes(nbytes: float, ranks: int) -> float:
    """Counts the bytes that a rank sends in a step: weights twice, forward and backward, and gradients once.

    Args:
        nbytes: bytes of all weights, with gradients of the same type.
    """
    return 3 * (ranks - 1) / ranks * nbytes


def count_working_bytes(rest: float, largest_block: float) -> float:
    """Counts the bytes of whole weights and gradients on a rank, at the moment of a step in which there are most.

    Args:
        rest: bytes of the weights outside of all blocks, which stay whole for the forward and backward pass.
        largest_block: bytes of the block with the most weights.
    """
    # FSDP2 gathers weights into one array and copies them out of it; gradients are copied to be sent, and those of all
    # ranks come in beside the copy. Measured with 2 and 4 ranks, with and without blocks, and rounded up.
    return max(3.5 * rest + 2 * largest_block, 2 * rest + 4.5 * largest_block)
