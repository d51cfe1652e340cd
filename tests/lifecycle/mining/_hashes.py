"""Made-up images, and hashes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from headway.lifecycle.copies.image_hashes import THUMBNAIL_SIZE, ImageHashes, compute_dhash, find_flat


def make_hashes(thumbnails: Any, *, resolution: Any = None, digests: Any = None, is_good: Any = None) -> ImageHashes:
    """Hashes of images of these thumbnails; every file has bytes of its own unless `digests` says otherwise."""
    pixels = np.asarray(thumbnails, np.uint8).reshape(-1, *THUMBNAIL_SIZE)
    count = len(pixels)
    marks = np.arange(count) if digests is None else np.asarray(digests)
    content = np.zeros((count, 32), np.uint8)
    content[:, :2] = np.stack([marks % 256, marks // 256], axis=1)
    return ImageHashes(
        digests=content,
        dhash=compute_dhash(pixels),
        thumbnails=pixels,
        is_good=np.ones(count, np.bool_) if is_good is None else np.asarray(is_good, np.bool_),
        is_flat=find_flat(pixels),
        resolution=np.full(count, 100, np.int64) if resolution is None else np.asarray(resolution, np.int64),
        size_bytes=np.full(count, 10, np.int64),
    )


def draw_thumbnails(seed: int, count: int) -> np.ndarray:
    """Smooth random pictures whose values leave room above and below."""
    coarse = np.random.default_rng(seed).integers(60, 190, size=(count, 8, 9))
    return np.repeat(np.repeat(coarse, 2, axis=1), 2, axis=2).astype(np.uint8)


def draw_photograph(number: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """A smooth picture with fine noise; another one for another number."""
    generator = np.random.default_rng(number)
    coarse = Image.fromarray(generator.integers(20, 220, (8, 10, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = generator.normal(0, 8, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8))


def write_copies(folder: Path, photographs: int = 6) -> None:
    """Photographs, each also at half its size, of quality 50, 10 % brighter and 10 % darker, as files."""
    folder.mkdir(parents=True)
    for number in range(photographs):
        image = draw_photograph(number)
        image.save(folder / f"{number}-whole.jpg", quality=95)
        image.resize((160, 120)).save(folder / f"{number}-half.png")
        image.save(folder / f"{number}-poor.jpg", quality=50)
        for name, factor in (("bright", 1.1), ("dark", 0.9)):
            ImageEnhance.Brightness(image).enhance(factor).save(folder / f"{number}-{name}.jpg", quality=92)
