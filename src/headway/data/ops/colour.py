"""Brightness, contrast, saturation and sharpness: each blends an image with another one made from it.

The formulas are torchvision's: f x image + (1 - f) x other, clipped to [0, 255]; on bytes, the fraction is dropped.
The other image is black, the mean gray, the gray image, or the smoothed one. A factor of 1 changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.crops import Float64
from headway.data.upload import to_device


def adjust_brightness(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Scales the brightness of images [b, H, W, C] by factors [b]; 0 is black."""
    own, _ = _make_weights(factors, images)
    return _to_pixels(images * own, images.dtype)


def adjust_contrast(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Scales the contrast of images [b, H, W, C] by factors [b]; 0 is the gray image's mean everywhere."""
    plain = convert_to_gray(images)
    pixels = plain.shape[1] * plain.shape[2]
    # A float sum depends on the order of additions, and so on the device.
    exact = torch.int64 if images.dtype == torch.uint8 else torch.float32
    mean = plain.sum(dim=(1, 2, 3), keepdim=True, dtype=exact).float() / pixels
    return _blend(images, mean, factors)


def adjust_saturation(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Scales the saturation of images [b, H, W, C] by factors [b]; 0 is gray. Gray images stay as they are."""
    return images.clone() if images.shape[3] == 1 else _blend(images, convert_to_gray(images), factors)


def adjust_sharpness(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Changes the sharpness of images [b, H, W, C] by factors [b]; 0 is smooth, above 1 is sharper.

    Pixels at the border stay as they are. An image of fewer than 3 rows or columns is all border.
    """
    if min(images.shape[1:3]) < 3:
        return images.clone()
    whole = images.dtype == torch.uint8
    # The 3 x 3 kernel counts neighbours once and the pixel itself 5 times: at most 13 x 255, which int16 holds.
    wide = images.to(torch.int16) if whole else images
    rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    smooth = total / 13
    own, rest = _make_weights(factors, images)
    inner = images[:, 1:-1, 1:-1] * own + (smooth.round() if whole else smooth) * rest
    out = images.clone()
    out[:, 1:-1, 1:-1] = _to_pixels(inner, images.dtype)
    return out


def convert_to_gray(images: torch.Tensor) -> torch.Tensor:
    """Converts images [b, H, W, 3] to 0.2989 R + 0.587 G + 0.114 B, [b, H, W, 1]; on bytes, the fraction is dropped.

    Images of one channel come back as they are.
    """
    if images.shape[3] == 1:
        return images
    # In units of 1/10,000 every sum of bytes is a whole number below 2^24, which float32 holds exactly, and its product
    # with float32's 1e-4 falls on the right side of every whole number. So all devices agree.
    red, green, blue = images.unbind(3)
    total = red * 2989.0 + green * 5870.0 + blue * 1140.0
    return (total * 1e-4).to(images.dtype).unsqueeze(3)


def _blend(images: torch.Tensor, other: torch.Tensor, factors: Float64) -> torch.Tensor:
    own, rest = _make_weights(factors, images)
    # Products and sum are separate operations: a GPU contracts a fused one and rounds differently than a CPU.
    return _to_pixels((images * own).add_(other * rest), images.dtype)


def _make_weights(factors: NDArray[np.float64], images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies (f, 1 - f) to the images' device as float32 [b, 1, 1, 1] each."""
    both = np.stack([factors, 1.0 - factors], axis=1).astype(np.float32)
    own, rest = to_device(both, images.device)[:, :, None, None, None].unbind(1)
    return own, rest


def _to_pixels(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.clamp_(0, 255).to(dtype)
