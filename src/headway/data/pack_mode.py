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
from headway.data.native import SeekableJpeg
from headway.data.reference import GRAY_MODES, PILLOW_FORMATS, convert_mode

JPEG_SIGNATURE = b"\xff\xd8\xff"
"""First bytes of a JPEG."""
DEFAULT_QUALITY = 90
TRANSFORMED_QUALITY = 95
"""Quality of images that a transform returns in modes keep and seekable, which set none."""

_MODES_HINT = "Modes are keep, seekable, resize=N,quality=Q (or one of the two), raw, and raw,resize=N."
_SUBSAMPLINGS = {"444": "4:4:4", "422": "4:2:2", "420": "4:2:0"}
_EXIF_ORIENTATION_TAG = 0x0112
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
    quality: int = DEFAULT_QUALITY
    """JPEG quality, 1 to 100; with `encode`."""
    subsampling: str | None = None
    """JPEG colour subsampling: 444, 422 or 420; None is Pillow's 420."""

    @staticmethod
    def parse(text: str) -> PackMode:
        """Parses a mode as written on the command line. Raises UsageError if the text is not a mode."""
        # `raw` comes first and takes options; an encoded mode is options only.
        kind, *kind_options = parts = [part.strip() for part in text.split(",")]
        if kind in ("keep", "seekable") and not kind_options:
            return PackMode(kind="keep" if kind == "keep" else "seekable")
        is_raw = kind == "raw"
        option_texts = kind_options if is_raw else parts
        options = {name: value for name, _, value in (part.partition("=") for part in option_texts)}
        # A repeated option would be lost silently.
        if len(options) != len(option_texts) or not options.keys() <= {"resize", "quality", "subsampling"}:
            raise UsageError(f"{text!r} is not a mode", fix=_MODES_HINT)
        if is_raw and options.keys() - {"resize"}:
            raise UsageError(f"{text!r}: raw pixels have no quality", fix="Write raw, or raw,resize=N.")
        side = _parse_number(text, options["resize"], 1, 1 << 16) if "resize" in options else None
        if is_raw:
            return PackMode(kind="raw", side=side)
        subsampling = options.get("subsampling")
        if subsampling not in (None, *_SUBSAMPLINGS):
            raise UsageError(f"{subsampling!r} is not a subsampling", fix=f"Choose one of {', '.join(_SUBSAMPLINGS)}.")
        quality = _parse_number(text, options.get("quality", str(DEFAULT_QUALITY)), 1, 100)
        return PackMode(kind="encode", side=side, quality=quality, subsampling=subsampling)

    def __str__(self) -> str:
        if self.kind in ("keep", "seekable"):
            return self.kind
        parts = ["raw"] if self.kind == "raw" else []
        parts += [f"resize={self.side}"] if self.side else []
        parts += [f"quality={self.quality}"] if self.kind == "encode" else []
        parts += [f"subsampling={self.subsampling}"] if self.subsampling else []
        return ",".join(parts)

    def follow(self, source_mode: str) -> str:
        """Returns the mode of a pack made from a pack in `source_mode`, which lossless modes do not change."""
        if self.kind in ("keep", "seekable") and source_mode.partition("=")[0] in ("resize", "quality", "seekable"):
            return source_mode
        return str(self)


