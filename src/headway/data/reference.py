"""The Pillow reference for one image: it defines the result of every decoder.

A box (left, top, width, height) of an image is resized to the output with Pillow's antialiased bilinear kernel. A bad
image is filled with zeros and sets its status.
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
from headway.data.decode_request import DecodeRequest, GatherRequest, Pixels

if TYPE_CHECKING:
    from headway.data.dataset import Dataset

# Whether an image is mirrored left to right, and top to bottom.
Mirrors = tuple[bool, bool]

PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""The only formats that are opened, whatever a file is called: some of Pillow's formats start programs (EPS)."""
GRAY_MODES = frozenset({"1", "L", "LA", "La", "F", "I", "I;16", "I;16L", "I;16B", "I;16N"})


class DecodeStatus(IntEnum):
    """Result of decoding one image."""

    OK = 0
    CHECKSUM = 1
    UNDECODABLE = 2


class RecordKind(IntEnum):
    """Format of a record's bytes."""

    JPEG = 0
    RAW = 1
    """uint8 [h, w, c]."""
    PLANAR = 2
    """uint8 [c, h, w]."""
    OTHER = 3
    """Another image format. The reference decodes it under every backend."""


def find_record_kinds(flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the `RecordKind` of records from their column flags; uint8 [k]."""
    kinds = np.where(
        flags & FLAG_RAW, np.where(flags & FLAG_PLANAR, RecordKind.PLANAR, RecordKind.RAW), RecordKind.JPEG
    )
    return np.where(flags & FLAG_NOT_JPEG, RecordKind.OTHER, kinds).astype(np.uint8)


@final
@dataclass(slots=True)
class DecodeStats:
    """Sums over the timed batches, one of 16. Seconds are thread time: with two threads, up to twice the wall time.

    Attributes:
        images: number of images in those batches.
        check_s: seconds for checksums.
        decode_s: seconds for entropy decoding, inverse DCT and colour conversion.
        resample_s: seconds for resizing and writing.
        record_bytes: size of the records.
        used_bytes: bytes of the records that were entropy-decoded.
        pixels: number of decoded pixels.
        direct: images decoded by the native core's own decoder; libjpeg-turbo and Pillow decode the others.
    """

    images: int = 0
    check_s: float = 0.0
    decode_s: float = 0.0
    resample_s: float = 0.0
    record_bytes: int = 0
    used_bytes: int = 0
    pixels: int = 0
    direct: int = 0

    def add(self, other: DecodeStats) -> None:
        """Adds another batch's sums to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def decode_image(data: bytes | memoryview, channels: int) -> Image.Image:
    """Decodes an image file to mode L (1 channel) or RGB (3). Raises any error of Pillow if the file is damaged."""
    return convert_mode(Image.open(io.BytesIO(data), formats=PILLOW_FORMATS), channels)


def convert_mode(image: Image.Image, channels: int) -> Image.Image:
    """Converts an image to mode L (1 channel) or RGB (3)."""
    mode = "L" if channels == 1 else "RGB"
    # 16-bit gray: Pillow's own conversion clips at 255, so the high byte is taken here.
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    # Pillow warns if a palette with transparency is converted to RGB directly.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def decode_one(
    data: bytes | memoryview,
    out: Pixels,
    box: NDArray[np.float32],
    *,
    flip: bool = False,
    vertical_flip: bool = False,
    scaled: bool = False,
) -> DecodeStatus:
    """Decodes one image file into `out`, uint8 [H, W, C]. The arguments are those of `DecodeRequest`, for one image."""
    mirrors = flip, vertical_flip
    return _resize_into(
        lambda: _open_scaled(data, out.shape, box if scaled else None), out, box, mirrors, DecodeStats()
    )


def _open_scaled(
    data: bytes | memoryview, shape: Sequence[int], box: NDArray[np.float32] | None
) -> tuple[Image.Image, int]:
    """Opens an image; with a box, at the smallest scale at which the box still has the output's pixels.

    Returns:
        the image, and the factor by which it is smaller: 1, 2, 4 or 8.
    """
    image: Image.Image = Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)
    scale = 1
    if box is not None and image.format == "JPEG":
        while scale < 8 and box[2] >= 2 * scale * shape[1] and box[3] >= 2 * scale * shape[0]:
            scale *= 2
        # `draft` makes libjpeg decode at this scale; it must come before the first load.
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
    return convert_mode(image, shape[2]), scale


def _open_raw(data: memoryview, shape: NDArray[np.uint32], planar: bool, channels: int) -> tuple[Image.Image, int]:
    # A record that is too short fails in reshape, and the caller reports it as undecodable.
    h, w, c = shape.tolist()
    pixels = np.frombuffer(data, np.uint8).reshape((c, h, w) if planar else (h, w, c))
    pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0)) if planar else pixels
    return convert_mode(Image.fromarray(pixels[..., 0] if c == 1 else pixels), channels), 1


