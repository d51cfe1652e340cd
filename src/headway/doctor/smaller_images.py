"""Chooses smaller sizes of images, for the batch and for the disk, and shrinks batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headway.data.batch import Batch
from headway.data.data_recipe import CropRecipe
from headway.data.dataset import Dataset

# Smallest side that is reduced; factor of the reduction; the new side is a multiple of STEP.
SMALLEST, SMALLER, STEP = 96, 0.87, 32
# The side of stored images is rounded up to a multiple of this.
ROUND = 32
# Side of stored images divided by the side of a random crop: 256 for 224, as is usual.
MARGIN = 8 / 7
# Stored images this many times larger than needed are worth reducing.
LARGER = 1.25
# Samples whose median size stands for all.
LOOKED_AT = 4096


def choose_smaller_side(side: int) -> int | None:
    """Returns a smaller side: about SMALLER times as large, a multiple of STEP; None: the side is too small."""
    if side < SMALLEST:
        return None
    return min(STEP * round(SMALLER * side / STEP), STEP * ((side - 1) // STEP))


def choose_stored_side(dataset: Dataset, size: tuple[int, int], crop: CropRecipe) -> int | None:
    """Returns the shorter side that stored images need for a batch of this size; None: they are not much larger now."""
    needed = max(size) * (MARGIN if crop.is_random else 1 / crop.share)
    side = ROUND * -(-int(np.ceil(needed - 1e-6)) // ROUND)
    return side if measure_shorter_side(dataset) >= LARGER * side else None


def measure_shorter_side(dataset: Dataset) -> float:
    """Returns the median of the images' shorter sides."""
    return float(np.median(np.minimum(dataset.width[:LOOKED_AT], dataset.height[:LOOKED_AT])))


def shrink_batch(batch: Batch, side: int) -> Batch:
    """Resizes a batch by nearest neighbour: the time of a step does not depend on the content of its images."""
    height, width = batch.images.shape[1:3]
    images = batch.images
    rows, columns = (torch.arange(side, device=images.device) * length // side for length in (height, width))
    return replace(batch, images=images[:, rows][:, :, columns].contiguous())
