"""Bodies of `POST /predict`: one image, a form of several, or pixels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.data.image_check import BadImageError, measure_image
from headway.export.serve.problems import refuse_images
from headway.http.multipart import parse_boundary, parse_multipart
from headway.http.problems import ProblemError

IMAGE_TYPES = frozenset(("image/jpeg", "image/png", "image/webp"))
"""Media types of one encoded image. `measure_image` looks at the bytes, not at this name."""
FORM_TYPE = "multipart/form-data"
PIXEL_TYPE = "application/octet-stream"
SHAPE_HEADER = "X-Shape"
# Clients that do not know an ending send one of these for a file.
_UNNAMED_TYPES = ("", PIXEL_TYPE)

# At most seven digits for each side: a product of four cannot overflow 64 bits by much, and Python's do not overflow.
_SHAPE = re.compile(r"\s*(\d{1,7})\s*,\s*(\d{1,7})\s*,\s*(\d{1,7})\s*,\s*(\d{1,7})\s*")


@final
@dataclass(frozen=True, slots=True)
class Payload:
    """Images of one request.

    Attributes:
        names: one for each image, for the column `path` of the answer.
        files: bytes of encoded images; empty if there are pixels.
        sides: (width, height) of each file.
        pixels: uint8 [n, H, W, C]; None if there are files.
    """

    names: Sequence[str]
    files: Sequence[bytes] = ()
    sides: Sequence[tuple[int, int]] = ()
    pixels: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def count_pixels(self) -> int:
        """Returns how many pixels are to be decoded."""
        return sum(width * height for width, height in self.sides)

    def count_bytes(self) -> int:
        """Returns how many bytes of files are to be decoded."""
        return sum(map(len, self.files))


_ONE_IMAGE = ("image 0",)


def check_media_type(content_type: str) -> str:
    """Returns the media type in lower case, without parameters. Raises ProblemError (415) if it is not served."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in IMAGE_TYPES and media_type not in (FORM_TYPE, PIXEL_TYPE):
        what = f"a body of type {media_type[:80]!r} is not served" if media_type else "the request has no Content-Type"
        fix = "Send an image as image/jpeg, image/png or image/webp, several as multipart/form-data, pixels as "
        fix += f"application/octet-stream with {SHAPE_HEADER}."
        accepted = ", ".join((*sorted(IMAGE_TYPES), FORM_TYPE, PIXEL_TYPE))
        raise ProblemError(415, what, fix, headers=[(b"accept-post", accepted.encode())])
    return media_type


def parse_body(
    media_type: str, content_type: str, shape: str | None, body: bytes, *, images: int, image_pixels: int, pixels: int
) -> Payload:
    """Returns the images in a body.

    Args:
        media_type: from `check_media_type`.
        content_type: the whole header, which holds the boundary of a form.
        shape: the header X-Shape, for pixels.
        images: most images.
        image_pixels: most pixels of one image.
        pixels: most pixels of all images.

    Raises:
        ProblemError: the body is malformed (400), is empty or has a bad image (422), has too many images or pixels
            (413), or a part that is none (415).
    """
    if media_type == PIXEL_TYPE:
        return _parse_pixels(shape, body, images)
    if media_type != FORM_TYPE:
        if not body:
            raise ProblemError(422, "the request has no body", "Send the bytes of an image.")
        return _measure(_ONE_IMAGE, (body,), image_pixels, pixels)
    parts = parse_multipart(body, parse_boundary(content_type), images)
    if not parts:
        raise ProblemError(422, "the form holds no image", "Send at least one: curl -F image=@photo.jpg.")
    for number, part in enumerate(parts, 1):
        if part.media_type not in IMAGE_TYPES and part.media_type not in _UNNAMED_TYPES:
            what = f"part {number} of the form is {part.media_type[:80]!r}, and no image"
            raise ProblemError(415, what, "Send image/jpeg, image/png or image/webp.")
    names = [part.name or f"image {place}" for place, part in enumerate(parts)]
    return _measure(names, [part.data for part in parts], image_pixels, pixels)


def _measure(names: Sequence[str], files: Sequence[bytes], image_pixels: int, pixels: int) -> Payload:
    """Returns a payload of files, of which only the headers have been read."""
    faults, sides = dict[int, str](), list[tuple[int, int]]()
    for place, data in enumerate(files):
        try:
            sides.append(measure_image(data, image_pixels))
        except BadImageError as error:
            faults[place] = str(error)
    if faults:
        raise refuse_images(names, faults)
    payload = Payload(names, files, sides)
    if payload.count_pixels() > pixels:
        what = f"the images have {payload.count_pixels():,} pixels together, more than the {pixels:,} of one request"
        raise ProblemError(413, what, "Send several requests, or raise --megapixels of the server.")
    return payload


def _parse_pixels(shape: str | None, body: bytes, limit: int) -> Payload:
    found = _SHAPE.fullmatch(shape or "")
    if found is None:
        what = f"pixels need {SHAPE_HEADER}: n,height,width,channels" + (f", not {shape[:80]!r}" if shape else "")
        raise ProblemError(400, what, f"Send {SHAPE_HEADER} with the size of the export, for example 1,32,32,3.")
    count, height, width, channels = (int(side) for side in found.groups())
    if count > limit:
        raise ProblemError(
            413, f"{count:,} images are more than the {limit:,} of one request", "Send several requests."
        )
    expected = count * height * width * channels
    if not expected or expected != len(body):
        what = f"{SHAPE_HEADER}: {shape} has {expected:,} values, the body {len(body):,} bytes"
        raise ProblemError(422, what, "Send one byte for each value, channels last.")
    pixels = np.frombuffer(body, np.uint8).reshape(count, height, width, channels)
    return Payload([f"image {k}" for k in range(count)], pixels=pixels)
