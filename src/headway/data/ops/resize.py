"""Crop and resize of whole batches on the device, with the native core's arithmetic: the same bytes as on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.ops.blocks import CPU_BLOCK_VALUES
from headway.data.upload import to_device

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

# Bits after the point: of a source position, of the weights of rows and columns, and of a line between the two passes.
PIXEL_BITS, ROW_BITS, COLUMN_BITS, LINE_BITS = 40, 15, 14, 7
PIXEL = 1 << PIXEL_BITS
# Values of a block on a device that is not a CPU: half a GiB as int32.
DEVICE_BLOCK_VALUES = 1 << 27


@final
@dataclass(frozen=True)
class _Axis:
    """Source pixels of each output pixel along one axis.

    Attributes:
        starts: first source pixel; int32 [b, out]. weights: int32 [b, out, taps], summing to 1 << bits.
        taps: most source pixels of an output pixel of each image; int64 [b].
    """

    starts: Int32
    weights: Int32
    taps: Int64


@final
@dataclass(frozen=True)
class ResizePlan:
    """Pixels and weights of the crops of one batch, which are computed on the host, beside the training loop."""

    down: _Axis
    across: _Axis


def plan_resize(boxes: Float32, sides: tuple[int, int], size: tuple[int, int]) -> ResizePlan:
    """Computes the weights with which a box of each image is resized.

    Args:
        boxes: float32 [b, 4] (left, top, width, height), inside the images and at most `MOST_DEVICE_SCALE` times
            `size`. So an output pixel has at most 8 source pixels along an axis; the native core sums more of them in
            another way.
        sides: (height, width) of the images. size: (height, width) of the result.
    """
    down = _weigh(boxes[:, 1], boxes[:, 3], sides[0], size[0], ROW_BITS)
    return ResizePlan(down, _weigh(boxes[:, 0], boxes[:, 2], sides[1], size[1], COLUMN_BITS))


def crop_and_resize(images: torch.Tensor, plan: ResizePlan) -> torch.Tensor:
    """Resizes a box of each image, with Pillow's antialiased bilinear kernel. No host-device sync.

    Args:
        images: uint8 [b, H, W, C]. plan: from `plan_resize`, for images of these sides.

    Returns:
        uint8 [b, height, width, C], byte for byte what the native core decodes from raw pixels.

    Source: native/axis.h, native/vertical.h and native/horizontal.h.
    """
    b, _, width, channels = images.shape
    limit = CPU_BLOCK_VALUES if images.device.type == "cpu" else DEVICE_BLOCK_VALUES
    block = max(1, limit // (plan.down.starts.shape[1] * width * channels))
    if b <= block:
        return _resize_block(images, plan, slice(0, b))
    return torch.cat(
        [_resize_block(images[low : low + block], plan, slice(low, low + block)) for low in range(0, b, block)]
    )


def _resize_block(images: torch.Tensor, plan: ResizePlan, block: slice) -> torch.Tensor:
    b, height, width, channels = images.shape
    device, down, across = images.device, plan.down, plan.across
    first_row, first_column = (to_device(axis.starts[block], device) for axis in (down, across))
    row_weights, column_weights = (to_device(axis.weights[block], device) for axis in (down, across))
    # Each product is cut off for itself, by half a unit of its line on average.
    lines = torch.zeros((), dtype=torch.int32, device=device)
    rows = images.reshape(b * height, width * channels)
    begin = torch.arange(b, dtype=torch.int32, device=device)[:, None] * height
    for tap in range(row_weights.shape[2]):
        index = (first_row + tap).clamp_max(height - 1) + begin
        row = rows.index_select(0, index.view(-1)).view(b, -1, width * channels).int()
        lines = lines + ((row * row_weights[:, :, tap, None]) >> 8)
    lines = lines.view(b, -1, width, channels)
    shift = COLUMN_BITS + LINE_BITS
    start = to_device(((128 + down.taps[block]) << (COLUMN_BITS - 1)).astype(np.int32), device)
    sums = start[:, None, None, None]
    for tap in range(column_weights.shape[2]):
        index = (first_column + tap).clamp_max(width - 1).long()[:, None, :, None]
        sums = sums + torch.take_along_dim(lines, index, dim=2) * column_weights[:, None, :, tap, None]
    return (sums >> shift).clamp_(0, 255).to(torch.uint8)


def _weigh(low: Float32, length: Float32, pixels: int, out: int, bits: int) -> _Axis:
    """Returns the source pixels of each output pixel, and their weights: a triangle, in the native core's numbers."""
    # In float64, then rounded to float32: Pillow's corners.
    begin = np.maximum(low, np.float32(0)).astype(np.float64)
    end = np.minimum((low.astype(np.float64) + length).astype(np.float32), np.float32(pixels)).astype(np.float64)
    origin = np.rint(begin * PIXEL).astype(np.int64)
    step = (np.rint(end * PIXEL).astype(np.int64) - origin) // out
    support = np.maximum(step, PIXEL)
    centres = (origin + step // 2)[:, None] + np.arange(out) * step[:, None]
    starts = np.maximum((centres - support[:, None] + PIXEL // 2) >> PIXEL_BITS, 0)
    counts = np.minimum((centres + support[:, None] + PIXEL // 2 - 1) >> PIXEL_BITS, pixels) - starts
    offsets = (starts * PIXEL + PIXEL // 2 - centres).astype(np.float32) / np.float32(PIXEL)
    taps = counts.max(axis=1)
    # float32 throughout, truncated to whole numbers in the same places as there.
    wide = support.astype(np.float32) / np.float32(PIXEL)
    one = np.minimum(np.float32(1 << 22), np.float32(1 << 29) / (wide + np.float32(1))).astype(np.int32)
    slope = one.astype(np.float32) / wide
    tap = np.arange(int(taps.max(initial=1)))
    distances = np.abs(offsets[:, :, None] + tap.astype(np.float32))
    heights = one[:, None, None] - (distances * slope[:, None, None]).astype(np.int32)
    heights = np.where(tap < counts[:, :, None], np.maximum(heights, 0), 0)
    running = np.cumsum(heights, axis=2, dtype=np.int32)
    scale = np.float32(2 << bits) / running[:, :, -1:].astype(np.float32)
    upto = ((running.astype(np.float32) * scale).astype(np.int32) + 1) >> 1
    return _Axis(starts.astype(np.int32), np.diff(upto, axis=2, prepend=np.int32(0)).astype(np.int32), taps)
