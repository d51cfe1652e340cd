"""PyTorch's DataLoader with worker processes, each image decoded by OpenCV or by Pillow: the usual setup."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from bench._peers.serve import argument, serve

SIDE = 224


def box(width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def by_opencv(data: bytes) -> NDArray[np.uint8]:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    left, top, width, height = box(pixels.shape[1], pixels.shape[0])
    out = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(out, 1) if random.random() < 0.5 else out


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    image = Image.open(BytesIO(data)).convert("RGB")
    left, top, width, height = box(*image.size)
    image = image.crop((left, top, left + width, top + height)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image)


class Files(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, paths: list[Path], to_pixels: Callable[[bytes], NDArray[np.uint8]]) -> None:
        self._paths, self._to_pixels = paths, to_pixels

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self._to_pixels(self._paths[place].read_bytes())), place


class Endless(Sampler[int]):
    """Permutations without end, so that no worker is started anew."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._samples).tolist()


def alone(_: int) -> None:
    """The workers are the threads; OpenCV's own would be too many."""
    cv2.setNumThreads(0)


def batches(asked: dict[str, Any]) -> Iterator[int]:
    paths = sorted(Path(asked["images"]).rglob("*.JPEG"))
    files = Files(paths, by_opencv if asked["decoder"] == "opencv" else by_pillow)
    loader = DataLoader(
        files, asked["batch"], sampler=Endless(len(paths)), num_workers=asked["threads"], worker_init_fn=alone
    )
    for images, _ in loader:
        yield len(images)


if __name__ == "__main__":
    asked = argument()
    opencv = asked["decoder"] == "opencv"
    name = f"OpenCV {cv2.__version__}" if opencv else f"Pillow {PIL.__version__}"
    kernel = "OpenCV INTER_LINEAR, not antialiased" if opencv else "Pillow's antialiased bilinear"
    serve(batches(asked), version=f"{name}, torch {torch.__version__}", kernel=kernel)
