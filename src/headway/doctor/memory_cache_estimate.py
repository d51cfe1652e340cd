"""Estimates the loader's rate with the decoded set in memory, without decoding it: noise of the same size stands in."""

from __future__ import annotations

import numpy as np
import torch

from headway.core.free_memory import read_free_memory_bytes
from headway.data.columns import FLAG_RAW
from headway.data.order import Order
from headway.data.tiers.memory import MemoryTier
from headway.doctor.loader_measurement import LoaderMeasurement, measure_loader
from headway.doctor.measurement_job import MeasurementJob

# Share of the free memory that a set may need to be offered a place there.
SHARE = 0.5
# Noise images, repeated: copying and resizing take as long for any content.
NOISE = 64
# Positions that get pixels; the others are never asked for.
LOOKED_AT = 16_384


def fits_in_memory(job: MeasurementJob) -> bool:
    """Returns True if the decoded set fits in host memory."""
    train = job.setup.inputs.train
    if train is None or train.pixel_bytes is None or job.setup.recipe.data.scaled:
        return False
    return train.pixel_bytes <= SHARE * read_free_memory_bytes()


def fits_on_device(job: MeasurementJob) -> bool:
    """Returns True if the decoded set fits in device memory, if batches are gathered from whole images there."""
    inputs, recipe = job.setup.inputs, job.setup.recipe
    train = inputs.train
    if train is None or train.pixel_bytes is None or recipe.data.scaled:
        return False
    if not inputs.build_training_loader(train, recipe).uses_stored_pixels():
        return False
    return train.pixel_bytes <= SHARE * torch.cuda.mem_get_info(job.setup.device)[0]


def measure_memory_loader(job: MeasurementJob, *, limit_s: float) -> LoaderMeasurement:
    """Measures the loader over a set in memory in which only the samples that are read have pixels."""
    train, recipe = job.setup.inputs.train, job.setup.recipe
    assert train is not None
    assert train.description.common_size is not None
    width, height = train.description.common_size
    # The kernel hands out pages at the first write, so only the positions below need memory.
    pixels = np.empty((len(train), height, width, train.description.channels), np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (NOISE, *pixels.shape[1:]), np.uint8)
    batches = max(2, min(LOOKED_AT, 4 * len(train)) // job.batch)
    ids = Order(len(train), recipe.seed, recipe.data.window)(
        np.arange((batches + recipe.data.prefetch_batches + 1) * job.batch)
    )[1]
    for low in range(0, len(ids), NOISE):
        some = ids[low : low + NOISE]
        pixels[some] = noise[: len(some)]
    tier = MemoryTier(train, "memory, as it would be", pixels, None)
    tier.flags = np.full(len(train), FLAG_RAW, np.uint8)
    tier.damaged = np.zeros(len(train), np.uint8)
    # Median of three runs after one warm-up run.
    runs = [measure_loader(job, limit_s=limit_s / 3, batches=batches, tier=tier, verify="never") for _ in range(4)]
    return sorted(runs[1:], key=lambda one: one.rate.value)[1]
