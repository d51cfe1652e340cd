"""A data set and transforms as users of torchvision write them: PIL images, random numbers of torch, a tensor at the
end.

torchvision has no build for these machines. These are its classes' formulas, written against its documentation:
RandomResizedCrop, RandomHorizontalFlip, ColorJitter (which works on PIL images by PIL.ImageEnhance), ToImage with
ToDtype(scale=True), and Normalize.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch.utils.data import Dataset

SIDE = 224
REPEATED = 40
"""Epochs of 10,000 samples of 250 files: an epoch's end, where DataLoader's workers pause, is as rare as in use."""
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def random_resized_crop(image: Image.Image) -> Image.Image:
    width, height = image.size
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
        ratio = torch.exp(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,)).item())
            left = int(torch.randint(0, width - w + 1, (1,)).item())
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    return image.crop((left, top, left + w, top + h)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def random_flip(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1).item() < 0.5 else image


def jitter_colours(image: Image.Image) -> Image.Image:
    for number in torch.randperm(3).tolist():
        image = ENHANCERS[number](image).enhance(torch.empty(1).uniform_(0.6, 1.4).item())
    return image


def to_tensor(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div_(255).sub_(MEAN[:, None, None]).div_(STD[:, None, None])


def shift_brightness(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One cheap transform of a uint8 image [H, W, C]: each value through a random table."""
    table = np.clip(np.arange(256) * random.uniform(0.6, 1.4), 0, 255).astype(np.uint8)
    # Pillow's point is twice as fast as indexing the table with the array.
    return np.asarray(Image.fromarray(pixels).point(table.tolist() * 3))


class Photos(Dataset[tuple[Any, int]]):
    """Files as a user's data set reads them: opened, converted, and passed through some functions."""

    def __init__(self, paths: Sequence[Path], functions: Sequence[Callable[[Any], Any]]) -> None:
        self._paths, self._functions = list(paths), functions

    def __len__(self) -> int:
        return REPEATED * len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self._paths)
        with Image.open(self._paths[place]) as opened:
            image: Any = opened.convert("RGB")
        for function in self._functions:
            image = function(image)
        return image, place


JITTERED = (random_resized_crop, random_flip, jitter_colours, to_tensor)
CHEAP = (random_resized_crop, random_flip, np.asarray, shift_brightness)
