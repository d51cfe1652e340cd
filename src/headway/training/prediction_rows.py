"""Rows of predictions: image files in batches through any network, and the table that they are written to."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import write_atomically
from headway.core.printable import escape_controls
from headway.data.decode import Decoder
from headway.data.host_transform import HostTransform
from headway.data.image_files import ImageSource, OnBadImage, name_source, raise_error, read_pixels

Rows = list[dict[str, Any]]


def predict_files(
    files: Sequence[ImageSource],
    compute: Callable[[NDArray[np.uint8]], Rows],
    *,
    transform: HostTransform,
    decoder: Decoder,
    batch: int,
    on_bad: OnBadImage = raise_error,
) -> Iterator[dict[str, Any]]:
    """Yields one row per image: `path` (of a file, else `image N`) and the columns that `compute` gives.

    Args:
        compute: returns the columns of each image of a batch, uint8 [b, H, W, C].
        transform: centre crop and resize of the evaluation.
        batch: largest number of images at once.
        on_bad: called with the error of a file that cannot be read, which then has no row. By default it is raised.

    Raises:
        DataError: a file is not an image; or none of them is.
    """
    rows = 0
    for low in range(0, len(files), batch):
        # One batch at a time, so memory does not grow with the number of files.
        places, pixels = read_pixels(transform, decoder, files[low : low + batch], on_bad)
        if not places:
            continue
        for place, row in zip(places, compute(pixels), strict=True):
            rows += 1
            yield {"path": name_source(files[low + place], low + place), **row}
    if not rows:
        raise DataError(f"of {len(files):,} files none is an image that can be read", fix="Name other files.")


def expect_ranking(classes: int | None, top: int | None) -> None:
    """Raises UsageError if so many best classes cannot be named.

    Args:
        classes: number of classes; None: the task does not choose one of several.
        top: number of best classes; None: the columns of the task are wanted.
    """
    if top is None:
        return
    if classes is None:
        what = "this run does not choose one of several classes, so that there are no best ones"
        raise UsageError(what, where="top", fix="Leave it out: the columns of the task have every output.")
    if top > classes:
        raise UsageError(f"there are {classes} classes", where="top", fix=f"Set it to at most {classes}.")


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
