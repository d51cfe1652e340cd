"""A list of images to look at: a CSV that `headway pack` reads, with the images beside it."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from PIL import Image

from headway.core.errors import DataError, UsageError
from headway.core.files import write_atomically
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.reference import PILLOW_FORMATS, read_image
from headway.setup.checks import check_label_range

IMAGES = "images"
"""Folder of the images, beside the list."""
_ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "BMP": ".bmp", "GIF": ".gif", "PPM": ".ppm", "WEBP": ".webp", "TIFF": ".tif"}
MAX_NAME = 60
"""Letters of an image's name that its copy keeps."""


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One image of a list.

    Attributes:
        sample: number of the image in its data set.
        cells: further columns, by name.
    """

    sample: int
    cells: Mapping[str, Any]


def expect_class_labels(dataset: Dataset, *, is_pool: bool = False) -> None:
    """Raises UsageError unless each image of a set has one class, which a list has in its column `label`.

    Raises DataError if a label is not the number of a class.

    Args:
        is_pool: images may have no label, as in the split `unlabelled` of a version.
    """
    if dataset.description.label_kind != "class":
        fix = "Name a set with one class an image. One class, such as `unknown`, is enough for a pool without labels."
        raise UsageError("the labels of this set are not classes", where=str(dataset.folder), fix=fix)
    if not is_pool or (len(dataset) and int(dataset.label.max()) >= 0):
        check_label_range(dataset)


def read_label(dataset: Dataset, sample: int) -> str:
    """Returns the class of a sample; empty: it has none."""
    label = int(dataset.label[sample])
    return dataset.classes[label] if label >= 0 else ""


def write_list(folder: Path, name: str, dataset: Dataset, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Writes the images of a list into FOLDER/images, and then the list as FOLDER/NAME. Returns its rows.

    Columns: `path` (relative to the list), `label` (the class that the data set has), `name` (in the data set),
    `sha256` (of the stored bytes), then those of the entries. Bytes are copied as they are stored; raw pixels become
    PNG files.
    """
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    digits, rows = len(str(len(entries))), list[dict[str, Any]]()
    for number, entry in enumerate(entries, 1):
        record, ending = _read_file(dataset, entry.sample)
        own = dataset.name(entry.sample)
        path = f"{IMAGES}/{number:0{digits}}-{_simplify(own)}{ending}"
        (folder / path).write_bytes(record)
        digest = hashlib.sha256(dataset.read([entry.sample])[0]).hexdigest()
        rows.append(
            {"path": path, "label": read_label(dataset, entry.sample), "name": own, "sha256": digest, **entry.cells}
        )
    write_rows(folder / name, rows)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV, with the columns of the first one; None as an empty cell."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]) if rows else ["path", "label"], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, text.getvalue())


def _read_file(dataset: Dataset, sample: int) -> tuple[bytes, str]:
    """Returns an image as the bytes of a file, and the ending of its format."""
    if int(dataset.flags[sample]) & FLAG_RAW:
        out = io.BytesIO()
        read_image(dataset, sample).save(out, "PNG")
        return out.getvalue(), ".png"
    record = bytes(dataset.read([sample])[0])
    # The ending follows the bytes: a pack may have written another format than the name says.
    try:
        with Image.open(io.BytesIO(record), formats=PILLOW_FORMATS) as image:
            return record, _ENDINGS.get(str(image.format), ".jpg")
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        where = f"{dataset.folder}, image {dataset.name(sample)}"
        raise DataError(f"this image cannot be opened ({error})", where=where) from error


def _simplify(name: str) -> str:
    """Returns a name from outside as part of a file name: no folder, no ending, no special character."""
    stem = Path(name.replace("\\", "/")).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip(".")[:MAX_NAME] or "image"
