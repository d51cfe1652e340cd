"""What happens to a batch on the device: flip and translate by each sample's key, then normalisation."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from headway.core.keys import UInt64, integers, uniform
from headway.core.recipe import Part

STREAM_FLIP, STREAM_DOWN, STREAM_RIGHT = 1, 2, 3
"""Numbers of the random choices made here; a user's own transform takes 1,000 and above."""


class AugmentRecipe(Part):
    """Augmentation of training batches, and the normalisation of all batches."""

    flip: bool = False
    """Mirror half of the samples, left to right."""
    translate: int = Field(default=0, ge=0)
    """Move each sample by up to so many pixels both ways; the border is filled by reflection."""
    mean: Literal["auto"] | tuple[float, ...] = "auto"
    """Mean of each channel, in 0..255; auto: measured over the training images."""
    std: Literal["auto"] | tuple[float, ...] = "auto"
    """Standard deviation of each channel, in 0..255."""


def flip_and_translate(images: torch.Tensor, keys: UInt64, *, flip: bool, translate: int) -> torch.Tensor:
    """Flips and translates each image by its key: one gather for both.

    Args:
        images: [b, H, W, C], any type.
        keys: uint64 [b].
        flip: mirror where the key says so (half of all).
        translate: largest shift in pixels, below H and W.

    Returns:
        a new tensor of the shape and type of `images`.
    """
    b, height, width, _ = images.shape
    rows = np.broadcast_to(np.arange(height), (b, height))
    columns = np.broadcast_to(np.arange(width), (b, width))
    if flip:
        mirrored = uniform(keys, STREAM_FLIP) < 0.5
        columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
    if translate:
        rows = _reflect(rows + integers(keys, STREAM_DOWN, -translate, translate + 1)[:, None], height)
        shift = integers(keys, STREAM_RIGHT, -translate, translate + 1)[:, None]
        columns = np.take_along_axis(columns, _reflect(np.arange(width) + shift, width), axis=1)
    # The index arrays are small (8 bytes a row and a column), so they are made on the host and copied without a wait.
    row = torch.from_numpy(np.ascontiguousarray(rows)).to(images.device, non_blocking=True)
    column = torch.from_numpy(np.ascontiguousarray(columns)).to(images.device, non_blocking=True)
    sample = torch.arange(b, device=images.device)
    return images[sample[:, None, None], row[:, :, None], column[:, None, :]]


def _reflect(index: np.ndarray[tuple[int, ...], np.dtype[np.int64]], size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.abs(size - 1 - np.abs(size - 1 - index))


class Augment:
    """uint8 [b, H, W, C] to normalised float32 [b, C, H, W] (channels last in memory), on the images' device."""

    def __init__(self, recipe: AugmentRecipe, device: torch.device | str) -> None:
        self._recipe = recipe
        if recipe.mean == "auto" or recipe.std == "auto":
            raise ValueError("mean and std must be measured first: see headway.data.augment.measure")
        self._mean = torch.tensor(recipe.mean, dtype=torch.float32, device=device)
        self._inverse_std = 1 / torch.tensor(recipe.std, dtype=torch.float32, device=device)

    def __call__(self, images: torch.Tensor, keys: UInt64 | None = None) -> torch.Tensor:
        """Augments where keys are given (training), and normalises always."""
        recipe = self._recipe
        if keys is not None and (recipe.flip or recipe.translate):
            images = flip_and_translate(images, keys, flip=recipe.flip, translate=recipe.translate)
        return ((images.float() - self._mean) * self._inverse_std).permute(0, 3, 1, 2)


def measure(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of each channel of uint8 [n, H, W, C]; a channel without variation gets 1."""
    values = images.reshape(-1, images.shape[-1]).double()
    std = values.std(dim=0, correction=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return tuple(round(v, 4) for v in values.mean(dim=0).tolist()), tuple(round(v, 4) for v in std.tolist())
