"""The copy of a batch to the device: nothing on a CPU, and the rate of the bus on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.data.batch import Batch
from headway.doctor.device_copy import measure_copy


def batch(samples: int, side: int) -> Batch:
    places = np.arange(samples)
    images = torch.zeros(samples, side, side, 3, dtype=torch.uint8)
    labels = torch.zeros(samples, dtype=torch.int64)
    return Batch(images=images, labels=labels, positions=places, epochs=places, samples=places, served=places, seed=0)


def test_on_a_cpu_nothing_is_copied() -> None:
    assert measure_copy(batch(4, 8), torch.device("cpu"), limit_s=1.0) is None


@pytest.mark.gpu
def test_on_a_gpu_larger_images_take_longer_and_no_bus_is_faster_than_there_is() -> None:
    device = torch.device("cuda")
    found = {side: measure_copy(batch(256, side), device, limit_s=1.0) for side in (64, 256)}
    small, large = found[64], found[256]
    assert small is not None
    assert large is not None
    assert 2 < large / small < 32  # 16 times the bytes, and what a copy takes of any size
    assert 1e8 < 256 * 256 * 3 / large < 1e12
