"""Pack modes: how packing stores one image.

- `keep`: the file's bytes, unchanged.
- `seekable`: a JPEG is rewritten without loss, with markers at which a decoder can begin; other files as in keep.
- `resize=N,quality=Q`: the shorter side is reduced to at most N pixels, and the image saved as JPEG of quality Q.
- `raw`, `raw,resize=N`: pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from headway.core.errors import DataError, UsageError, UserCodeError
from headway.data.columns import FLAG_NOT_JPEG, FLAG_RAW
from headway.data.reference import FORMATS, GRAY_MODES, convert_mode

JPEG = b"\xff\xd8\xff"
"""First bytes of a JPEG."""
QUALITY = 90
TRANSFORMED_QUALITY = 95
"""Quality of images that a transform returns in modes keep and seekable, which set none."""

_FORM = "Modes are keep, seekable, resize=N,quality=Q (or one of the two), raw, and raw,resize=N."
_SUBSAMPLINGS = {"444": "4:4:4", "422": "4:2:2", "420": "4:2:0"}
_ORIENTATION = 0x0112
"""Tag of EXIF; 1 is upright."""

Pixels = NDArray[np.uint8]
Transform = Callable[[Image.Image, Any, str], Image.Image | bytes | None]
"""A user's function of (image, label, name). It returns the image that replaces it, the bytes of an image file, or
None to leave the sample out.
"""


@final
@dataclass(frozen=True, kw_only=True)
class PackMode:
    """How images are stored; `str` of it is the text that `parse` reads."""

    kind: Literal["keep", "seekable", "encode", "raw"]
    side: int | None = None
    """Limit of the shorter side in pixels."""
    quality: int = QUALITY
    """JPEG quality, 1 to 100; with `encode`."""
    subsampling: str | None = None
    """JPEG colour subsampling: 444, 422 or 420; None is Pillow's 420."""

    @staticmethod
    def parse(text: str) -> PackMode:
        """Parses a mode as written on the command line. Raises UsageError."""
        # `raw` comes first and takes options; an encoded mode is options only.
        first, *rest = parts = [part.strip() for part in text.split(",")]
        if first in ("keep", "seekable") and not rest:
            return PackMode(kind="keep" if first == "keep" else "seekable")
        raw = first == "raw"
        given = rest if raw else parts
        options = {name: value for name, _, value in (part.partition("=") for part in given)}
        # A repeated option would be lost silently.
        if len(options) != len(given) or not options.keys() <= {"resize", "quality", "subsampling"}:
            raise UsageError(f"{text!r} is not a mode", fix=_FORM)
        if raw and options.keys() - {"resize"}:
            raise UsageError(f"{text!r}: raw pixels have no quality", fix="Write raw, or raw,resize=N.")
        side = _parse_number(text, options["resize"], 1, 1 << 16) if "resize" in options else None
        if raw:
            return PackMode(kind="raw", side=side)
        subsampling = options.get("subsampling")
        if subsampling not in (None, *_SUBSAMPLINGS):
            raise UsageError(f"{subsampling!r} is not a subsampling", fix=f"Choose one of {', '.join(_SUBSAMPLINGS)}.")
        quality = _parse_number(text, options.get("quality", str(QUALITY)), 1, 100)
        return PackMode(kind="encode", side=side, quality=quality, subsampling=subsampling)

    def __str__(self) -> str:
        if self.kind in ("keep", "seekable"):
            return self.kind
        parts = ["raw"] if self.kind == "raw" else []
        parts += [f"resize={self.side}"] if self.side else []
        parts += [f"quality={self.quality}"] if self.kind == "encode" else []
        parts += [f"subsampling={self.subsampling}"] if self.subsampling else []
        return ",".join(parts)

    def follow(self, before: str) -> str:
        """Returns the mode of a pack made from one in mode `before`: lossless modes leave that as it is."""
        if self.kind in ("keep", "seekable") and before.partition("=")[0] in ("resize", "quality", "seekable"):
            return before
        return str(self)


