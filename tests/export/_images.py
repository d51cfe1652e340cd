"""Image files that a network tells apart: three colours, and digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench._export.image_kinds import KINDS, save_kind
from PIL import Image
from tests._support import digits_arrays

COLOURS = {"green": (90, 150, 90), "red": (150, 90, 90), "blue": (90, 90, 150)}
SIZES = ((61, 47), (200, 33), (7, 90), (129, 97), (1, 1))
"""(width, height): odd, wide, narrow, a single pixel."""


def draw(number: int, size: tuple[int, int], colour: tuple[int, int, int], noise: float = 6) -> Image.Image:
    """A picture of soft clouds, (width, height), in a colour that the network shall find; another for each number."""
    random = np.random.default_rng(number)
    clouds = random.integers(0, 256, (5, 6, 3), np.uint8)
    tint = 0.5 * np.asarray(Image.fromarray(clouds).resize(size, Image.Resampling.BICUBIC)) + 0.5 * np.array(colour)
    return Image.fromarray((tint + random.normal(0, noise, tint.shape)).clip(0, 255).astype(np.uint8))


def draw_colour(number: int, size: tuple[int, int]) -> Image.Image:
    """A picture in one of the colours."""
    return draw(1000 + number, size, list(COLOURS.values())[number % len(COLOURS)])


def draw_digit(number: int, size: tuple[int, int]) -> Image.Image:
    """A digit, white on black as those of `packed_digits`, with a tinge."""
    pixels = np.rint(digits_arrays()[0][300 + 7 * number] * (255 / 16)).astype(np.uint8)
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return Image.merge("RGB", [image.point([int(value * share) for value in range(256)]) for share in (1, 0.9, 0.8)])


def write_files(
    folder: Path, count: int, own_size: tuple[int, int], draw_one: Callable[[int, tuple[int, int]], Image.Image]
) -> None:
    """Writes so many files. Each kind and each size occurs if there are enough; so does (width, height) `own_size`."""
    folder.mkdir()
    for number in range(count):
        size = (*SIZES, own_size)[(number + number // len(KINDS)) % (len(SIZES) + 1)]
        save_kind(draw_one(number, size), folder, number)


def write_classes(folder: Path, per_class: int) -> None:
    """Writes an image folder of JPEG files: folder/CLASS/NN.jpg."""
    for place, (name, colour) in enumerate(COLOURS.items()):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            draw(100 * place + number, (48, 40), colour).save(folder / name / f"{number:02d}.jpg")
