"""Applies an operation to a few images at a time, so that a CPU finds its intermediate results in the L2 cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

CPU_BLOCK_VALUES = 1 << 17
"""Values of a block on a CPU: as int32, half a MiB. A larger image is a block of its own."""
DEVICE_BLOCK_VALUES = 1 << 30
"""Values of a block on another device: an int32 counts them."""


def apply_in_blocks(images: torch.Tensor, operation: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
    """Returns `operation(images[block], block)` of all blocks of the batch, in one tensor like `images` [b, ...].

    `operation` is given a part of the images and its place in the batch, and returns a tensor of the part's shape.
    """
    b = len(images)
    values = CPU_BLOCK_VALUES if images.device.type == "cpu" else DEVICE_BLOCK_VALUES
    size = max(1, values // max(1, images[:1].numel()))
    if b <= size:
        return operation(images, slice(0, b))
    output = torch.empty_like(images, memory_format=torch.contiguous_format)
    for low in range(0, b, size):
        block = slice(low, min(b, low + size))
        output[block] = operation(images[block], block)
    return output