class StoredImage(NamedTuple):
    """An image as it goes into a shard: the bytes of an image file, or pixels, uint8 [h, w, c]."""

    data: bytes | Pixels
    width: int
    height: int
    gray: bool
    reason: str
    """Why the image cannot be used; empty if it can."""
    note: str
    """A fact about it for the user, without its name; empty if there is none."""

    @property
    def payload(self) -> bytes | memoryview:
        return self.data if isinstance(self.data, bytes) else self.data.data

    @property
    def size_bytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    @property
    def flags(self) -> int:
        if isinstance(self.data, bytes):
            return 0 if self.data.startswith(JPEG) else FLAG_NOT_JPEG
        return FLAG_RAW


LEFT_OUT = "left out by the transform"
NOT_TURNED = "turned or mirrored by EXIF"
NOT_SEEKABLE = "not seekable: "


@final
@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """Applies a mode, and the transform before it, to one image."""

    mode: PackMode
    channels: int
    """Channels of raw pixels: 1 or 3."""
    make_seekable: Callable[[bytes], bytes] | None
    """Rewrites a JPEG, or raises DataError; None without the native core."""
    transform: Transform | None
    orient: bool

    def __call__(self, image: bytes | Pixels, label: Any, name: str) -> StoredImage:
        """Returns the image as it is stored. Raises UserCodeError if the transform fails, and nothing else."""
        try:
            return self._encode(image, label, name)
        except UserCodeError:
            raise
        # The order matters: this is an OSError too.
        except UnidentifiedImageError:
            return refuse_image("its image format is not known")
        except Exception as error:
            # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
            return refuse_image(_describe_error(error))

    def _encode(self, source: bytes | Pixels, label: Any, name: str) -> StoredImage:
        data, image = (source, decode_image(source)) if isinstance(source, bytes) else (None, convert_pixels(source))
        note = ""
        # The decoder ignores EXIF, as torchvision does.
        if _needs_turning(image):
            if self.orient:
                data, image = None, ImageOps.exif_transpose(image)
            else:
                note = NOT_TURNED
        if self.transform:
            made = self._apply_transform(image, label, name)
            if made is None:
                return StoredImage(b"", 0, 0, False, "", LEFT_OUT)
            data, image = (made, decode_image(made)) if isinstance(made, bytes) else (None, made)
        if self.mode.kind == "raw":
            image = _shrink(convert_mode(image, self.channels), self.mode.side)
            pixels = np.asarray(image).reshape(image.height, image.width, self.channels)
            return StoredImage(np.ascontiguousarray(pixels), image.width, image.height, self.channels == 1, "", note)
        if self.mode.kind == "encode":
            # Shrunk first, then encoded once: every JPEG generation loses quality.
            image = _shrink(_convert_colour(image), self.mode.side)
            data = self._encode_jpeg(image)
        elif data is None:
            # A turned file is saved as PNG to lose nothing; a transform changes pixels anyway.
            data = self._encode_jpeg(_convert_colour(image)) if self.transform else _encode_png(image)
        # A JPEG that cannot be rewritten is stored unchanged, with the reason as a note.
        if self.mode.kind != "keep" and self.make_seekable and data.startswith(JPEG):
            try:
                data = self.make_seekable(data)
            except DataError as error:
                note = f"{NOT_SEEKABLE}{error.what}"
        return StoredImage(data, image.width, image.height, image.mode in GRAY_MODES, "", note)

    def _encode_jpeg(self, image: Image.Image) -> bytes:
        encoded = self.mode.kind == "encode"
        options: dict[str, Any] = {"quality": self.mode.quality if encoded else TRANSFORMED_QUALITY}
        if self.mode.subsampling:
            options["subsampling"] = _SUBSAMPLINGS[self.mode.subsampling]
        buffer = io.BytesIO()
        # optimize=True would make Pillow fail on noisy images.
        image.save(buffer, "JPEG", **options)
        return buffer.getvalue()

    def _apply_transform(self, image: Image.Image, label: Any, name: str) -> Image.Image | bytes | None:
        assert self.transform
        try:
            made = self.transform(image, label, name)
            # A wrong result is reported as an error of the transform, with the name of the sample.
            if made is not None and not isinstance(made, Image.Image | bytes):
                raise TypeError(f"it returned {type(made).__name__}, not an image, bytes or None")
        except Exception as error:
            raise UserCodeError(f"the transform failed: {type(error).__name__}: {error}", where=name) from error
        return made


