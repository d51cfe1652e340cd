"""Crops, flips and shifts of the images, drawn on the host from Keys.

A box is (left, top, width, height) in pixels of the image. Everything is vectorised over the batch, and each sample's
parameters depend on its key alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import GOLDEN, MASK, UInt64, draw_integers, draw_uniform, draw_words, mix
from headway.data.augment_recipe import FlipMode
from headway.data.random_streams import (
    STREAM_CROP,
    STREAM_CROP_PLACE,
    STREAM_DOWN,
    STREAM_FLIP,
    STREAM_RIGHT,
    STREAM_VERTICAL_FLIP,
)

Float64 = NDArray[np.float64]
Sides = NDArray[np.uint32]
Range = tuple[float, float]
FitTest = Callable[[Float64, Float64, Float64, Float64], NDArray[np.bool_]]

MAX_ATTEMPTS = 99
MOST_DEVICE_SCALE = 3.5
"""Largest factor between a box and the output for which `headway.data.ops.resize` has the native core's arithmetic."""
_SHIFT_32 = np.uint64(32)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)


def compute_center_boxes(width: Sides, height: Sides, out_hw: tuple[int, int]) -> NDArray[np.float32]:
    """Computes the largest centred boxes with the output's aspect ratio; float32 [n, 4]."""
    w, h = width.astype(np.float64), height.astype(np.float64)
    ratio = out_hw[1] / out_hw[0]
    box_w, box_h = np.minimum(w, h * ratio), np.minimum(h, w / ratio)
    # `np.stack` takes longer than all the rest for a single image, as a server has it.
    boxes = np.empty((len(w), 4), np.float32)
    boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = (w - box_w) / 2, (h - box_h) / 2, box_w, box_h
    return boxes


