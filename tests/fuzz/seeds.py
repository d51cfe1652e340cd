"""JPEGs of every kind, all of them good, from which damaged ones are made."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

REAL_BYTES = 25_000
"""Of the largest real file taken, so that most of the time goes into many images."""


def resampled(data: bytes, h: int, v: int, width: int, height: int) -> bytes:
    """The same coefficients under other sampling factors of the first component, of which the product stays."""
    out, at = bytearray(data), 2
    while out[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + struct.unpack_from(">H", out, at + 2)[0]
    struct.pack_into(">HH", out, at + 5, height, width)
    out[at + 11] = h << 4 | v
    return bytes(out)


def write_seeds(folder: Path, real: Path | None) -> None:
    """JPEGs of every kind, all of them good: small ones made here, and the smallest of a folder of real ones."""
    random = np.random.default_rng(0)

    def save(name: str, width: int, height: int, mode: str, **options: object) -> Path:
        channels = len(Image.new(mode, (1, 1)).getbands())
        coarse = random.integers(0, 256, (height // 6 + 2, width // 6 + 2, channels), dtype=np.uint8)
        bands = [Image.fromarray(coarse[..., channel]) for channel in range(channels)]
        image = Image.merge(mode, bands).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"{name}.jpg", "JPEG", **options)
        return folder / f"{name}.jpg"

    sizes = [(1, 1), (7, 3), (16, 16), (33, 50), (90, 61), (150, 100)]
    for width, height in sizes:
        for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
            name = f"{width}x{height}-{subsampling.replace(':', '')}"
            save(f"{name}-rgb", width, height, "RGB", subsampling=subsampling, quality=85)
            save(f"{name}-rst", width, height, "RGB", subsampling=subsampling, restart_marker_blocks=3)
            save(f"{name}-cmyk", width, height, "CMYK", subsampling=subsampling)
            save(f"{name}-progressive", width, height, "RGB", subsampling=subsampling, progressive=True)
        save(f"{width}x{height}-gray", width, height, "L")
        save(f"{width}x{height}-gray-progressive", width, height, "L", progressive=True)
    exif, comment = Image.Exif(), b"a comment of no weight"
    exif[0x0112] = 6
    save("exif", 40, 30, "RGB", exif=exif, comment=comment, icc_profile=bytes(3000))
    for h, v, subsampling in ((1, 2, "4:2:2"), (4, 1, "4:2:0"), (1, 4, "4:2:0")):
        path = save(f"{h}x{v}", 96, 64, "RGB", subsampling=subsampling)
        old_h, old_v = (2, 1) if subsampling == "4:2:2" else (2, 2)
        path.write_bytes(resampled(path.read_bytes(), h, v, 96 // old_h * h - 3, 64 // old_v * v - 2))
    for source in sorted(real.rglob("*.JPEG"))[:100] if real else []:
        if source.stat().st_size <= REAL_BYTES:
            (folder / source.name).write_bytes(source.read_bytes())
