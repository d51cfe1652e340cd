"""Posterize, solarize, autocontrast and equalize: each byte is mapped to another one, without its neighbours.

The formulas are torchvision's, which follow Pillow's ImageOps. Images are uint8 [b, H, W, C].
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.upload import to_device


def posterize(images: torch.Tensor, bits: NDArray[np.int64]) -> torch.Tensor:
    """Keeps the `bits` highest bits (0 to 8, [b]) of each byte, and clears the others."""
    mask = (256 - (1 << (8 - bits))).astype(np.uint8)
    return images & _upload_per_sample(mask, images)


def solarize(images: torch.Tensor, thresholds: NDArray[np.float64]) -> torch.Tensor:
    """Inverts the bytes at or above the sample's threshold (0 to 255, [b])."""
    # Bytes are compared as integers: byte >= t is byte >= ceil(t).
    rounded_thresholds = np.ceil(thresholds).astype(np.uint8)
    return torch.where(images >= _upload_per_sample(rounded_thresholds, images), 255 - images, images)


def autocontrast(images: torch.Tensor) -> torch.Tensor:
    """Stretches each channel to 0..255; a channel of a single value does not change."""
    low, high = images.amin(dim=(1, 2)).int()[:, None], images.amax(dim=(1, 2)).int()[:, None]
    identity = torch.arange(256, dtype=torch.int32, device=images.device)[:, None]
    # Integer division: a float quotient may lose 1 at the top.
    tables = (identity - low) * 255 // (high - low).clamp(min=1)
    return _apply_tables(images, torch.where(low == high, identity, tables.clamp_(0, 255)).to(torch.uint8))


def equalize(images: torch.Tensor) -> torch.Tensor:
    """Maps the values of each channel so that its histogram is as even as possible."""
    b, height, width, channels = images.shape
    index = images.reshape(b, height * width, channels).long()
    count = torch.zeros(b, 256, channels, dtype=torch.int32, device=images.device)
    count.scatter_add_(1, index, count.new_ones(()).expand_as(index))
    # Pillow leaves the count of the largest value out of the step between two levels.
    largest = images.amax(dim=(1, 2)).long()[:, None]
    step = (height * width - count.gather(1, largest)) // 255
    below = count.cumsum(dim=1) - count
    tables = (below + step // 2) // step.clamp(min=1)
    identity = torch.arange(256, device=images.device)[:, None]
    return _apply_tables(images, torch.where(step == 0, identity, tables.clamp_(max=255)).to(torch.uint8))


def _apply_tables(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Maps each byte by the table of its sample and channel; tables uint8 [b, 256, C]."""
    b, height, width, channels = images.shape
    return tables.gather(1, images.reshape(b, height * width, channels).long()).view(images.shape)


def _upload_per_sample(values: NDArray[np.uint8], images: torch.Tensor) -> torch.Tensor:
    return to_device(values, images.device)[:, None, None, None]