def summarise_notes(noted: dict[str, list[str]], can_turn: bool) -> list[str]:
    """Returns sentences for the user about the notes of all images, given the names of the images that have each.

    `can_turn`: the same pack with --orient would turn images.
    """
    lines = []
    for note, names in sorted(noted.items()):
        # A single image is named, many are counted.
        some = f"{len(names):,} images" if len(names) > 1 else names[0]
        if note == LEFT_OUT:
            lines.append(f"The transform left out {some}.")
        elif note == NOT_TURNED:
            fix = "--orient does that" + ("" if can_turn else " in modes that encode images anew, or with a transform")
            lines.append(f"EXIF says to turn or mirror {some}, which was not done, as in torchvision; {fix}.")
        else:
            such = f" (such as {names[0]})" if len(names) > 1 else ""
            lines.append(f"Stored as it was, not seekable: {some}{such}: {note.removeprefix(NOT_SEEKABLE)}.")
    return lines


def _describe_error(error: Exception) -> str:
    """Returns the reason why an image is bad, in place of Pillow's internal messages."""
    # Pillow words the same damage differently in each plugin.
    text = " ".join(str(error).split())
    if "truncated" in text.lower() or text == "not enough image data":
        return "the file ends early"
    return "its data are damaged" if "data stream" in text else text or type(error).__name__


def refuse_image(reason: str) -> StoredImage:
    """Returns the result for an image that cannot be used."""
    return StoredImage(b"", 0, 0, False, reason, "")


def decode_image(data: bytes) -> Image.Image:
    """Returns a decoded image in its own mode; raises any exception of Pillow."""
    if not data:
        raise ValueError("it is empty")
    image = open_header(data)
    # Pillow only warns up to twice the limit; here the limit is strict.
    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        raise ValueError(f"its {image.width} x {image.height} pixels are more than the limit of {limit:,}")
    # Decodes every pixel, so that truncation shows here and not in training.
    image.load()
    _convert_colour(image)
    return image


def open_header(image: bytes | Pixels) -> Image.Image:
    """Returns an image of which only the header has been read; raises any exception of Pillow."""
    return Image.open(io.BytesIO(image), formats=FORMATS) if isinstance(image, bytes) else convert_pixels(image)


def convert_pixels(pixels: Pixels) -> Image.Image:
    """Returns pixels, uint8 [h, w, 1] or [h, w, 3], as an image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _parse_number(text: str, value: str, low: int, high: int) -> int:
    if not value.isdecimal() or not low <= int(value) <= high:
        raise UsageError(f"{text!r}: {value!r} is not a number from {low} to {high:,}", fix=_FORM)
    return int(value)


def _convert_colour(image: Image.Image) -> Image.Image:
    """Returns the image in mode L if it is gray, else in RGB."""
    return convert_mode(image, 1 if image.mode in GRAY_MODES else 3)


def _needs_turning(image: Image.Image) -> bool:
    """Returns True if the EXIF block says to turn or mirror the image; a damaged block says nothing."""
    # Reading EXIF of an image without it costs more than this test.
    if not (image.info.get("exif") or image.format == "TIFF"):
        return False
    try:
        return image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    except Exception:
        # A damaged EXIF block raises anything, as damaged images do.
        return False


def _shrink(image: Image.Image, side: int | None) -> Image.Image:
    """Reduces the shorter side to at most `side` with Pillow's antialiased bicubic kernel; never enlarges."""
    shorter = min(image.size)
    if side is None or shorter <= side:
        return image
    width, height = (max(1, round(length * side / shorter)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