def draw_random_resized_boxes(
    keys: UInt64,
    width: Sides,
    height: Sides,
    *,
    scale: Range = (0.08, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
    attempts: int = 10,
) -> NDArray[np.float32]:
    """Draws random boxes of whole pixels, distributed as in torchvision's RandomResizedCrop.

    The area is a uniform fraction of the image's area; the aspect ratio is log-uniform. The first attempt that fits
    into the image is placed uniformly. If none fits, the box is the largest centred one within the range of ratios.

    Args:
        keys: uint64 [k].
        width: widths of the images, [k].
        height: heights of the images, [k].
        scale: smallest and largest fraction of the image's area.
        ratio: smallest and largest width / height.
        attempts: number of boxes that are tried, 1 to 99.

    Returns:
        float32 [k, 4] (left, top, width, height), whole numbers.

    Raises:
        UsageError: a range is empty or not positive, or `attempts` is out of range.

    Source: Szegedy et al. 2015, "Going deeper with convolutions" (arXiv 1409.4842), section 6.
    """
    w, h = width.astype(np.float64), height.astype(np.float64)
    box_w, box_h, has_fit = draw_first_fitting(keys, STREAM_CROP, w, h, scale, ratio, attempts, _fits_inside)
    # One word gives both coordinates: its halves are independent.
    word = draw_words(keys, STREAM_CROP_PLACE)
    left = draw_offsets(word >> _SHIFT_32, w - box_w)
    top = draw_offsets(word & _LOW_32_BITS, h - box_h)
    # torchvision's fallback: the whole image, cropped to the nearest allowed ratio.
    if not has_fit.all():
        unfitted = np.flatnonzero(~has_fit)
        box_w[unfitted] = np.maximum(1, np.minimum(w[unfitted], np.rint(h[unfitted] * ratio[1])))
        box_h[unfitted] = np.maximum(1, np.minimum(h[unfitted], np.rint(w[unfitted] / ratio[0])))
        left[unfitted], top[unfitted] = (w[unfitted] - box_w[unfitted]) // 2, (h[unfitted] - box_h[unfitted]) // 2
    boxes = np.empty((len(keys), 4), np.float32)
    boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = left, top, box_w, box_h
    return boxes


def _fits_inside(box_w: Float64, box_h: Float64, width: Float64, height: Float64) -> NDArray[np.bool_]:
    return (box_w <= width) & (box_h <= height) & (np.minimum(box_w, box_h) > 0)


def draw_first_fitting(
    keys: UInt64, stream: int, width: Float64, height: Float64, scale: Range, ratio: Range, attempts: int, fits: FitTest
) -> tuple[Float64, Float64, NDArray[np.bool_]]:
    """Draws box sizes until one `fits`, as in `draw_random_resized_boxes`.

    Returns:
        box widths and box heights, whole numbers as float64 [k]; and a mask of the samples for which one fits.

    Raises:
        UsageError: a range is empty or not positive, or `attempts` is not 1 to MAX_ATTEMPTS.
    """
    if not 0 < scale[0] <= scale[1] or not 0 < ratio[0] <= ratio[1]:
        raise UsageError(f"a scale of {scale} and a ratio of {ratio}", fix="Give (smallest, largest), both above 0.")
    if not 1 <= attempts <= MAX_ATTEMPTS:
        raise UsageError(f"{attempts} attempts", fix=f"Give 1 to {MAX_ATTEMPTS}.")
    # One random word per attempt, from `stream` and the streams after it: the upper half is the area, the lower half
    # the ratio.
    log_ratio_start = math.log(ratio[0]) / 2
    log_ratio_step = (math.log(ratio[1]) - math.log(ratio[0])) / 2 * 2.0**-32
    area_step = (scale[1] - scale[0]) * 2.0**-32

    def compute_sides(word: UInt64, area: Float64) -> tuple[Float64, Float64]:
        """Returns box widths and heights from one random word for each sample."""
        # In float64 a last bit that another machine computes differently moves a box only once in 1e12 samples.
        side = np.sqrt(((word >> _SHIFT_32) * area_step + scale[0]) * area)
        # The square root of the aspect ratio.
        stretch = np.exp((word & _LOW_32_BITS) * log_ratio_step + log_ratio_start)
        return np.rint(side * stretch), np.rint(side / stretch)

    area = width * height
    box_w, box_h = compute_sides(draw_words(keys, stream), area)
    has_fit = fits(box_w, box_h, width, height)
    unfitted = np.flatnonzero(~has_fit)
    # Few samples need more attempts, so all attempts of these are computed at once.
    if unfitted.size and attempts > 1:
        offsets = np.array([((stream + attempt) * GOLDEN) & MASK for attempt in range(1, attempts)], np.uint64)
        later_w, later_h = compute_sides(mix(keys[unfitted] + offsets[:, None]), area[unfitted])
        fits_later = fits(later_w, later_h, width[unfitted], height[unfitted])
        first_fit = fits_later.argmax(axis=0), np.arange(unfitted.size)
        box_w[unfitted], box_h[unfitted], has_fit[unfitted] = (
            later_w[first_fit],
            later_h[first_fit],
            fits_later[first_fit],
        )
    return box_w, box_h, has_fit


def draw_offsets(random_bits: UInt64, max_offset: Float64) -> Float64:
    """Draws uniform whole numbers in [0, room] from 32 random bits each; 0 if there is no room."""
    return np.floor(random_bits * (2.0**-32 * (np.maximum(max_offset, 0) + 1)))


def draw_flips(
    keys: UInt64, epochs: NDArray[np.int64] | None = None, mode: Literal["random", "alternating"] = "random"
) -> NDArray[np.bool_]:
    """Draws a mask of the samples that are mirrored left to right.

    Args:
        keys: uint64 [k]. For `alternating`, the keys of epoch 0, which stay the same in all epochs:
            `headway.make_keys(seed, 0, samples)`.
        epochs: epoch of each sample, [k]; not needed for `random`.
        mode: `random` mirrors half of the samples, drawn anew in each epoch. `alternating` mirrors half of them in even
            epochs and the other half in odd epochs, so two epochs show each sample both ways.

    Returns:
        bool [k].

    Raises:
        UsageError: an alternating flip without epochs.

    Source of `alternating`: Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (arXiv 2404.00498).
    """
    # Random: the key of this epoch decides. Alternating: the key of epoch 0 decides once, and odd epochs invert it.
    flips: NDArray[np.bool_] = draw_uniform(keys, STREAM_FLIP) < 0.5
    if mode == "alternating":
        if epochs is None:
            raise UsageError("an alternating flip needs the epoch of each sample", fix="Give epochs.")
        flips ^= (epochs & 1).astype(bool)
    return flips


def draw_flip_masks(
    mode: FlipMode, keys: UInt64, epochs: NDArray[np.int64] | None = None, first_epoch_keys: UInt64 | None = None
) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
    """Draws masks of the samples that are mirrored left to right, and top to bottom; None: `mode` does not do this.

    Args:
        mode: `random` and `alternating` mirror left to right, as in `draw_flips`; `vertical` mirrors half of the
            samples top to bottom; `both` mirrors in both directions, which are drawn independently.
        keys: uint64 [k].
        epochs: epoch of each sample, [k], for `alternating`.
        first_epoch_keys: uint64 [k], keys of the samples in epoch 0, for `alternating`.

    Raises:
        UsageError: an alternating flip without epochs or keys of epoch 0.
    """
    vertical = draw_uniform(keys, STREAM_VERTICAL_FLIP) < 0.5 if mode in ("vertical", "both") else None
    if mode == "vertical":
        return None, vertical
    if mode != "alternating":
        return draw_flips(keys), vertical
    if first_epoch_keys is None:
        what = "an alternating flip needs the samples' keys in the first epoch"
        raise UsageError(what, fix="Give first_epoch_keys=headway.make_keys(seed, 0, samples), and epochs.")
    return draw_flips(first_epoch_keys, epochs, "alternating"), vertical


def draw_shifts(keys: UInt64, translate: int) -> NDArray[np.int64]:
    """Draws the shift (down, right) of each sample in pixels, uniform in [-translate, translate]; int64 [k, 2]."""
    # `integers` excludes its upper end.
    low, high = -translate, translate + 1
    return np.stack([draw_integers(keys, STREAM_DOWN, low, high), draw_integers(keys, STREAM_RIGHT, low, high)], axis=1)
