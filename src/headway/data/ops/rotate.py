"""Rotation with bilinear interpolation, in fixed point, so that all devices give the same bytes."""

from __future__ import annotations

import numpy as np
import torch

from headway.data.crops import Float64
from headway.data.ops.move import arange_like, build_rotation_matrices, gather_pixels
from headway.data.upload import to_device

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(images: torch.Tensor, angles: Float64, fill: torch.Tensor | None) -> torch.Tensor:
    """Rotates each image counter-clockwise around its centre, with bilinear interpolation.

    Args:
        images: [b, H, W, C], any type, with sides up to 8,192 pixels.
        angles: degrees, [b]; 0 changes nothing.
        fill: [C], same type and device as `images`: colour of pixels from outside the image; None: the image is
            reflected at its border.

    Returns:
        a new tensor of the shape and type of `images`. On bytes it differs from Pillow's by 2 at most, up
        to sides of 512 pixels.
    """
    rotated = images.clone()
    # Computed on the host: no time is spent on images that stay as they are, and nothing waits for the device.
    indices = np.flatnonzero(angles)
    if indices.size:
        device_indices = to_device(indices, images.device)
        group = images.index_select(0, device_indices)
        rotated.index_copy_(0, device_indices, _rotate_all(group, angles[indices], fill))
    return rotated


def _rotate_all(images: torch.Tensor, angles: Float64, fill: torch.Tensor | None) -> torch.Tensor:
    _, height, width, _ = images.shape
    column, row = _find_sources(images, angles)
    # The four pixels around each source, by 1/256 of a pixel: 8 bits for the weight, the rest is the index.
    (column_index, column_weight), (row_index, row_weight) = _split(column), _split(row)
    columns = _move_inside(column_index, width, fill is None), _move_inside(column_index + 1, width, fill is None)
    rows = _move_inside(row_index, height, fill is None), _move_inside(row_index + 1, height, fill is None)
    indices = [[y * width + x for x in columns] for y in rows]
    if fill is not None:
        # A source within half a pixel of the border is still inside, as for Pillow: there the border is continued.
        is_inside = (column >= -128) & (column < 256 * width - 128) & (row >= -128) & (row < 256 * height - 128)
        indices = [[torch.where(is_inside, index, -1) for index in pair] for pair in indices]
    upper, lower = (_blend([gather_pixels(images, index, fill) for index in pair], column_weight) for pair in indices)
    blended = _blend([upper, lower], row_weight)
    if images.dtype == torch.uint8:
        return ((blended + (1 << 15)) >> 16).to(torch.uint8)
    return (blended / (1 << 16)).to(images.dtype)


def _find_sources(images: torch.Tensor, angles: Float64) -> Pair:
    """Returns the column and the row from which each pixel comes, in 1/256 of a pixel; int32 [b, H, W]."""
    _, height, width, _ = images.shape
    a, b, c, d, e, f = build_rotation_matrices(angles, (height, width)).T
    # As many bits after the point as an int32 has room for: an error of a or b counts once for each pixel of a side.
    bits = 20 if max(height, width) <= 512 else 16
    # From the centre of a pixel to that of another one; 2^-9 rounds to 1/256.
    offsets = c + (a + b - 1) / 2 + 2**-9, f + (d + e - 1) / 2 + 2**-9
    fixed_point = np.rint(np.stack([a, b, offsets[0], d, e, offsets[1]]) * 2**bits).astype(np.int32)
    a, b, c, d, e, f = to_device(fixed_point, images.device)[:, :, None, None].unbind(0)
    x, y = arange_like(width, images), arange_like(height, images)[:, None]
    return (a * x + (b * y + c)) >> (bits - 8), (d * x + (e * y + f)) >> (bits - 8)


def _split(position: torch.Tensor) -> Pair:
    """Splits positions in 1/256 into the pixel and the weight of the next pixel, 0 to 255."""
    return position >> 8, position & 255


def _move_inside(index: torch.Tensor, size: int, reflects: bool) -> torch.Tensor:
    """Moves indices into the image: to its border, or by reflection that does not repeat the outermost pixel."""
    if not reflects:
        return index.clamp(0, size - 1)
    # A narrow image that is turned upright may be reflected several times.
    return size - 1 - (index.remainder(max(1, 2 * (size - 1))) - (size - 1)).abs()


def _blend(pair: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Returns 256 times the blend of two images, in int32 for bytes."""
    first, second = (image.int() if image.dtype == torch.uint8 else image for image in pair)
    weight = weight[..., None]
    return first * (256 - weight) + second * weight
