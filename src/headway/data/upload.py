"""Copies small host arrays to the device without a host-device sync."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies a numpy array to a device as a tensor. On a CPU the tensor shares the array's memory if it can."""
    # torch warns about read-only arrays, such as broadcast ones.
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    # From pageable memory the copy would block the host, even with non_blocking.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
