"""RandAugment and TrivialAugment: random operations for each sample, from a fixed list of 14.

Operations, strengths and names are torchvision's. A strength is one of 31 levels; an operation with two directions
takes each of them half of the time. The host draws the operations and groups samples by them: one batched call each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_integers, draw_words
from headway.data.crops import Float64
from headway.data.ops.colour import adjust_brightness, adjust_contrast, adjust_saturation, adjust_sharpness
from headway.data.ops.move import warp
from headway.data.ops.tone import autocontrast, equalize, posterize, solarize
from headway.data.random_streams import STREAM_LEVEL, STREAM_OPERATION, STREAM_SIGN
from headway.data.upload import to_device

Int64 = NDArray[np.int64]

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLENDS = ("brightness", "color", "contrast", "sharpness")
# The number of an operation is its index here.
OPERATIONS = ("identity", *MOVES, *BLENDS, "posterize", "solarize", "autocontrast", "equalize")
# Number of strengths: TrivialAugment draws a level below it, RandAugment's `m` is one.
LEVELS = 31

# Operations other than moves, each on images and strengths of one group. Blends take a factor, and a strength is a
# factor less 1.
_APPLY: dict[str, Callable[[torch.Tensor, Float64], torch.Tensor]] = {
    "brightness": lambda images, strength: adjust_brightness(images, 1 + strength),
    "color": lambda images, strength: adjust_saturation(images, 1 + strength),
    "contrast": lambda images, strength: adjust_contrast(images, 1 + strength),
    "sharpness": lambda images, strength: adjust_sharpness(images, 1 + strength),
    "posterize": lambda images, strength: posterize(images, strength.astype(np.int64)),
    "solarize": solarize,
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
}


def draw_rand_augment(keys: UInt64, size: tuple[int, int], *, n: int = 2, m: int = 9) -> tuple[Int64, Float64]:
    """Draws `n` operations a sample, each of level `m` of 0 to 30.

    Args:
        keys: uint64 [b].
        size: (height, width) of the images.

    Returns:
        operations int64 [b, n] (numbers of OPERATIONS), and strengths float64 [b, n] in the operation's unit: a shear,
        pixels, degrees, a factor less 1, bits, or a byte.

    Raises:
        UsageError: n is not 1 to 99, or m not 0 to 30.

    Source: Cubuk et al. 2019, "RandAugment" (arXiv 1909.13719).
    """
    if not 1 <= n <= 99 or not 0 <= m < LEVELS:
        raise UsageError(f"{n} operations of level {m}", fix=f"Give 1 to 99 of level 0 to {LEVELS - 1}.")
    return _draw(keys, n, np.full((len(keys), n), m), _make_strength_table("rand", size))


def draw_trivial_augment(keys: UInt64, size: tuple[int, int]) -> tuple[Int64, Float64]:
    """Draws one operation and its level for each sample; returns the same as `draw_rand_augment` with n = 1.

    Source: Müller and Hutter 2021, "TrivialAugment" (arXiv 2103.10158), the wide space.
    """
    return _draw(keys, 1, draw_integers(keys, STREAM_LEVEL, 0, LEVELS)[:, None], _make_strength_table("trivial", size))


def _draw(keys: UInt64, n: int, levels: Int64, strengths: Float64) -> tuple[Int64, Float64]:
    operations = np.stack([draw_integers(keys, STREAM_OPERATION + k, 0, len(OPERATIONS)) for k in range(n)], axis=1)
    negative = np.stack([draw_words(keys, STREAM_SIGN + k) >> np.uint64(63) for k in range(n)], axis=1).astype(bool)
    drawn = strengths[operations, levels]
    # Moves and blends have two directions; "identity" is number 0 and has none.
    signed = operations <= len(MOVES + BLENDS)
    return operations, np.where(signed & negative & (operations > 0), -drawn, drawn)


# Progressive resolution needs a table for each of its few sizes.
@lru_cache(maxsize=64)
def _make_strength_table(name: Literal["rand", "trivial"], size: tuple[int, int]) -> Float64:
    """Makes the table of strengths: one row an operation, one column a level."""
    wide = name == "trivial"
    height, width = size
    # RandAugment's largest translation: the paper's 150 pixels of ImageNet crops of 331.
    share = 150 / 331
    largest = {
        "shear_x": 0.99 if wide else 0.3,
        "shear_y": 0.99 if wide else 0.3,
        "translate_x": 32 if wide else share * width,
        "translate_y": 32 if wide else share * height,
        "rotate": 135 if wide else 30,
        **dict.fromkeys(BLENDS, 0.99 if wide else 0.9),
    }
    level = np.linspace(0, 1, LEVELS)
    table = np.stack([level * largest.get(operation, 0) for operation in OPERATIONS])
    # Posterize and solarize are stronger with fewer bits and a lower threshold.
    table[OPERATIONS.index("posterize")] = 8 - np.rint(level * (6 if wide else 4))
    table[OPERATIONS.index("solarize")] = 255 * (1 - level)
    return table


def apply_operations(images: torch.Tensor, operations: Int64, strengths: Float64, fill: torch.Tensor) -> torch.Tensor:
    """Applies drawn operations to images, one round after the other.

    Args:
        images: uint8 [b, H, W, C].
        operations: int64 [b, n].
        strengths: float64 [b, n].
        fill: uint8 [C] on the images' device: colour of pixels that come in from outside.

    Returns:
        a new tensor.

    Raises:
        UsageError: the images are not uint8.
    """
    if images.dtype != torch.uint8:
        raise UsageError(f"operations on images of {images.dtype}", fix="Apply them before normalisation, to uint8.")
    for operation, strength in zip(operations.T, strengths.T, strict=True):
        images = _apply_round(images, operation, strength, fill)
    return images


def _apply_round(images: torch.Tensor, operation: Int64, strength: Float64, fill: torch.Tensor) -> torch.Tensor:
    out = images.clone()
    # All moves are affine maps, so one call of `warp` does them together.
    moved = (operation > 0) & (operation <= len(MOVES))
    groups = [("move", moved), *((name, operation == OPERATIONS.index(name)) for name in _APPLY)]
    for name, chosen in groups:
        # Known on the host, so an empty group costs nothing and no group waits for the device.
        members = np.flatnonzero(chosen)
        if not members.size:
            continue
        places = to_device(members, images.device)
        some, drawn = images.index_select(0, places), strength[members]
        if name == "move":
            some = warp(some, make_affine_matrices(operation[members], drawn, images.shape[1:3]), fill)
        else:
            some = _APPLY[name](some, drawn)
        out.index_copy_(0, places, some)
    return out


def make_affine_matrices(operation: Int64, strength: Float64, size: tuple[int, int] | torch.Size) -> Float64:
    """Makes the affine matrices of moves for `warp`, float64 [b, 6].

    A shear fixes the upper left corner and a rotation (counter-clockwise) the centre. A translation moves the image by
    whole pixels, to the right and down.
    """
    out = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(operation), 1))
    is_ = {name: operation == OPERATIONS.index(name) for name in MOVES}
    out[:, 1] = np.where(is_["shear_x"], strength, 0)
    out[:, 3] = np.where(is_["shear_y"], strength, 0)
    out[:, 2] = np.where(is_["translate_x"], -np.trunc(strength), 0)
    out[:, 5] = np.where(is_["translate_y"], -np.trunc(strength), 0)
    # Turned around the centre (x, y): shift it to the origin, rotate, shift back.
    angle = np.deg2rad(strength[is_["rotate"]])
    cosine, sine = np.cos(angle), np.sin(angle)
    y, x = size[0] / 2, size[1] / 2
    turned = [cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y]
    out[is_["rotate"]] = np.stack(turned, axis=1)
    return out
