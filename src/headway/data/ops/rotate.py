"""Rotation with bilinear interpolation, in fixed point, so that all devices give the same bytes."""

from __future__ import annotations

import numpy as np
import torch

from headway.data.crops import Float64
from headway.data.ops.blocks import apply_in_blocks
from headway.data.ops.move import arange_like, build_rotation_matrices
from headway.data.upload import to_device

Pair = tuple[torch.Tensor, torch.Tensor]

# Three bytes lie in one int64, in lanes of 21 bits, and are blended together. So many bits are needed: 8 of a byte, 8
# of the second weight, and 5 that are kept of the first one.
LANES, LANE_BITS, KEPT_BITS = 3, 21, 5


def rotate(images: torch.Tensor, angles: Float64, fill: torch.Tensor | None) -> torch.Tensor:
    """Rotates each image counter-clockwise around its centre, with bilinear interpolation.

    Args:
        images: [b, H, W, C], any type, with sides up to 8,192 pixels.
        angles: degrees, [b]; 0 changes nothing.
        fill: [C], same type and device as `images`: colour of pixels from outside the image; None: the image is
            reflected at its border.

    Returns:
        a new tensor of the shape and type of `images`. On bytes it differs from Pillow's by 2 at most, up to sides of
        512 pixels.
    """
    rotated = images.clone()
    # Computed on the host: no time is spent on images that stay as they are, and nothing waits for the device.
    indices = np.flatnonzero(angles)
    if indices.size:
        device_indices = to_device(indices, images.device)
        group, group_angles = images.index_select(0, device_indices), angles[indices]
        turned = apply_in_blocks(group, lambda part, block: _rotate_block(part, group_angles[block], fill))
        rotated.index_copy_(0, device_indices, turned)
    return rotated


def _rotate_block(images: torch.Tensor, angles: Float64, fill: torch.Tensor | None) -> torch.Tensor:
    b, height, width, channels = images.shape
    column, row = _find_sources(images, angles)
    # The four pixels around each source, by 1/256 of a pixel: 8 bits for the weight, the rest is the index.
    columns = [_move_inside((column >> 8) + step, width, fill is None) for step in (0, 1)]
    starts = arange_like(b, images)[:, None, None] * (height * width)
    rows = [_move_inside((row >> 8) + step, height, fill is None) * width + starts for step in (0, 1)]
    indices = [[start + column for column in columns] for start in rows]
    weights = column & 255, row & 255
    # A source within half a pixel of the border is still inside, as for Pillow: there the border is continued.
    is_inside = None
    if fill is not None:
        is_inside = (column >= -128) & (column < 256 * width - 128) & (row >= -128) & (row < 256 * height - 128)
    if images.dtype != torch.uint8:
        return _blend_floats(images, indices, weights, is_inside, fill)
    parts = []
    for low in range(0, channels, LANES):
        part = images[..., low : low + LANES]
        blended = _blend_lanes(_pack(part), indices, weights)
        if is_inside is not None and fill is not None:
            # The fill as a blend of itself.
            blended = torch.where(is_inside, blended, _pack(fill[low : low + LANES]) << (LANE_BITS - 8))
        parts.append(_unpack(blended, part.shape[3]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


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


def _move_inside(index: torch.Tensor, size: int, reflects: bool) -> torch.Tensor:
    """Moves indices into the image: to its border, or by reflection that does not repeat the outermost pixel."""
    if not reflects:
        return index.clamp(0, size - 1)
    # A narrow image that is turned upright may be reflected several times.
    return size - 1 - (index.remainder(max(1, 2 * (size - 1))) - (size - 1)).abs()


def _blend_lanes(packed: torch.Tensor, indices: list[list[torch.Tensor]], weights: Pair) -> torch.Tensor:
    """Returns bilinear blends of packed pixels, in each lane with 13 bits after the point; int64 [b, H, W]."""
    column_weight, row_weight = (weight.long() for weight in weights)
    pixels = packed.view(-1)
    kept = sum(((1 << (8 + KEPT_BITS)) - 1) << (LANE_BITS * lane) for lane in range(LANES))
    lines = []
    for pair in indices:
        left, right = (pixels.index_select(0, index.view(-1)).view(index.shape) for index in pair)
        # A difference may borrow from the next lane; the sum gives it back.
        line = (left << 8) + (right - left) * column_weight
        lines.append((line >> (8 - KEPT_BITS)) & kept)
    upper, lower = lines
    return (upper << 8) + (lower - upper) * row_weight


def _pack(pixels: torch.Tensor) -> torch.Tensor:
    """Puts up to three bytes [..., C] into the lanes of one int64 [...]."""
    packed = pixels[..., 0].long()
    for lane in range(1, pixels.shape[-1]):
        packed |= pixels[..., lane].long() << (LANE_BITS * lane)
    return packed


def _unpack(blended: torch.Tensor, channels: int) -> torch.Tensor:
    """Rounds lanes of 13 bits after the point to bytes; [..., C]."""
    # Half, and the mean of the bits that the first blend dropped.
    half = (1 << (LANE_BITS - 9)) + 112
    lanes = blended + sum(half << (LANE_BITS * lane) for lane in range(LANES))
    # A conversion to a byte keeps the lowest 8 bits.
    shifts = (LANE_BITS * lane + LANE_BITS - 8 for lane in range(channels))
    return torch.stack([(lanes >> shift).to(torch.uint8) for shift in shifts], dim=-1)


def _blend_floats(
    images: torch.Tensor,
    indices: list[list[torch.Tensor]],
    weights: Pair,
    is_inside: torch.Tensor | None,
    fill: torch.Tensor | None,
) -> torch.Tensor:
    column_weight, row_weight = (weight[..., None] / 256 for weight in weights)
    pixels = images.reshape(-1, images.shape[3])
    lines = []
    for pair in indices:
        left, right = (pixels.index_select(0, index.view(-1)).view(images.shape) for index in pair)
        lines.append(left + (right - left) * column_weight)
    blended = (lines[0] + (lines[1] - lines[0]) * row_weight).to(images.dtype)
    return blended if is_inside is None or fill is None else torch.where(is_inside[..., None], blended, fill)
