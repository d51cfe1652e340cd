"""Brightness, contrast, saturation, sharpness and hue; all but hue blend an image with another one made from it.

The blends are torchvision's: f x image + (1 - f) x other, clipped to [0, 255]; on bytes, the fraction is dropped.
The other image is black, the mean gray, the gray image, or the smoothed one. A factor of 1 changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.crops import Float64
from headway.data.ops.blocks import apply_in_blocks
from headway.data.upload import to_device


def adjust_brightness(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Returns images [b, H, W, C] with brightness scaled by factors [b]; 0 is black."""
    image_weight, _ = _make_weights(factors, images)
    return _to_pixels(images * image_weight, images.dtype)


def adjust_contrast(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Returns images [b, H, W, C] with contrast scaled by factors [b]; 0 is the mean of the gray image everywhere."""
    gray = convert_to_gray(images)
    num_pixels = gray.shape[1] * gray.shape[2]
    # A float sum depends on the order of additions, and so on the device.
    exact_dtype = torch.int64 if images.dtype == torch.uint8 else torch.float32
    mean = gray.sum(dim=(1, 2, 3), keepdim=True, dtype=exact_dtype).float() / num_pixels
    return _blend(images, mean, factors)


def adjust_saturation(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Returns images [b, H, W, C] with saturation scaled by factors [b]; 0 is gray. One channel does not change."""
    return images.clone() if images.shape[3] == 1 else _blend(images, convert_to_gray(images), factors)


def adjust_sharpness(images: torch.Tensor, factors: Float64) -> torch.Tensor:
    """Returns images [b, H, W, C] with sharpness scaled by factors [b]; 0 is smoothed, above 1 is sharper.

    Pixels at the border do not change. An image of fewer than 3 rows or columns is all border.
    """
    if min(images.shape[1:3]) < 3:
        return images.clone()
    is_integer = images.dtype == torch.uint8
    # The 3 x 3 kernel counts neighbours once and the pixel itself 5 times: at most 13 x 255, which int16 holds.
    wide_images = images.to(torch.int16) if is_integer else images
    row_sums = wide_images[:, :-2] + wide_images[:, 1:-1] + wide_images[:, 2:]
    kernel_sums = row_sums[:, :, :-2] + row_sums[:, :, 1:-1] + row_sums[:, :, 2:] + 4 * wide_images[:, 1:-1, 1:-1]
    smoothed = kernel_sums / 13
    image_weight, smoothed_weight = _make_weights(factors, images)
    blended = images[:, 1:-1, 1:-1] * image_weight + (smoothed.round() if is_integer else smoothed) * smoothed_weight
    sharpened = images.clone()
    sharpened[:, 1:-1, 1:-1] = _to_pixels(blended, images.dtype)
    return sharpened


def shift_hue(images: torch.Tensor, shifts: Float64) -> torch.Tensor:
    """Returns images [b, H, W, C] with the hue shifted by shifts [b], in turns of the wheel: 1/3 turns red green.

    Value and saturation (HSV) stay. A shift is -1/2 to 1/2; one channel does not change.

    torchvision rounds hue, saturation and value to bytes on the way; this does not, so a shift of 0 changes nothing.
    """
    if images.shape[3] == 1:
        return images.clone()
    is_integer = images.dtype == torch.uint8
    # Bytes are computed in 1/4096.
    sixths = np.rint(shifts * 6 * 4096).astype(np.int32) if is_integer else (shifts * 6).astype(np.float32)
    device_sixths = to_device(sixths, images.device)[:, None, None]
    return apply_in_blocks(images, lambda part, block: _shift_block(part, device_sixths[block]))


def _shift_block(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    # Hue counted in sixths of a turn and multiplied by the chroma is a whole number for bytes, so nothing is divided,
    # and all devices agree.
    is_integer = images.dtype == torch.uint8
    unit = 4096 if is_integer else 1
    # One contiguous plane for each channel: strided ones take three times as long.
    planes = images.permute(3, 0, 1, 2).contiguous()
    red, green, blue = planes.to(torch.int32 if is_integer else images.dtype)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # The hue lies between -1 and 5: red is 0, green 2, blue 4.
    green_or_blue = torch.where(value == green, 2 * chroma + blue - red, 4 * chroma + red - green)
    hue = torch.where(value == red, green - blue, green_or_blue) * unit + shift * chroma
    channels = []
    for offset in (-3, 1, -1):
        # A channel loses the more, up to the chroma, the nearer the hue lies to the opposite side of the wheel. The
        # distance is that on a circle of 6: it is at most 9 before it is folded.
        distance = (hue + offset * unit * chroma).abs()
        distance = torch.minimum(distance, (6 * unit * chroma - distance).abs())
        loss = torch.minimum((2 * unit * chroma - distance).clamp_(min=0), unit * chroma)
        channels.append(value - ((loss + unit // 2) >> 12 if is_integer else loss))
    return torch.stack([channel.to(images.dtype) for channel in channels], dim=3)


def convert_to_gray(images: torch.Tensor) -> torch.Tensor:
    """Converts images [b, H, W, 3] to 0.2989 R + 0.587 G + 0.114 B, [b, H, W, 1]; on bytes, the fraction is dropped.

    Images of one channel are returned unchanged.
    """
    if images.shape[3] == 1:
        return images
    # In units of 1/10,000 every sum of bytes is a whole number below 2^24, which float32 holds exactly, and its product
    # with float32's 1e-4 falls on the right side of every whole number. So all devices agree.
    red, green, blue = images.unbind(3)
    weighted_sum = red * 2989.0 + green * 5870.0 + blue * 1140.0
    return (weighted_sum * 1e-4).to(images.dtype).unsqueeze(3)


def _blend(images: torch.Tensor, other: torch.Tensor, factors: Float64) -> torch.Tensor:
    image_weight, other_weight = _make_weights(factors, images)
    # Products and sum are separate operations: a GPU contracts a fused one and rounds differently than a CPU.
    return _to_pixels((images * image_weight).add_(other * other_weight), images.dtype)


def _make_weights(factors: NDArray[np.float64], images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns f and 1 - f on the images' device, each float32 [b, 1, 1, 1]."""
    weights = np.stack([factors, 1.0 - factors], axis=1).astype(np.float32)
    image_weight, other_weight = to_device(weights, images.device)[:, :, None, None, None].unbind(1)
    return image_weight, other_weight


def _to_pixels(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.clamp_(0, 255).to(dtype)
