"""Builds the fuzz driver (native/fuzz) and runs it over JPEGs of every kind.

`python -m tests.fuzz.campaign COUNT SEED` does so with COUNT damaged images.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/fuzz"
REAL_BYTES = 25_000
"""Of the largest real file taken, so that most of the time goes into many images."""


def build() -> Path:
    """The driver, compiled anew where its sources have changed."""
    options = ["-D", "HEADWAY_FUZZ=ON", "-D", "HEADWAY_STRICT=ON", "-D", "CMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure = ["cmake", "-S", ROOT / "native", "-B", BUILD, *options]
    for command in (configure, ["cmake", "--build", BUILD, "--target", "headway_fuzz", "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the fuzz driver does not build:\n{done.stdout}\n{done.stderr}")
    return BUILD / "fuzz/headway_fuzz"


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


def run(count: int, seed: int, real: Path | None, folder: Path) -> int:
    """Runs the driver in a folder, where it leaves the files of a batch that fails. Returns its exit status."""
    driver, seeds = build(), folder / "seeds"
    seeds.mkdir()
    write_seeds(seeds, real)
    return subprocess.run([driver, seeds, str(count), str(seed)], cwd=folder, check=False).returncode


def main(count: str, seed: str) -> int:
    real = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data") / "imagenet-250"
    folder = Path(tempfile.mkdtemp(prefix="headway-fuzz-"))
    status = run(int(count), int(seed), real if real.is_dir() else None, folder)
    if status:
        print(f"It failed; the files are in {folder}")
    else:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