def read_image(dataset: Dataset, sample: int) -> Image.Image:
    """Reads a sample's whole image in mode L or RGB, by the data set's channels.

    Raises DataError if the record cannot be read, or any error of Pillow if it is damaged.
    """
    description = dataset.description
    flags = int(dataset.flags[sample])
    data = dataset.read([sample])[0]
    if flags & FLAG_RAW:
        shape = np.array([dataset.height[sample], dataset.width[sample], description.channels], np.uint32)
        return _open_raw(data, shape, bool(flags & FLAG_PLANAR), description.channels)[0]
    return decode_image(data, description.channels)


def _resize_into(
    open_image: Callable[[], tuple[Image.Image, int]],
    out: Pixels,
    box: NDArray[np.float32],
    mirrors: Mirrors,
    stats: DecodeStats,
) -> DecodeStatus:
    start_time = time.perf_counter()
    try:
        image, scale = open_image()
        image.load()
        stats.pixels += image.width * image.height
        decode_end = time.perf_counter()
        left, top, width, height = (float(side) / scale for side in box)
        # Pillow holds the corners as float32: the comparison below must see the same numbers.
        right, bottom = float(np.float32(left + width)), float(np.float32(top + height))
        # Written so that a NaN fails it too: Pillow would accept one.
        if not (left < right and top < bottom):
            raise ValueError("an empty box")
        size = (out.shape[1], out.shape[0])
        # A box that is the whole image at the output's size needs no resize: the pixels stay exact.
        if (left, top, right, bottom) != (0.0, 0.0, *size) or image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, right, bottom))
        pixels = np.asarray(image).reshape(out.shape)
        out[:] = _mirror(pixels, mirrors)
        stats.decode_s += decode_end - start_time
        stats.resample_s += time.perf_counter() - decode_end
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception:
        out[:] = 0
        return DecodeStatus.UNDECODABLE
    return DecodeStatus.OK


def decode_record(request: DecodeRequest, index: int, stats: DecodeStats) -> DecodeStatus:
    """Decodes record `index` of a batch into `request.out[index]`, returns its status, and adds its cost to `stats`."""
    data, out, box = request.records[index], request.out[index], request.boxes[index]
    stats.record_bytes += len(data)
    if request.crc is not None and (request.check is None or request.check[index]):
        start = time.perf_counter()
        is_good = crc32c(data) == request.crc[index]
        stats.check_s += time.perf_counter() - start
        if not is_good:
            out[:] = 0
            return DecodeStatus.CHECKSUM
    # Pillow reads a whole record, even for a small box.
    stats.used_bytes += len(data)
    mirrors = read_mirrors(request, index)
    kind = RecordKind.JPEG if request.kinds is None else request.kinds[index]
    if kind in (RecordKind.RAW, RecordKind.PLANAR):
        assert request.shapes is not None, "raw records need shapes"
        shape = request.shapes[index]
        planar = kind == RecordKind.PLANAR
        return _resize_into(lambda: _open_raw(data, shape, planar, out.shape[2]), out, box, mirrors, stats)
    scaling_box = box if request.scaled else None
    return _resize_into(lambda: _open_scaled(data, out.shape, scaling_box), out, box, mirrors, stats)


def read_mirrors(request: DecodeRequest | GatherRequest, index: int) -> Mirrors:
    """Returns whether record `index` of a batch is mirrored left to right, and top to bottom."""
    masks = request.flips, request.vertical_flips
    horizontal, vertical = (mask is not None and bool(mask[index]) for mask in masks)
    return horizontal, vertical


def _mirror(pixels: Pixels, mirrors: Mirrors) -> Pixels:
    horizontal, vertical = mirrors
    return pixels[:: -1 if vertical else 1, :: -1 if horizontal else 1]


def copy_raw_image(
    data: bytes | memoryview, out: Pixels, *, planar: bool, shift: NDArray[np.int64] | None, mirrors: Mirrors
) -> None:
    """Copies one raw image into `out`, mirrored, then moved by `shift` (down, right; reflection padding)."""
    height, width, channels = out.shape
    pixels = np.frombuffer(data, np.uint8, out.size)
    pixels = pixels.reshape(channels, height, width).transpose(1, 2, 0) if planar else pixels.reshape(out.shape)
    pixels = _mirror(pixels, mirrors)
    # Indices outside the image are reflected: a gather instead of a padded copy.
    if shift is not None:
        down, right = shift
        row_index, column_index = (
            _reflect_index(np.arange(height) + down, height),
            _reflect_index(np.arange(width) + right, width),
        )
        pixels = pixels[row_index[:, None], column_index]
    out[:] = pixels


def _reflect_index(index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    reflected: NDArray[np.int64] = np.abs(size - 1 - np.abs(size - 1 - index))
    return reflected
