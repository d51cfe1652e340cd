"""`predict`: what a trained network says of image files."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from headway.core.errors import DataError, UsageError
from headway.core.files import write_whole
from headway.data.crops import center_boxes
from headway.data.formats.source import is_image
from headway.data.reference import FORMATS, Status, decode_one
from headway.train.setup import Setup


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the images (by their ending) inside the folders named, sorted.

    Raises:
        UsageError: a path does not exist, or there is no file.
    """
    out: list[Path] = []
    for path in paths:
        if path.is_dir():
            out += sorted(file for file in path.rglob("[!.]*") if file.is_file() and is_image(file.name))
        elif path.is_file():
            out.append(path)
        else:
            raise UsageError("there is no such file or folder", where=str(path))
    if not out:
        raise UsageError("there is no image to predict", where=", ".join(map(str, paths)))
    return out


def predict(setup: Setup, files: Sequence[Path], batch: int = 64) -> Iterator[dict[str, Any]]:
    """One row a file: `path` and the task's columns.

    Raises:
        DataError: a file is no image.
    """
    setup.model.eval()
    for low in range(0, len(files), batch):
        part = files[low : low + batch]
        pixels = np.empty((len(part), *setup.size, setup.channels), np.uint8)
        for place, file in enumerate(part):
            _decode(file, pixels[place], setup)
        images = setup.augment.normalise(torch.from_numpy(pixels).to(setup.device))
        with torch.no_grad(), setup.precision.autocast():
            outputs = setup.forward(images)
        for file, row in zip(part, setup.task.predict(outputs.float()), strict=True):
            yield {"path": str(file), **row}


def _decode(file: Path, out: Any, setup: Setup) -> None:
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
    except UnidentifiedImageError:
        raise DataError("this file is no image", where=str(file)) from None
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"this image cannot be opened ({error})", where=str(file)) from None
    box = center_boxes(np.array([width], np.uint32), np.array([height], np.uint32), setup.size)[0]
    if decode_one(file.read_bytes(), out, box) != Status.OK:
        raise DataError("this image is damaged", where=str(file))


def write_rows(rows: Iterable[dict[str, Any]], out: Path | None, as_json: bool) -> int:
    """Writes rows as CSV or JSONL to a file (by its ending; whole or not at all) or the screen; returns how many."""
    if out is None:
        return _write(rows, sys.stdout, as_json)
    if out.suffix not in (".csv", ".jsonl"):
        raise UsageError("the output's ending is neither .csv nor .jsonl", where=str(out))
    text = io.StringIO(newline="")
    count = _write(rows, text, out.suffix == ".jsonl")
    write_whole(out, text.getvalue())
    return count


def _write(rows: Iterable[dict[str, Any]], file: Any, as_json: bool) -> int:
    count, table = 0, None
    for row in rows:
        count += 1
        if as_json:
            file.write(json.dumps(row) + "\n")
            continue
        if table is None:
            table = csv.DictWriter(file, list(row), lineterminator="\n")
            table.writeheader()
        table.writerow({k: ";".join(v) if isinstance(v, list) else v for k, v in row.items()})  # as pack reads them
    return count
