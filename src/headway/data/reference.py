"""The Pillow reference for one image: it defines what every decoder does.

A box (left, top, width, height) of an image is resized to the output with Pillow's antialiased bilinear kernel. A bad
image fills zeros and sets its status.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image

from headway.data.columns import FLAG_NOT_JPEG, FLAG_PLANAR, FLAG_RAW
from headway.data.records import Records

if TYPE_CHECKING:
    from headway.data.dataset import Dataset

Pixels = NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""Nothing else is opened, whatever a file is called: some of Pillow's formats start programs (EPS)."""
GRAY_MODES = frozenset({"1", "L", "LA", "La", "F", "I", "I;16", "I;16L", "I;16B", "I;16N"})


class Status(IntEnum):
    """What became of one image."""

    OK = 0
    CHECKSUM = 1
    UNDECODABLE = 2


class Kind(IntEnum):
    """What the bytes of a record are."""

    JPEG = 0
    RAW = 1
    """uint8 [h, w, c]."""
    PLANAR = 2
    """uint8 [c, h, w]."""
    OTHER = 3
    """Another image format, which the reference decodes whatever the backend."""


def kinds_of(flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`Kind` of records by the flags of their columns; uint8 [k]."""
    kinds = np.where(flags & FLAG_RAW, np.where(flags & FLAG_PLANAR, Kind.PLANAR, Kind.RAW), Kind.JPEG)
    return np.where(flags & FLAG_NOT_JPEG, Kind.OTHER, kinds).astype(np.uint8)


@final
@dataclass(slots=True)
class Stats:
    """Sums over the batches that were timed: one of 16. Seconds are thread time: of two threads, up to twice the wall.

    Attributes:
        images: of those batches.
        check_s, decode_s, resample_s: checksums; entropy decoding, inverse DCT and colour; resizing and writing.
        record_bytes, used_bytes: of the records, and what of them was entropy-decoded.
        pixels: that were decoded.
        direct: images that the native core's own decoder did; libjpeg-turbo and Pillow did the others.
    """

    images: int = 0
    check_s: float = 0.0
    decode_s: float = 0.0
    resample_s: float = 0.0
    record_bytes: int = 0
    used_bytes: int = 0
    pixels: int = 0
    direct: int = 0

    def add(self, other: Stats) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def to_pixels(data: bytes | memoryview, channels: int) -> Image.Image:
    """A decoded image of mode L (1 channel) or RGB (3). Raises whatever Pillow raises of a bad one."""
    return converted(Image.open(io.BytesIO(data), formats=FORMATS), channels)


def converted(image: Image.Image, channels: int) -> Image.Image:
    """An image in mode L (1 channel) or RGB (3)."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def decode_one(
    data: bytes | memoryview, out: Pixels, box: NDArray[np.float32], *, flip: bool = False, scaled: bool = False
) -> Status:
    """Decodes one image file into `out` (uint8 [H, W, C]); the arguments of `Decoder`, for one."""
    return _fill(lambda: _opened(data, out.shape, box if scaled else None), out, box, flip, Stats())


def _opened(data: bytes | memoryview, shape: Sequence[int], box: NDArray[np.float32] | None) -> tuple[Image.Image, int]:
    """An image, and by how much smaller it is decoded: where a box is given, while that has the output's pixels."""
    image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    scale = 1
    if box is not None and image.format == "JPEG":
        while scale < 8 and box[2] >= 2 * scale * shape[1] and box[3] >= 2 * scale * shape[0]:
            scale *= 2
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
    return converted(image, shape[2]), scale


def _raw(data: memoryview, shape: NDArray[np.uint32], planar: bool, channels: int) -> tuple[Image.Image, int]:
    h, w, c = shape.tolist()
    pixels = np.frombuffer(data, np.uint8).reshape((c, h, w) if planar else (h, w, c))
    pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0)) if planar else pixels
    return converted(Image.fromarray(pixels[..., 0] if c == 1 else pixels), channels), 1


