"""Image files of every kind that Headway reads: formats, modes, compressions, a picture that its EXIF entry turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def _to_sixteen_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def _to_transparent_palette(image: Image.Image) -> Image.Image:
    palette = image.quantize(32)
    palette.info["transparency"] = 3
    return palette


def _turn() -> dict[str, Any]:
    exif = Image.Exif()
    # Orientation 6: a viewer turns the picture by 90 degrees.
    exif[0x0112] = 6
    return {"exif": exif}


Convert = Callable[[Image.Image], Image.Image]
KINDS: dict[str, tuple[Convert, dict[str, Any]]] = {
    "jpg": (lambda image: image, {"quality": 90}),
    "exif.jpg": (lambda image: image, _turn()),
    "gray.jpg": (lambda image: image.convert("L"), {}),
    "progressive.jpg": (lambda image: image, {"progressive": True, "quality": 75}),
    "444.jpg": (lambda image: image, {"subsampling": 0}),
    "cmyk.jpg": (lambda image: image.convert("CMYK"), {}),
    "png": (lambda image: image, {}),
    "alpha.png": (lambda image: image.convert("RGBA"), {}),
    "gray.png": (lambda image: image.convert("L"), {}),
    "gray-alpha.png": (lambda image: image.convert("LA"), {}),
    "palette.png": (_to_transparent_palette, {}),
    "sixteen.png": (_to_sixteen_bits, {}),
    "bit.png": (lambda image: image.convert("1"), {}),
    "gif": (lambda image: image.quantize(64), {}),
    "bmp": (lambda image: image, {}),
    "webp": (lambda image: image, {"quality": 80}),
    "tif": (lambda image: image, {}),
    "ppm": (lambda image: image, {}),
}
"""How an image is converted and saved, by the end of its file's name."""


def save_kind(image: Image.Image, folder: Path, number: int) -> Path:
    """Saves an image as the kind of file that is due, as FOLDER/NUMBER-WIDTHxHEIGHT.KIND, and returns its path."""
    kind = list(KINDS)[number % len(KINDS)]
    convert, options = KINDS[kind]
    path = folder / f"{number:03d}-{image.width}x{image.height}.{kind}"
    convert(image).save(path, **options)
    return path
