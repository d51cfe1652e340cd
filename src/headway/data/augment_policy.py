"""RandAugment, TrivialAugment and AutoAugment: random operations for each sample, from a fixed list.

Operations, strengths and names are torchvision's. A strength is one of 31 levels, or 10 for AutoAugment; an operation
with two directions takes each of them half of the time. The host draws the operations and groups samples by them: one
batched call each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_integers, draw_uniform, draw_words
from headway.data.augment_tables import PolicyTable, parse_table
from headway.data.crops import Float64
from headway.data.ops.colour import adjust_brightness, adjust_contrast, adjust_saturation, adjust_sharpness
from headway.data.ops.move import build_rotation_matrices, warp
from headway.data.ops.tone import autocontrast, equalize, posterize, solarize
from headway.data.random_streams import (
    STREAM_IS_APPLIED,
    STREAM_LEVEL,
    STREAM_OPERATION,
    STREAM_SIGN,
    STREAM_SUB_POLICY,
)
from headway.data.upload import to_device

Int64 = NDArray[np.int64]

GEOMETRIC_OPERATIONS = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLEND_OPERATIONS = ("brightness", "color", "contrast", "sharpness")
COMMON_OPERATIONS = (
    *("identity", *GEOMETRIC_OPERATIONS, *BLEND_OPERATIONS),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
"""Names of the operations that RandAugment and TrivialAugment draw from."""
OPERATIONS = (*COMMON_OPERATIONS, "invert")
"""Names of all operations; the number of an operation is its index."""
NUM_LEVELS = 31
"""Number of strengths: TrivialAugment draws one of 0 to 30, RandAugment's `m` is one."""
NUM_AUTO_LEVELS = 10
"""Number of strengths of AutoAugment."""

_PIXEL_OPERATIONS: dict[str, Callable[[torch.Tensor, Float64], torch.Tensor]] = {
    "brightness": lambda images, strength: adjust_brightness(images, 1 + strength),
    "color": lambda images, strength: adjust_saturation(images, 1 + strength),
    "contrast": lambda images, strength: adjust_contrast(images, 1 + strength),
    "sharpness": lambda images, strength: adjust_sharpness(images, 1 + strength),
    "posterize": lambda images, strength: posterize(images, strength.astype(np.int64)),
    "solarize": solarize,
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
    "invert": lambda images, _: 255 - images,
}
"""The operations other than geometric ones, as functions of images and strengths. The strength of a blend is its factor
less 1.
"""


