"""Image files and images of a program, read as an evaluation reads its records. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from headway.core.errors import DataError, UsageError
from headway.core.files import read_regular
from headway.core.interface import choose_wording
from headway.core.path_suggestions import suggest_path
from headway.data.decode import Decoder
from headway.data.decode_request import DecodeRequest
from headway.data.formats.pack_source import is_image
from headway.data.host_transform import HostTransform
from headway.data.records import Records
from headway.data.reference import PILLOW_FORMATS

if TYPE_CHECKING:
    import torch

ImageSource: TypeAlias = "Path | bytes | Image.Image | NDArray[np.uint8] | torch.Tensor"
"""An image to predict: a file, the bytes of one, or pixels [H, W] or [H, W, C], uint8."""
OnBadImage = Callable[[DataError], None]
"""Called with the error of an image that cannot be read, which is then left out."""


def list_image_files(paths: Sequence[Path]) -> list[Path]:
    """Lists the files named, and the images (by their file ending) inside the folders named, sorted.

    Raises:
        UsageError: a path does not exist, or there is no file.
    """
    out, fix = list[Path](), "Name image files, or folders with images."
    for path in paths:
        if path.is_dir():
            # Sorted, because file systems list in any order. Names with a dot in front are hidden.
            out += sorted(file for file in path.rglob("[!.]*") if file.is_file() and is_image(file.name))
        elif path.is_file():
            out.append(path)
        else:
            hint = suggest_path(path, lambda entry: entry.is_dir() or is_image(entry.name))
            raise UsageError("there is no such file or folder", where=str(path), fix=hint or fix)
    if not out:
        raise UsageError("there is no image to predict", where=", ".join(map(str, paths)), fix=fix)
    return out


def raise_error(error: DataError) -> None:
    """Raises the error of an image that cannot be read: the default of `on_bad`."""
    raise error


def read_pixels(
    transform: HostTransform, decoder: Decoder, files: Sequence[ImageSource], on_bad: OnBadImage = raise_error
) -> tuple[list[int], NDArray[np.uint8]]:
    """Returns the places of the good images, and their pixels as an evaluation sees them, uint8 [k, H, W, C].

    Args:
        transform: centre crop and resize of the evaluation.

    Raises:
        DataError: a file is not an image.
    """
    opened, records, sides = [], [], []
    for place, file in enumerate(files):
        try:
            record, side = _read_source(file, name_source(file, place))
        except DataError as error:
            on_bad(error)
        else:
            opened.append(place)
            records.append(record)
            sides.append(side)
    out, status = decode_records(transform, decoder, records, sides)
    for row in np.flatnonzero(status):
        where = name_source(files[opened[row]], opened[row])
        on_bad(DataError("this image is damaged", where=where, fix=_describe_skip()))
    return [place for place, wrong in zip(opened, status, strict=True) if not wrong], out[status == 0]


def decode_records(
    transform: HostTransform, decoder: Decoder, records: Sequence[bytes], sides: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Decodes image files as an evaluation does.

    Args:
        transform: centre crop and resize of the evaluation.
        sides: (width, height) of each image.

    Returns:
        pixels, uint8 [k, H, W, C], and each image's `DecodeStatus`, uint8 [k]. A damaged image is zeros.
    """
    # The same crop and resize as in an evaluation, so that predictions and metrics agree.
    width, height = np.array(sides, np.uint32).reshape(-1, 2).T
    out = np.empty((len(records), *transform.size, transform.channels), np.uint8)
    boxes = transform.compute_boxes(np.empty(0, np.uint64), width, height, transform.size)
    # Decoding goes on after a damaged image; its status says so.
    status = decoder.decode(DecodeRequest(Records.from_buffers(records), boxes, out, scaled=transform.scaled))
    return out, status


def _describe_skip() -> str:
    return choose_wording(command="Leave such files out with --skip-bad.", python="Leave it out of the images.")


def name_source(source: ImageSource, place: int) -> str:
    """Returns the path of an image, or `image N` for one without."""
    return str(source) if isinstance(source, Path) else f"image {place}"


def _encode_image(image: Any) -> tuple[bytes, tuple[int, int]]:
    """Returns pixels as the bytes of a PPM or PGM file, and their (width, height)."""
    # A tensor of torch, which is not imported here.
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        shape, channels = image.shape, image.shape[2] if image.ndim == 3 else 1
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or channels not in (1, 3, 4) or not image.size:
            what = f"an image is uint8 [H, W] or [H, W, C] with 1, 3 or 4 channels, not {image.dtype} {list(shape)}"
            raise UsageError(what, fix="Give pixels 0 to 255, channels last.")
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and channels == 1 else image)
    if not isinstance(image, Image.Image):
        what = f"an image is a path, a PIL image, an array or a tensor, not {type(image).__name__}"
        raise UsageError(what, fix='Give for example "cat.jpg", or pixels uint8 [H, W, C].')
    pixels, file = image if image.mode in ("L", "RGB") else image.convert("RGB"), io.BytesIO()
    # PPM holds the pixels unchanged, and goes the same way through decoder and crop as a file.
    pixels.save(file, "PPM")
    return file.getvalue(), pixels.size


def _read_source(source: ImageSource, name: str) -> tuple[bytes, tuple[int, int]]:
    """Returns all bytes of an image file, and its (width, height) in pixels."""
    if not isinstance(source, Path | bytes):
        return _encode_image(source)
    try:
        record = read_regular(source) if isinstance(source, Path) else source
        with Image.open(io.BytesIO(record), formats=PILLOW_FORMATS) as image:
            return record, image.size
    except UnidentifiedImageError:
        raise DataError("this file is not an image", where=name, fix=_describe_skip()) from None
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        raise DataError(f"this image cannot be opened ({error})", where=name, fix=_describe_skip()) from None
