"""What happens to a batch on the device: flip and translate by each sample's key, then normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.keys import UInt64, integers, uniform
from headway.data.options import AugmentRecipe

STREAM_FLIP, STREAM_DOWN, STREAM_RIGHT = 1, 2, 3
"""Numbers of the random choices made here; a user's own transform takes 1,000 and above."""


def flip_and_translate(images: torch.Tensor, keys: UInt64, *, flip: bool, translate: int) -> torch.Tensor:
    """Flips and translates each image by its key: one gather for both.

    Args:
        images: [b, H, W, C], any type.
        keys: uint64 [b].
        flip: mirror where the key says so (half of all).
        translate: largest shift in pixels, below H and W.

    Returns:
        a new tensor of the shape and type of `images`.

    Raises:
        UsageError: the shift is no less than a side of the images.
    """
    b, height, width, _ = images.shape
    if translate >= min(height, width):
        raise UsageError(f"images of {height} x {width} pixels cannot be moved by {translate}", fix="Set less.")
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
    # Torch warns of arrays that cannot be written to; a broadcast one of a single image is such.
    row = to_device(np.require(rows, requirements=["C", "W"]), images.device)
    column = to_device(np.require(columns, requirements=["C", "W"]), images.device)
    sample = torch.arange(b, device=images.device)
    return images[sample[:, None, None], row[:, :, None], column[:, None, :]]


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of a numpy array on a device; to a GPU through pinned memory, as a copy from elsewhere waits."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _reflect(index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    mirrored: NDArray[np.int64] = np.abs(size - 1 - np.abs(size - 1 - index))
    return mirrored


class Augment:
    """uint8 [b, H, W, C] to normalised float32 [b, C, H, W], on the images' device.

    Args:
        recipe: what to do; mean and std must be numbers.
        device: where the images lie.
        channels_last: the memory format of the result: as the images lie already, or contiguous (a copy).

    Attributes:
        random: whether training batches need keys.
    """

    def __init__(self, recipe: AugmentRecipe, device: torch.device | str, channels_last: bool = True) -> None:
        if recipe.mean == "auto" or recipe.std == "auto":
            raise UsageError(
                "mean and std are not known", fix="Give both, or measure them: headway.data.augment.measure."
            )
        self._flip, self._translate = recipe.flip, recipe.translate
        self._channels_last = channels_last
        self.random = recipe.flip or recipe.translate > 0
        self._mean = torch.tensor(recipe.mean, dtype=torch.float32, device=device)
        self._inverse_std = 1 / torch.tensor(recipe.std, dtype=torch.float32, device=device)

    def __call__(self, images: torch.Tensor, keys: UInt64 | None = None) -> torch.Tensor:
        """Augments where keys are given (training), and normalises always."""
        if keys is not None and self.random:
            images = flip_and_translate(images, keys, flip=self._flip, translate=self._translate)
        out = ((images.float() - self._mean) * self._inverse_std).permute(0, 3, 1, 2)
        return out if self._channels_last else out.contiguous()


def measure(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of each channel of uint8 [n, H, W, C]; a channel without variation gets 1."""
    count, channels = images[..., 0].numel(), images.shape[-1]
    total = torch.zeros(2, channels, dtype=torch.int64)  # exact; an image at a time, as int64 is 8 times its bytes
    for image in images:
        values = image.reshape(-1, channels).long()
        total += torch.stack([values.sum(dim=0), values.square().sum(dim=0)]).cpu()
    mean, square = (total.double() / count).tolist()
    std = [max(0.0, s - m * m) ** 0.5 for m, s in zip(mean, square, strict=True)]
    return tuple(round(value, 4) for value in mean), tuple(round(value, 4) or 1.0 for value in std)