def draw_rand_augment(keys: UInt64, size: tuple[int, int], *, n: int = 2, m: int = 9) -> tuple[Int64, Float64]:
    """Draws `n` operations for each sample, each of level `m` of 0 to 30.

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
    if not 1 <= n <= 99 or not 0 <= m < NUM_LEVELS:
        raise UsageError(f"{n} operations of level {m}", fix=f"Give 1 to 99 of level 0 to {NUM_LEVELS - 1}.")
    return _draw_signed_strengths(keys, n, np.full((len(keys), n), m), _build_strength_table("rand", size))


def draw_trivial_augment(keys: UInt64, size: tuple[int, int]) -> tuple[Int64, Float64]:
    """Draws one operation and its level for each sample; returns the same as `draw_rand_augment` with n = 1.

    Source: Müller and Hutter 2021, "TrivialAugment" (arXiv 2103.10158), the wide space.
    """
    return _draw_signed_strengths(
        keys, 1, draw_integers(keys, STREAM_LEVEL, 0, NUM_LEVELS)[:, None], _build_strength_table("trivial", size)
    )


def draw_auto_augment(keys: UInt64, size: tuple[int, int], table: PolicyTable = "imagenet") -> tuple[Int64, Float64]:
    """Draws one of the 25 pairs of operations of a policy for each sample; each of the two runs with its probability.

    Args:
        keys: uint64 [b].
        size: (height, width) of the images.
        table: the data set for which the policy was found.

    Returns:
        operations int64 [b, 2] and strengths float64 [b, 2], as from `draw_rand_augment`; "identity" for an operation
        that does not run.

    The strengths are those of torchvision: 9 is the strongest for posterize and solarize too, and brightness, color,
    contrast and sharpness take both directions, where the paper counts from 0.1 to 1.9 times.

    Source: Cubuk et al. 2018, "AutoAugment" (arXiv 1805.09501).
    """
    operations, probabilities, levels = _load_policy(table)
    pair = draw_integers(keys, STREAM_SUB_POLICY, 0, len(operations))
    thresholds = np.stack([draw_uniform(keys, STREAM_IS_APPLIED + step) for step in range(2)], axis=1)
    # Number 0 is "identity".
    applied = np.where(thresholds < probabilities[pair], operations[pair], 0)
    return applied, _draw_signs(keys, applied, _build_strength_table("auto", size)[applied, levels[pair]])


@cache
def _load_policy(table: PolicyTable) -> tuple[Int64, Float64, Int64]:
    """Returns the operations, probabilities and levels of a policy, each [25, 2]."""
    pairs = parse_table(table)
    operations = np.array([[OPERATIONS.index(step[0]) for step in pair] for pair in pairs])
    probabilities = np.array([[step[1] for step in pair] for pair in pairs])
    return operations, probabilities, np.array([[step[2] for step in pair] for pair in pairs])


def _draw_signed_strengths(keys: UInt64, n: int, levels: Int64, strengths: Float64) -> tuple[Int64, Float64]:
    operations = np.stack(
        [draw_integers(keys, STREAM_OPERATION + round, 0, len(COMMON_OPERATIONS)) for round in range(n)], axis=1
    )
    return operations, _draw_signs(keys, operations, strengths[operations, levels])


def _draw_signs(keys: UInt64, operations: Int64, strengths: Float64) -> Float64:
    """Negates half of the strengths of operations that have two directions."""
    is_negative = np.stack(
        [draw_words(keys, STREAM_SIGN + round) >> np.uint64(63) for round in range(operations.shape[1])], axis=1
    ).astype(bool)
    # Geometric operations and blends have two directions; "identity" is number 0 and has none.
    has_sign = operations <= len(GEOMETRIC_OPERATIONS + BLEND_OPERATIONS)
    return np.where(has_sign & is_negative & (operations > 0), -strengths, strengths)


# Progressive resolution needs a table for each of its few sizes.
@lru_cache(maxsize=64)
def _build_strength_table(name: Literal["rand", "trivial", "auto"], size: tuple[int, int]) -> Float64:
    """Builds the table of strengths: one row for each operation, one column for each level."""
    is_wide = name == "trivial"
    height, width = size
    # RandAugment's largest translation: the paper's 150 pixels of ImageNet crops of 331.
    translation_ratio = 150 / 331
    max_strength = {
        "shear_x": 0.99 if is_wide else 0.3,
        "shear_y": 0.99 if is_wide else 0.3,
        "translate_x": 32 if is_wide else translation_ratio * width,
        "translate_y": 32 if is_wide else translation_ratio * height,
        "rotate": 135 if is_wide else 30,
        **dict.fromkeys(BLEND_OPERATIONS, 0.99 if is_wide else 0.9),
    }
    level = np.linspace(0, 1, NUM_AUTO_LEVELS if name == "auto" else NUM_LEVELS)
    table = np.stack([level * max_strength.get(operation, 0) for operation in OPERATIONS])
    # Posterize and solarize are stronger with fewer bits and a lower threshold.
    table[OPERATIONS.index("posterize")] = 8 - np.rint(level * (6 if is_wide else 4))
    table[OPERATIONS.index("solarize")] = 255 * (1 - level)
    return table


def apply_operations(images: torch.Tensor, operations: Int64, strengths: Float64, fill: torch.Tensor) -> torch.Tensor:
    """Applies drawn operations to images, one round after the other.

    Args:
        images: uint8 [b, H, W, C].
        operations: int64 [b, n].
        strengths: float64 [b, n].
        fill: uint8 [C] on the images' device: colour of pixels from outside the image.

    Returns:
        a new tensor of the shape of `images`.

    Raises:
        UsageError: the images are not uint8.
    """
    if images.dtype != torch.uint8:
        raise UsageError(f"operations on images of {images.dtype}", fix="Apply them before normalisation, to uint8.")
    for operation, strength in zip(operations.T, strengths.T, strict=True):
        images = _apply_round(images, operation, strength, fill)
    return images


def _apply_round(images: torch.Tensor, operation: Int64, strength: Float64, fill: torch.Tensor) -> torch.Tensor:
    """Applies one operation to each sample, grouped by operation."""
    # The clone keeps the samples whose operation is "identity".
    augmented = images.clone()
    # All geometric operations are affine maps, so one call of `warp` applies them together.
    is_geometric = (operation > 0) & (operation <= len(GEOMETRIC_OPERATIONS))
    groups = [("move", is_geometric), *((name, operation == OPERATIONS.index(name)) for name in _PIXEL_OPERATIONS)]
    for name, mask in groups:
        # Computed on the host, so an empty group costs nothing, and no group needs a host-device sync.
        indices = np.flatnonzero(mask)
        if not indices.size:
            continue
        device_indices = to_device(indices, images.device)
        group = images.index_select(0, device_indices)
        group_strengths = strength[indices]
        if name == "move":
            group = warp(group, build_affine_matrices(operation[indices], group_strengths, images.shape[1:3]), fill)
        else:
            group = _PIXEL_OPERATIONS[name](group, group_strengths)
        augmented.index_copy_(0, device_indices, group)
    return augmented


def build_affine_matrices(operation: Int64, strength: Float64, size: tuple[int, int] | torch.Size) -> Float64:
    """Builds the affine matrices of geometric operations for `warp`, float64 [b, 6].

    A shear fixes the upper left corner and a rotation (counter-clockwise) the centre. A translation moves the image by
    whole pixels, to the right and down.
    """
    matrices = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(operation), 1))
    mask_by_operation = {name: operation == OPERATIONS.index(name) for name in GEOMETRIC_OPERATIONS}
    matrices[:, 1] = np.where(mask_by_operation["shear_x"], strength, 0)
    matrices[:, 3] = np.where(mask_by_operation["shear_y"], strength, 0)
    # `warp` asks where a pixel comes from: to move an image right, it must look to the left.
    matrices[:, 2] = np.where(mask_by_operation["translate_x"], -np.trunc(strength), 0)
    matrices[:, 5] = np.where(mask_by_operation["translate_y"], -np.trunc(strength), 0)
    is_rotation = mask_by_operation["rotate"]
    matrices[is_rotation] = build_rotation_matrices(strength[is_rotation], size)
    return matrices
