"""Looks at the header of an image before it is decoded: its format, and the pixels that decoding would take."""

from __future__ import annotations

import io
from typing import final

from PIL import Image

from headway.data import native

# Fewer formats than `headway predict` opens: every decoder that strangers reach is a risk.
_JPEG, _PNG, _WEBP = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF"
_SCAN = b"\xff\xda"

MAX_SCANS, MAX_PASSES = 500, 50
"""Most scans of a progressive JPEG, and how many times the pixels of the largest image all its scans may have.

A scan may have fourteen bytes, and costs a pass over the whole image. Encoders write about ten; data behind the image
hold the two bytes of the marker by chance, once in 64 KiB.
"""


@final
class BadImageError(Exception):
    """An image is refused; the message follows the name of the image, such as "is damaged"."""


def measure_image(data: bytes, most_pixels: int) -> tuple[int, int]:
    """Returns (width, height) from the header of an image file.

    Args:
        data: the file.
        most_pixels: largest width x height.

    Raises:
        BadImageError: another format, a damaged header, or too many pixels.
    """
    try:
        if data.startswith(_JPEG):
            width, height = _measure_jpeg(data)
            scans = data.count(_SCAN)
            if scans > MAX_SCANS or scans * width * height > MAX_PASSES * most_pixels:
                raise BadImageError(f"has {scans:,} scans, too many for {width:,} x {height:,} pixels")
        elif data.startswith(_PNG):
            # By the parser that decodes it: the size is not that of the first bytes if there are chunks before IHDR, or
            # a second one.
            width, height = _measure_by_pillow(data, "PNG")
        elif data.startswith(_WEBP) and data[8:12] == b"WEBP":
            width, height = _measure_by_pillow(data, "WEBP")
        else:
            raise BadImageError("is neither a JPEG, a PNG nor a WebP file")
    except BadImageError:
        raise
    except Image.DecompressionBombError as error:
        raise BadImageError("has more pixels than can be decoded here") from error
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        raise BadImageError("has a damaged header") from error
    if width * height > most_pixels:
        what = f"has {width:,} x {height:,} pixels, more than the {most_pixels:,} that are decoded here"
        raise BadImageError(what)
    if not width or not height:
        raise BadImageError("has no pixels")
    return width, height


def _measure_jpeg(data: bytes) -> tuple[int, int]:
    # Pillow knows some kinds that the core does not.
    size = native.read_jpeg_size(data) if native.is_available() else None
    return size or _measure_by_pillow(data, "JPEG")


def _measure_by_pillow(data: bytes, form: str) -> tuple[int, int]:
    with Image.open(io.BytesIO(data), formats=(form,)) as image:
        return image.size
