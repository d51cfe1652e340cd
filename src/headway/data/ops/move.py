"""Flip, translate and affine maps of the nearest pixel. Each is one gather of pixels for the whole batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data.upload import to_device


def flip_and_translate(
    images: torch.Tensor,
    flips: NDArray[np.bool_] | None = None,
    shifts: NDArray[np.int64] | None = None,
    vertical_flips: NDArray[np.bool_] | None = None,
) -> torch.Tensor:
    """Mirrors samples left to right and top to bottom, then moves each sample's window, with reflection padding.

    The result equals a crop of the image padded by reflection, without the padded copy.

    Args:
        images: [b, H, W, C], any type.
        flips: bool [b], samples to mirror left to right, from `headway.data.crops.draw_flips`; None: none.
        shifts: int [b, 2] (down, right), smaller than H and W, from `headway.data.crops.draw_shifts`; None: none.
        vertical_flips: bool [b], samples to mirror top to bottom, from `headway.data.crops.draw_flip_masks`; None:
            none.

    Returns:
        a new tensor with the shape and type of `images`.

    Raises:
        UsageError: a shift is no less than a side of the images.
    """
    b, height, width, _ = images.shape
    parameters = np.zeros((b, 4), np.int32)
    if flips is not None:
        parameters[:, 0] = flips
    if vertical_flips is not None:
        parameters[:, 1] = vertical_flips
    if shifts is not None:
        parameters[:, 2:] = shifts
        largest_shift = int(np.abs(shifts).max(initial=0))
        if largest_shift >= min(height, width):
            what = f"images of {height} x {width} pixels cannot be moved by {largest_shift}"
            raise UsageError(what, fix=f"Set shifts below {min(height, width)}.")
    # All parameters in one small copy to the device.
    flip, vertical_flip, down, right = to_device(parameters, images.device).unsqueeze(2).unbind(1)
    row = _reflect(arange_like(height, images) + down, height)
    row = torch.where(vertical_flip.bool(), height - 1 - row, row)
    column = _reflect(arange_like(width, images) + right, width)
    column = torch.where(flip.bool(), width - 1 - column, column)
    return gather_pixels(images, row[:, :, None] * width + column[:, None, :])


def warp(images: torch.Tensor, matrices: NDArray[np.float64], fill: torch.Tensor) -> torch.Tensor:
    """Applies affine maps: the pixel with centre (x, y) takes the pixel that holds (a x + b y + c, d x + e y + f).

    It takes the nearest pixel, like Pillow's `transform(size, AFFINE, (a, b, c, d, e, f))` and, by default,
    torchvision's policies.

    Args:
        images: [b, H, W, C], any type.
        matrices: float64 [b, 6]: a, b, c, d, e, f of each sample.
        fill: [C], same type and device as `images`: colour of pixels from outside the image.
    """
    _, height, width, _ = images.shape
    # Pillow's arithmetic: fixed point with 16 bits after the point, for sides up to 16,384. So every device gives
    # Pillow's pixels.
    a, b, c, d, e, f = matrices.T
    fixed_point = np.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2], axis=1) * 65536
    a, b, c, d, e, f = to_device(np.floor(fixed_point + 0.5).astype(np.int32), images.device)[:, :, None, None].unbind(
        1
    )
    x, y = arange_like(width, images), arange_like(height, images)[:, None]
    column, row = (a * x + (b * y + c)) >> 16, (d * x + (e * y + f)) >> 16
    is_inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return gather_pixels(images, torch.where(is_inside, row * width + column, -1), fill)


def build_rotation_matrices(angles: NDArray[np.float64], size: tuple[int, int] | torch.Size) -> NDArray[np.float64]:
    """Builds the matrices of counter-clockwise rotations around the centre, as `warp` takes them; float64 [b, 6].

    Args:
        angles: degrees, [b].
        size: (height, width) of the images.
    """
    # Turned around the centre (x, y): shift it to the origin, rotate, shift back.
    radians = np.deg2rad(angles)
    cosine, sine = np.cos(radians), np.sin(radians)
    y, x = size[0] / 2, size[1] / 2
    rows = [cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y]
    return np.stack(rows, axis=1)


def gather_pixels(images: torch.Tensor, pixel_index: torch.Tensor, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Returns images of the pixels with these indices in their sample, int32 [b, H, W]; index -1 gives `fill`."""
    b, height, width, channels = images.shape
    source = images.reshape(-1, channels)
    # int32 indices are faster; only a batch of more pixels than they count needs int64.
    if b * height * width >= 2**31:
        pixel_index = pixel_index.long()
    flat_index = pixel_index + torch.arange(b, dtype=pixel_index.dtype, device=images.device)[:, None, None] * (
        height * width
    )
    # The fill is one more pixel behind the last: a mask over the channels takes four times as long on a CPU.
    if fill is not None:
        flat_index = torch.where(pixel_index < 0, len(source), flat_index)
        source = torch.cat([source, fill[None]])
    return source.index_select(0, flat_index.reshape(-1)).view(images.shape)


def arange_like(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32, device=like.device)


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    return (size - 1 - (size - 1 - index).abs()).abs()
