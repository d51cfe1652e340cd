"""Chooses a smaller image size to try, and shrinks batches to it."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.data.batch import Batch

# Smallest side that is reduced; factor of the reduction; the new side is a multiple of STEP.
SMALLEST, SMALLER, STEP = 96, 0.87, 32


def choose_smaller_side(side: int) -> int | None:
    """Returns a smaller side: about SMALLER times as large, a multiple of STEP; None: the side is too small."""
    if side < SMALLEST:
        return None
    return min(STEP * round(SMALLER * side / STEP), STEP * ((side - 1) // STEP))


def shrink_batch(batch: Batch, side: int) -> Batch:
    """Resizes a batch by nearest neighbour: the time of a step does not depend on the content of its images."""
    height, width = batch.images.shape[1:3]
    images = batch.images
    rows, columns = (torch.arange(side, device=images.device) * length // side for length in (height, width))
    return replace(batch, images=images[:, rows][:, :, columns].contiguous())
