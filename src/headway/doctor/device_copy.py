"""What it takes to bring a batch to the device, where that is a GPU."""

from __future__ import annotations

import torch

from headway.data.batch import Batch
from headway.doctor.rate_measurement import build_window, measure_rate

SLOTS = 3
"""Of pinned memory, as the loader's ring has several: one alone would stay in the processor's cache."""


def measure_copy(batch: Batch, device: torch.device, *, limit_s: float) -> float | None:
    """Seconds of a sample: its images from pinned memory and its labels, on a stream of their own, as the loader brings
    them. None on a CPU, where nothing is copied.

    Of a set that lies on the device already nothing is copied in the run either: that is for the caller to know.

    Args:
        batch: of the run, wherever it lies. limit_s: as of `settled`.
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

    copy_batch()  # which sets the device's memory aside
    return 1 / measure_rate(build_window(copy_batch), limit_s=limit_s).value
