"""Random parameters of the device augmentations, drawn on the host from Keys: boxes, factors and mixing partners.

Everything is vectorised over the batch. A sample's parameters depend on its key alone; only its partner depends on the
other keys of the batch. A box is (left, top, width, height) in pixels; a box without area changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_uniform, draw_words
from headway.data.crops import Float64, Range, draw_first_fitting, draw_offsets
from headway.data.random_streams import (
    STREAM_BETA,
    STREAM_CUTMIX_PLACE,
    STREAM_CUTOUT,
    STREAM_ERASE,
    STREAM_ERASE_PLACE,
    STREAM_ERASE_SIDES,
    STREAM_HUE,
    STREAM_IS_ROTATED,
    STREAM_PARTNER,
    STREAM_ROTATION,
)

Boxes = NDArray[np.int32]

MAX_ERASE_ATTEMPTS = 10
_SHIFT_32 = np.uint64(32)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)


def draw_factors(keys: UInt64, stream: int, spread: float) -> Float64:
    """Draws factors of a colour jitter, uniform in [max(0, 1 - spread), 1 + spread]; float64 [k]."""
    low = max(0.0, 1.0 - spread)
    return low + draw_uniform(keys, stream) * (1.0 + spread - low)


def draw_hue_shifts(keys: UInt64, spread: float) -> Float64:
    """Draws shifts of the hue, uniform in [-spread, spread] turns of the colour wheel; float64 [k]."""
    return (2 * draw_uniform(keys, STREAM_HUE) - 1) * spread


def draw_angles(keys: UInt64, degrees: float, p: float = 1.0) -> Float64:
    """Draws angles, uniform in [-degrees, degrees] with probability `p`, and else 0; float64 [k]."""
    angles = (2 * draw_uniform(keys, STREAM_ROTATION) - 1) * degrees
    return np.where(draw_uniform(keys, STREAM_IS_ROTATED) < p, angles, 0.0)


def draw_cutout_boxes(keys: UInt64, side: int, size: tuple[int, int]) -> Boxes:
    """Draws squares of `side` pixels around a uniform pixel of each image, clipped at its border; int32 [k, 4].

    Source: DeVries and Taylor 2017, "Improved regularization of convolutional neural networks with cutout"
    (arXiv 1708.04552).
    """
    centre_x, centre_y = _draw_pixels(keys, STREAM_CUTOUT, size)
    return _clip_boxes(centre_x - side // 2, centre_y - side // 2, side, side, size)


def draw_erasing_boxes(
    keys: UInt64, size: tuple[int, int], *, p: float, scale: Range = (0.02, 0.33), ratio: Range = (0.3, 3.3)
) -> Boxes:
    """Draws the rectangles of random erasing, distributed as in torchvision; int32 [k, 4].

    Args:
        keys: uint64 [k].
        size: (height, width) of the images.
        p: probability that a sample is erased.
        scale: smallest and largest fraction of the image's area.
        ratio: smallest and largest height / width.

    Source: Zhong et al. 2017, "Random erasing data augmentation" (arXiv 1708.04896).
    """
    ones = np.ones(len(keys))
    height, width = ones * size[0], ones * size[1]
    # The sides are swapped in this call: the ratio is height / width here and width / height there.
    box_h, box_w, has_fit = draw_first_fitting(
        keys, STREAM_ERASE_SIDES, height, width, scale, ratio, MAX_ERASE_ATTEMPTS, lambda h, w, H, W: (h < H) & (w < W)
    )
    # One word gives both coordinates: its halves are independent.
    word = draw_words(keys, STREAM_ERASE_PLACE)
    boxes = np.stack(
        [
            draw_offsets(word >> _SHIFT_32, width - box_w),
            draw_offsets(word & _LOW_32_BITS, height - box_h),
            box_w,
            box_h,
        ],
        axis=1,
    )
    boxes[~(has_fit & (draw_uniform(keys, STREAM_ERASE) < p))] = 0
    return boxes.astype(np.int32)


def draw_partners(keys: UInt64) -> NDArray[np.int64]:
    """Draws the sample that each sample of a batch is mixed with, as an index in the batch; int64 [b].

    The partners form one cycle, so no sample of a larger batch is its own partner.
    """
    # Sorted by a random word of each key: so the pairs depend on the keys in the batch, not on their places in it.
    order = np.argsort(draw_words(keys, STREAM_PARTNER), kind="stable")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def draw_symmetric_beta(keys: UInt64, alpha: float) -> Float64:
    """Draws Beta(alpha, alpha) variates, float64 [k]; exact for every alpha above 0, without rejection.

    Raises UsageError if alpha is not positive.

    A polar form of Student's t with 2 alpha degrees of freedom, t = sqrt(2 alpha (u^(-1 / alpha) - 1)) cos(2 pi v)
    (Bailey 1994), put through the identity that 1/2 + t / (2 sqrt(2 alpha + t^2)) is Beta(alpha, alpha) (Devroye 1996,
    "Random variate generation in one line of code").
    """
    if not alpha > 0:
        raise UsageError(f"a beta distribution with alpha {alpha}", fix="Give a number above 0.")
    cosine = np.cos(2 * np.pi * draw_uniform(keys, STREAM_BETA + 1))
    # A small alpha overflows to infinity, which correctly gives a 0 or a 1. `squared_ratio` is t^2 / (2 alpha).
    with np.errstate(over="ignore"):
        squared_ratio = np.expm1(-np.log1p(-draw_uniform(keys, STREAM_BETA)) / alpha) * (cosine * cosine)
    # The identity, rearranged so that it does not subtract two near numbers.
    smaller = 0.5 / (1 + squared_ratio + np.sqrt(squared_ratio) * np.sqrt(1 + squared_ratio))
    variates: Float64 = np.where(cosine < 0, smaller, 1 - smaller)
    return variates


def draw_cutmix_boxes(keys: UInt64, kept_area: Float64, size: tuple[int, int]) -> Boxes:
    """Draws the rectangles that cutmix takes from the partner; int32 [k, 4].

    Each has the image's aspect ratio, the fraction 1 - `kept_area` of its area, and a uniform pixel as its centre. It
    is clipped at the border: `compute_kept_area` returns the fraction that is kept after that.

    Source: Yun et al. 2019, "CutMix" (arXiv 1905.04899).
    """
    # Both sides shrink by the same factor: the square root of the fraction of the area.
    side_ratio = np.sqrt(1 - kept_area)
    box_w, box_h = (size[1] * side_ratio).astype(np.int64), (size[0] * side_ratio).astype(np.int64)
    x, y = _draw_pixels(keys, STREAM_CUTMIX_PLACE, size)
    return _clip_boxes(x - box_w // 2, y - box_h // 2, box_w, box_h, size)


def compute_kept_area(boxes: Boxes, size: tuple[int, int]) -> Float64:
    """Returns the fraction of each image's area outside its box; float64 [k]."""
    kept_area: Float64 = 1 - boxes[:, 2].astype(np.int64) * boxes[:, 3] / (size[0] * size[1])
    return kept_area


def _draw_pixels(keys: UInt64, stream: int, size: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draws (column, row) of a uniform pixel of each image, [k]."""
    # Multiply-high on each half of the word: uniform, without a division.
    word = draw_words(keys, stream)
    width, height = np.uint64(size[1]), np.uint64(size[0])
    return ((word >> _SHIFT_32) * width >> _SHIFT_32).astype(np.int64), (
        (word & _LOW_32_BITS) * height >> _SHIFT_32
    ).astype(np.int64)


def _clip_boxes(
    left: NDArray[np.int64],
    top: NDArray[np.int64],
    width: NDArray[np.int64] | int,
    height: NDArray[np.int64] | int,
    size: tuple[int, int],
) -> Boxes:
    """Clips boxes at the border of an image of `size`."""
    x0, y0 = np.maximum(left, 0), np.maximum(top, 0)
    x1, y1 = np.minimum(left + width, size[1]), np.minimum(top + height, size[0])
    return np.stack([x0, y0, x1 - x0, y1 - y0], axis=1).astype(np.int32)