class StoredImage(NamedTuple):
    """An image as it is written into a shard: the bytes of an image file, or pixels, uint8 [h, w, c]."""

    data: bytes | Pixels
    width: int
    height: int
    gray: bool
    reason: str
    """Why the image cannot be used; empty if it can."""
    note: str
    """A remark for the user, such as `NOT_TURNED`; empty if there is none."""

    @property
    def payload(self) -> bytes | memoryview:
        """The bytes that are stored."""
        return self.data if isinstance(self.data, bytes) else self.data.data

    @property
    def size_bytes(self) -> int:
        """Number of the bytes that are stored."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    @property
    def flags(self) -> int:
        """Flags of the record; see `headway.data.columns`."""
        if isinstance(self.data, bytes):
            return 0 if self.data.startswith(JPEG_SIGNATURE) else FLAG_NOT_JPEG
        return FLAG_RAW


class _RewrittenFile(NamedTuple):
    """An image file as it is stored: rewritten, or as it was."""

    data: bytes
    is_sound: bool
    """See `SeekableJpeg`."""
    note: str


LEFT_OUT = "left out by the transform"
NOT_TURNED = "turned or mirrored by EXIF"
NOT_SEEKABLE = "not seekable: "


@final
@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """Applies the user's transform, then a mode, to one image."""

    mode: PackMode
    channels: int
    """Channels of raw pixels: 1 or 3."""
    make_seekable: Callable[[bytes], SeekableJpeg] | None
    """Rewrites a JPEG, or raises DataError; None without the native core."""
    transform: Transform | None
    orient: bool
    """Turns images as their EXIF orientation says."""

    def __call__(self, image: bytes | Pixels, label: Any, name: str) -> StoredImage:
        """Returns the image as it is stored, or the reason why it cannot be.

        Raises UserCodeError if the transform fails, and nothing else.
        """
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
        # Bytes of the image file that are stored as they are; None once the pixels are not those of a file.
        data: bytes | None = None
        rewritten: _RewrittenFile | None = None
        if isinstance(source, bytes):
            data, image = source, _open_limited(source)
            # The rewrite of a baseline file reads all its codes and checks them more strictly than a decoder does. To
            # decode such a file too would double the time of a pack, and find nothing.
            if self.mode.kind == "seekable" and not self.transform and not self.orient:
                rewritten = self._rewrite(source)
            if not (rewritten and rewritten.is_sound and image.format == "JPEG"):
                _decode_pixels(image)
        else:
            image = convert_pixels(source)
        note = ""
        # The decoder ignores EXIF, as torchvision does.
        if _needs_exif_transpose(image):
            if self.orient:
                data, image = None, ImageOps.exif_transpose(image)
            else:
                note = NOT_TURNED
        if self.transform:
            transformed = self._apply_transform(image, label, name)
            if transformed is None:
                return StoredImage(b"", 0, 0, False, "", LEFT_OUT)
            if isinstance(transformed, bytes):
                data, image = transformed, decode_image(transformed)
            else:
                data, image = None, transformed
        if self.mode.kind == "raw":
            image = _shrink(convert_mode(image, self.channels), self.mode.side)
            pixels = np.asarray(image).reshape(image.height, image.width, self.channels)
            return StoredImage(np.ascontiguousarray(pixels), image.width, image.height, self.channels == 1, "", note)
        if self.mode.kind == "encode":
            # Shrunk first, then encoded once: every JPEG generation loses quality.
            image = _shrink(_convert_to_gray_or_rgb(image), self.mode.side)
            data = self._encode_jpeg(image)
        elif data is None:
            # A turned file is saved as PNG to lose nothing; a transform changes pixels anyway.
            data = self._encode_jpeg(_convert_to_gray_or_rgb(image)) if self.transform else _encode_png(image)
        rewritten = rewritten or self._rewrite(data)
        is_gray = image.mode in GRAY_MODES
        return StoredImage(rewritten.data, image.width, image.height, is_gray, "", rewritten.note or note)

    def _rewrite(self, data: bytes) -> _RewrittenFile:
        """Makes a JPEG seekable where the mode says so; other files stay as they are."""
        if self.mode.kind == "keep" or not self.make_seekable or not data.startswith(JPEG_SIGNATURE):
            return _RewrittenFile(data, False, "")
        # A JPEG that cannot be rewritten is stored unchanged, with the reason as a note.
        try:
            return _RewrittenFile(*self.make_seekable(data), "")
        except DataError as error:
            return _RewrittenFile(data, False, f"{NOT_SEEKABLE}{error.what}")

    def _encode_jpeg(self, image: Image.Image) -> bytes:
        is_encode_mode = self.mode.kind == "encode"
        options: dict[str, Any] = {"quality": self.mode.quality if is_encode_mode else TRANSFORMED_QUALITY}
        if self.mode.subsampling:
            options["subsampling"] = _SUBSAMPLINGS[self.mode.subsampling]
        buffer = io.BytesIO()
        # optimize=True would make Pillow fail on noisy images.
        image.save(buffer, "JPEG", **options)
        return buffer.getvalue()

    def _apply_transform(self, image: Image.Image, label: Any, name: str) -> Image.Image | bytes | None:
        assert self.transform
        try:
            transformed = self.transform(image, label, name)
            # A wrong result is reported as an error of the transform, with the name of the sample.
            if transformed is not None and not isinstance(transformed, Image.Image | bytes):
                raise TypeError(f"it returned {type(transformed).__name__}, not an image, bytes or None")
        except Exception as error:
            raise UserCodeError(f"the transform failed: {type(error).__name__}: {error}", where=name) from error
        return transformed


