"""`headway predict`: puts image files through a trained network."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from headway.core.errors import DataError, UsageError
from headway.core.files import read_regular, write_atomically
from headway.core.interface import choose_wording
from headway.core.path_suggestions import suggest_path
from headway.core.printable import escape_controls
from headway.data.decode import Decoder, build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.formats.pack_source import is_image
from headway.data.host_transform import HostTransform
from headway.data.records import Records
from headway.data.reference import PILLOW_FORMATS
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import predict_outputs

ImageSource = Path | Image.Image | NDArray[np.uint8] | torch.Tensor
"""An image to predict: a file, or pixels [H, W] or [H, W, C], uint8."""


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


def _raise_error(error: DataError) -> None:
    raise error


def predict(
    setup: TrainSetup,
    files: Sequence[ImageSource],
    batch: int = 64,
    *,
    top: int | None = None,
    on_bad: Callable[[DataError], None] = _raise_error,
) -> Iterator[dict[str, Any]]:
    """Yields one row per image: `path` (of a file, else `image N`) and the task's columns.

    Args:
        top: number of best classes, each with its probability, in place of the task's columns.
        on_bad: called with the error of a file that cannot be read, which then has no row. By default it is raised.

    Raises:
        DataError: a file is not an image; or none of them is.
    """
    # Never switched back: a network that predicts is not trained.
    setup.model.eval()
    options, rows = setup.recipe.data, 0
    with closing(build_decoder(options.threads, options.decoder)) as decoder:
        for low in range(0, len(files), batch):
            # One batch at a time, so memory does not grow with the number of files.
            places, pixels = read_pixels(setup, decoder, files[low : low + batch], on_bad)
            if not places:
                continue
            with torch.no_grad():
                outputs = predict_outputs(setup, torch.from_numpy(pixels).to(setup.device))
            found = setup.task.predict(outputs) if top is None else _rank_classes(outputs, top, setup.target.classes)
            for place, row in zip(places, found, strict=True):
                rows += 1
                yield {"path": _name_source(files[low + place], low + place), **row}
    if not rows:
        raise DataError(f"of {len(files):,} files none is an image that can be read", fix="Name other files.")


def check_top(setup: TrainSetup, top: int | None) -> None:
    """Raises UsageError if a run cannot rank so many classes."""
    if top is None:
        return
    classes = len(setup.target.classes)
    if setup.target.kind != "class" or setup.task.outputs != classes:
        what = "this run does not choose one of several classes, so that there are no best ones"
        raise UsageError(what, where="top", fix="Leave it out: the columns of the task have every output.")
    if top > classes:
        raise UsageError(f"there are {classes} classes", where="top", fix=f"Set it to at most {classes}.")


def _rank_classes(outputs: torch.Tensor, count: int, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns `label`, `probability`, `label_2`, `probability_2` and so on for each sample, the best class first."""
    found = outputs.softmax(dim=1).topk(count, dim=1)
    rows = []
    for probabilities, class_ids in zip(found.values.tolist(), found.indices.tolist(), strict=True):
        row: dict[str, Any] = {}
        for number, (probability, class_id) in enumerate(zip(probabilities, class_ids, strict=True), 1):
            # The first pair has the names of the task's own columns, which other tools read.
            ending = f"_{number}" if number > 1 else ""
            row |= {f"label{ending}": classes[class_id], f"probability{ending}": round(probability, 6)}
        rows.append(row)
    return rows


def read_pixels(
    setup: TrainSetup,
    decoder: Decoder,
    files: Sequence[ImageSource],
    on_bad: Callable[[DataError], None] = _raise_error,
) -> tuple[list[int], NDArray[np.uint8]]:
    """Returns the places of the good images, and their pixels as an evaluation sees them, uint8 [k, H, W, C].

    Args:
        on_bad: see `predict`.

    Raises:
        DataError: a file is not an image.
    """
    options, opened, records, sides = setup.recipe.data, [], [], []
    for place, file in enumerate(files):
        try:
            record, side = _read_image(file) if isinstance(file, Path) else _encode_image(file)
        except DataError as error:
            on_bad(error)
        else:
            opened.append(place)
            records.append(record)
            sides.append(side)
    transform = HostTransform(
        size=setup.size, channels=setup.channels, crop=options.crop.to_center(), scaled=options.scaled
    )
    # The same crop and resize as in an evaluation, so that predictions and metrics agree.
    width, height = np.array(sides, np.uint32).reshape(-1, 2).T
    out = np.empty((len(opened), *setup.size, setup.channels), np.uint8)
    boxes = transform.compute_boxes(np.empty(0, np.uint64), width, height, setup.size)
    # Decoding goes on after a damaged image; its status says so.
    status = decoder.decode(DecodeRequest(Records.from_buffers(records), boxes, out, scaled=transform.scaled))
    for row in np.flatnonzero(status):
        where = _name_source(files[opened[row]], opened[row])
        on_bad(DataError("this image is damaged", where=where, fix=_describe_skip()))
    return [place for place, wrong in zip(opened, status, strict=True) if not wrong], out[status == 0]


def _describe_skip() -> str:
    return choose_wording(command="Leave such files out with --skip-bad.", python="Leave it out of the images.")


def _name_source(source: ImageSource, place: int) -> str:
    return str(source) if isinstance(source, Path) else f"image {place}"


def _encode_image(image: Any) -> tuple[bytes, tuple[int, int]]:
    """Returns pixels as the bytes of a PPM or PGM file, and their (width, height)."""
    if isinstance(image, torch.Tensor):
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


def _read_image(file: Path) -> tuple[bytes, tuple[int, int]]:
    """Returns all bytes of an image file, and its (width, height) in pixels."""
    try:
        record = read_regular(file)
        with Image.open(io.BytesIO(record), formats=PILLOW_FORMATS) as image:
            return record, image.size
    except UnidentifiedImageError:
        raise DataError("this file is not an image", where=str(file), fix=_describe_skip()) from None
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        raise DataError(f"this image cannot be opened ({error})", where=str(file), fix=_describe_skip()) from None


def write_rows(rows: Iterable[dict[str, Any]], out: Path | None, as_json: bool) -> int:
    """Writes rows as CSV or JSONL to a file, whole or not at all, or to the screen; returns their number.

    The ending of `out` decides the format; on the screen `as_json` does.
    """
    if out is None:
        # Control characters in file names are escaped on a terminal only; a program gets the names unchanged.
        shown = escape_controls if sys.stdout.isatty() else None
        return _write_table(rows, sys.stdout, as_json, shown)
    if out.suffix not in (".csv", ".jsonl"):
        raise UsageError("the output's ending is neither .csv nor .jsonl", where=str(out))
    text = io.StringIO(newline="")
    count = _write_table(rows, text, out.suffix == ".jsonl")
    write_atomically(out, text.getvalue())
    return count


def _write_table(
    rows: Iterable[dict[str, Any]], file: Any, as_json: bool, shown: Callable[[str], str] | None = None
) -> int:
    count, table = 0, None
    for row in rows:
        count += 1
        if as_json:
            file.write(json.dumps(row) + "\n")
            continue
        if table is None:
            # The first row decides the columns; a task gives every row the same.
            table = csv.DictWriter(file, list(row), lineterminator="\n")
            table.writeheader()
        # `headway pack` reads several labels in this form.
        cells = {k: ";".join(v) if isinstance(v, list) else v for k, v in row.items()}
        if shown is not None:
            cells = {k: shown(v) if isinstance(v, str) else v for k, v in cells.items()}
        table.writerow(cells)
    return count
