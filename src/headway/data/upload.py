"""Small host arrays to the device, without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of a numpy array on a device; to a GPU through pinned memory, as a copy from elsewhere waits.

    On a CPU the tensor shares the array's memory where it can.
    """
    # Torch warns of arrays that cannot be written to; a broadcast one of a single image is such.
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
