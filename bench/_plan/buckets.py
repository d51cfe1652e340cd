"""Buckets of a network of which only the gradients' bytes are known."""

from __future__ import annotations

from headway.plan.step import PlannedBucket

# A small first one, so that the exchange begins early, as in PyTorch's DDP.
FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


def make_even_buckets(nbytes: float, *, each: float = BUCKET_BYTES, first: float = FIRST_BYTES) -> list[PlannedBucket]:
    """Make buckets for a network of which only the gradients' bytes are known: backward produces them evenly."""
    found, made = list[PlannedBucket](), 0.0
    while made < nbytes:
        part = min(each if found else first, nbytes - made)
        made += part
        found.append(PlannedBucket(part, made / nbytes))
    return found
