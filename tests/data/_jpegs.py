"""JPEGs of every kind, and one image through the native core."""

from __future__ import annotations

import io
import struct

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from headway.data import native
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]
"""x0, y0, x1, y1; half open."""

SAMPLINGS = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2)}
"""What Pillow writes; of the first component, the others being 1 x 1."""
OTHER_SAMPLINGS = {(1, 2): "4:2:2", (4, 1): "4:2:0", (1, 4): "4:2:0"}
"""What it does not write, and of which as many blocks are in an MCU: 4:4:0, 4:1:1 and 4:1:1 upright."""


def jpeg(width: int, height: int, mode: str = "RGB", seed: int = 0, **options: object) -> bytes:
    """A JPEG of smooth random colours, with some noise."""
    random = np.random.default_rng(seed)
    shape = (height, width, len(Image.new(mode, (1, 1)).getbands()))
    coarse = random.integers(0, 256, (height // 6 + 2, width // 6 + 2, shape[2]), dtype=np.uint8)
    bands = [
        Image.fromarray(coarse[..., band]).resize((width, height), Image.Resampling.BICUBIC) for band in range(shape[2])
    ]
    pixels = np.stack([np.asarray(band) for band in bands], axis=2) // 2 + random.integers(
        0, 128, shape, dtype=np.uint8
    )
    file = io.BytesIO()
    Image.merge(mode, [Image.fromarray(pixels[..., band]) for band in range(shape[2])]).save(file, "JPEG", **options)
    return file.getvalue()


def find(data: bytes, markers: tuple[int, ...]) -> int:
    """Where the first segment of one of these markers begins."""
    at = 2
    while data[at + 1] not in markers:
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return at


def without(data: bytes, marker: int) -> bytes:
    """The file without the segments of one kind that are before its first scan."""
    out, at = data[:2], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        out += data[at:end] if data[at + 1] != marker else b""
        at = end
    return out + data[at:]


def resampled(width: int, height: int, h: int, v: int, seed: int = 0, **options: object) -> bytes:
    """A JPEG of sampling factors that Pillow does not write: its blocks are read in another order."""
    subsampling = OTHER_SAMPLINGS[h, v]
    old_h, old_v = SAMPLINGS[subsampling]
    across, down = -(-width // (8 * h)), -(-height // (8 * v))
    file = jpeg(8 * old_h * across, 8 * old_v * down, seed=seed, subsampling=subsampling, **options)
    out = bytearray(file)
    frame = find(file, (0xC0, 0xC2))
    struct.pack_into(">HH", out, frame + 5, height, width)
    out[frame + 11] = h << 4 | v
    return bytes(out)


def pillow(data: bytes, mode: str = "RGB") -> Pixels:
    """All pixels, uint8 [H, W, C], by Pillow."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        pixels = np.asarray(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def decode(data: bytes, region: Region, pool: native.NativePool, channels: int = 3) -> tuple[int, Pixels]:
    """Status and pixels of a region, not resized, by the native core."""
    x0, y0, x1, y1 = region
    out = np.full((1, y1 - y0, x1 - x0, channels), 7, np.uint8)
    box = np.array([[x0, y0, x1 - x0, y1 - y0]], np.float32)
    return int(pool.decode(DecodeRequest(Records.from_buffers([data]), box, out))[0]), out[0]


@st.composite
def regions(draw: st.DrawFn, width: int, height: int) -> Region:
    """A region of an image; half of its edges are edges of blocks, where neighbours come in."""
    edges = []
    for size in (width, height):
        inner = st.one_of(st.integers(0, size - 1), st.integers(0, (size - 1) // 8).map(lambda block: 8 * block))
        low = draw(inner)
        edges.append((low, draw(st.one_of(st.just(size), inner.filter(lambda high, low=low: high > low)))))
    (x0, x1), (y0, y1) = edges
    return x0, y0, x1, y1


def unfinished(data: bytes) -> bytes:
    """A progressive file without its last scans."""
    third = [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"][2]
    return data[: data.rfind(b"\xff\xc4", 0, third)] + data[-2:]
