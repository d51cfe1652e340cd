"""Measures the host-to-device copy of a batch."""

from __future__ import annotations

import torch

from headway.data.batch import Batch
from headway.doctor.rate_measurement import build_window, measure_rate

# Pinned buffers in use, as many as the loader's ring has: a single one would stay in the processor's cache.
SLOTS = 3


def measure_copy(batch: Batch, device: torch.device, *, limit_s: float) -> float | None:
    """Returns the seconds per sample to copy images (from pinned memory) and labels on their own stream, as the loader
    does. None on a CPU, which needs no copy.

    A set that already lies on the device needs no copy either: the caller checks that.

    Args:
        batch: of the run, on any device. limit_s: see `measure_rate`.
    """
    if device.type != "cuda":
        return None
    images = [torch.empty(batch.images.shape, dtype=batch.images.dtype, pin_memory=True) for _ in range(SLOTS)]
    for one in images:
        one.copy_(batch.images)
    labels, stream, turn = batch.labels.cpu(), torch.cuda.Stream(device), 0

    def copy_batch() -> int:
        nonlocal turn
        turn += 1
        with torch.cuda.stream(stream):
            images[turn % SLOTS].to(device, non_blocking=True)
            labels.pin_memory().to(device, non_blocking=True)
        stream.synchronize()
        return len(labels)

    # The first copy allocates device memory.
    copy_batch()
    return 1 / measure_rate(build_window(copy_batch), limit_s=limit_s).value