def picture(dataset: Dataset, sample: int) -> Image.Image:
    """A sample's image, whole, in mode L or RGB as the data set's channels are. Raises whatever Pillow raises."""
    found, flags = dataset.description, int(dataset.flags[sample])
    data = dataset.read([sample])[0]
    if flags & FLAG_RAW:
        shape = np.array([dataset.height[sample], dataset.width[sample], found.channels], np.uint32)
        return _raw(data, shape, bool(flags & FLAG_PLANAR), found.channels)[0]
    return to_pixels(data, found.channels)


def _fill(
    source: Callable[[], tuple[Image.Image, int]], out: Pixels, box: NDArray[np.float32], flip: bool, stats: Stats
) -> Status:
    start = time.perf_counter()
    try:
        image, scale = source()
        image.load()
        stats.pixels += image.width * image.height
        decoded = time.perf_counter()
        left, top, width, height = (float(side) / scale for side in box)
        right, bottom = float(np.float32(left + width)), float(np.float32(top + height))  # as Pillow rounds
        if not (left < right and top < bottom):  # or one is no number; Pillow would take it
            raise ValueError("an empty box")
        size = (out.shape[1], out.shape[0])
        if (left, top, right, bottom) != (0.0, 0.0, *size) or image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, right, bottom))
        pixels = np.asarray(image).reshape(out.shape)
        out[:] = pixels[:, ::-1] if flip else pixels
        stats.decode_s += decoded - start
        stats.resample_s += time.perf_counter() - decoded
    except Exception:  # Pillow's plugins raise anything from OSError to struct.error on damaged bytes
        out[:] = 0
        return Status.UNDECODABLE
    return Status.OK


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of a `Decoder`."""

    records: Records
    boxes: NDArray[np.float32]
    out: Pixels
    flips: NDArray[np.bool_] | None
    kinds: NDArray[np.uint8] | None
    shapes: NDArray[np.uint32] | None
    crc: NDArray[np.uint32] | None
    check: NDArray[np.bool_] | None
    scaled: bool

    def decode_one(self, place: int, stats: Stats) -> Status:
        data, out, box = self.records[place], self.out[place], self.boxes[place]
        stats.record_bytes += len(data)
        if self.crc is not None and (self.check is None or self.check[place]):
            start = time.perf_counter()
            good = crc32c(data) == self.crc[place]
            stats.check_s += time.perf_counter() - start
            if not good:
                out[:] = 0
                return Status.CHECKSUM
        stats.used_bytes += len(data)
        flip = self.flips is not None and bool(self.flips[place])
        kind = Kind.JPEG if self.kinds is None else self.kinds[place]
        if kind in (Kind.RAW, Kind.PLANAR):
            assert self.shapes is not None, "raw records need shapes"
            shape, planar = self.shapes[place], kind == Kind.PLANAR
            return _fill(lambda: _raw(data, shape, planar, out.shape[2]), out, box, flip, stats)
        return _fill(lambda: _opened(data, out.shape, box if self.scaled else None), out, box, flip, stats)


def move(data: bytes | memoryview, out: Pixels, *, planar: bool, shift: NDArray[np.int64] | None, flip: bool) -> None:
    """Copies one raw image, mirrored, then moved by shift (down, right) with the border filled by reflection."""
    height, width, channels = out.shape
    pixels = np.frombuffer(data, np.uint8, out.size)
    pixels = pixels.reshape(channels, height, width).transpose(1, 2, 0) if planar else pixels.reshape(out.shape)
    if flip:
        pixels = pixels[:, ::-1]
    if shift is not None:
        down, right = shift
        rows, columns = _reflected(np.arange(height) + down, height), _reflected(np.arange(width) + right, width)
        pixels = pixels[rows[:, None], columns]
    out[:] = pixels


def _reflected(index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    mirrored: NDArray[np.int64] = np.abs(size - 1 - np.abs(size - 1 - index))
    return mirrored