def summarise_notes(names_by_note: dict[str, list[str]], can_orient: bool) -> list[str]:
    """Returns one sentence for the user about each note.

    Args:
        names_by_note: the names of the images that have each note.
        can_orient: the same pack with --orient would turn images.
    """
    sentences = []
    for note, names in sorted(names_by_note.items()):
        # A single image is named, many are counted.
        which = f"{len(names):,} images" if len(names) > 1 else names[0]
        if note == LEFT_OUT:
            sentences.append(f"The transform left out {which}.")
        elif note == NOT_TURNED:
            condition = "" if can_orient else " in modes that encode images anew, or with a transform"
            fix = f"--orient does that{condition}"
            sentences.append(f"EXIF says to turn or mirror {which}, which was not done, as in torchvision; {fix}.")
        else:
            example = f" (such as {names[0]})" if len(names) > 1 else ""
            sentences.append(f"Stored as it was, not seekable: {which}{example}: {note.removeprefix(NOT_SEEKABLE)}.")
    return sentences


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
    """Decodes an image, in its own mode. Raises ValueError if it is empty or too large, or any error of Pillow."""
    image = _open_limited(data)
    _decode_pixels(image)
    return image


def _open_limited(data: bytes) -> Image.Image:
    """Reads the header of an image. Raises ValueError if it is empty or too large, or any error of Pillow."""
    if not data:
        raise ValueError("it is empty")
    image = open_header(data)
    # Pillow only warns up to twice the limit; here the limit is strict.
    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        raise ValueError(f"its {image.width} x {image.height} pixels are more than the limit of {limit:,}")
    return image


def _decode_pixels(image: Image.Image) -> None:
    """Decodes every pixel, so that truncation shows here and not in training. Raises any error of Pillow."""
    image.load()
    _convert_to_gray_or_rgb(image)


def open_header(image: bytes | Pixels) -> Image.Image:
    """Returns an image of which only the header has been read. Raises any error of Pillow."""
    return Image.open(io.BytesIO(image), formats=PILLOW_FORMATS) if isinstance(image, bytes) else convert_pixels(image)


def convert_pixels(pixels: Pixels) -> Image.Image:
    """Converts pixels, uint8 [h, w, 1] or [h, w, 3], to an image in mode L or RGB."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _parse_number(mode_text: str, value: str, minimum: int, maximum: int) -> int:
    if not value.isdecimal() or not minimum <= int(value) <= maximum:
        raise UsageError(f"{mode_text!r}: {value!r} is not a number from {minimum} to {maximum:,}", fix=_MODES_HINT)
    return int(value)


def _convert_to_gray_or_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in mode L if it is gray, else in RGB."""
    return convert_mode(image, 1 if image.mode in GRAY_MODES else 3)


def _needs_exif_transpose(image: Image.Image) -> bool:
    """Returns True if the EXIF block says to turn or mirror the image; a damaged block says nothing."""
    # Reading EXIF of an image without it costs more than this test.
    if not (image.info.get("exif") or image.format == "TIFF"):
        return False
    try:
        return image.getexif().get(_EXIF_ORIENTATION_TAG, 1) in range(2, 9)
    except Exception:
        # A damaged EXIF block raises anything, as damaged images do.
        return False


def _shrink(image: Image.Image, max_side: int | None) -> Image.Image:
    """Reduces the shorter side to at most `max_side` with Pillow's antialiased bicubic kernel; never enlarges."""
    shorter = min(image.size)
    if max_side is None or shorter <= max_side:
        return image
    width, height = (max(1, round(side * max_side / shorter)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
