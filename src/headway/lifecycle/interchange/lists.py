"""Lists of images that `headway pack` reads: CSV with a header, or JSON objects, one a line.

Columns are `path`, `label` or `labels`, and, where known, `sha256`, `width`, `height`, `split`, `by` and `boxes`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from headway.core.errors import DataError
from headway.core.list_rows import is_csv, parse_rows
from headway.core.text_format import pluralise
from headway.core.untrusted_json import JsonError, expect_entries, is_object, is_text, is_whole_number, parse_value
from headway.lifecycle.interchange.annotations import (
    AnnotatedImage,
    Annotations,
    Box,
    BoxForm,
    collect_classes,
)
from headway.lifecycle.interchange.reading import (
    expect_finite,
    get_numbers,
    get_size,
    get_text,
    read_annotation_text,
)
from headway.lifecycle.interchange.rendered import Rendered, take_more

SOURCE = "list"
_FORMS: tuple[BoxForm, ...] = get_args(BoxForm)
_KNOWN = ("path", "label", "labels", "sha256", "width", "height", "split", "by", "boxes")
# In CSV, labels are separated by it.
_SEPARATOR = ";"
_FIX = "The columns are path, label or labels, and if they are known sha256, width, height, split, by and boxes."


def read_list(path: Path) -> Annotations:
    """Reads a CSV or JSONL list, as its ending says. The images need not be there, nor have labels.

    Raises:
        UsageError: the file cannot be read. DataError: it is not such a list; the message names the line.
    """
    images = []
    for row in parse_rows(path, read_annotation_text(path)):
        cells = row.to_dict()
        try:
            images.append(_read_row(_parse_cells(cells, row.where) if is_csv(path) else cells))
        except JsonError as error:
            raise DataError(f"this is not a row of a list: {error}", where=row.where, fix=_FIX) from None
    return Annotations(images=tuple(images), classes=collect_classes(images), source=SOURCE)


def _parse_cells(cells: dict[str, str], where: str) -> dict[str, Any]:
    """Returns a row as a line of JSON would have it: CSV has texts alone, and empty ones for what is not known."""
    row: dict[str, Any] = {name: cell for name, cell in cells.items() if cell or name not in _KNOWN}
    for name in ("width", "height"):
        if name in row and row[name].isascii() and row[name].isdigit():
            row[name] = int(row[name][:20])
    if "labels" in row:
        row["labels"] = [part for part in row["labels"].split(_SEPARATOR) if part.strip()]
    if "boxes" in row:
        try:
            row["boxes"] = parse_value(row["boxes"])
        except JsonError as error:
            raise DataError(f"the column 'boxes' is damaged: {error}", where=where, fix=_FIX) from None
    return row


def _read_row(row: dict[str, Any]) -> AnnotatedImage:
    expect_entries(row, {"path": (is_text, "a text")})
    expect_finite(row)
    if "label" in row and "labels" in row:
        raise JsonError("it has both 'label' and 'labels'")
    labels = row.get("labels", [])
    if row.get("label") not in (None, ""):
        labels = [row["label"]]
    if not isinstance(labels, list):
        raise JsonError(f"it has {labels!r:.60} as labels, not a list")
    boxes = row.get("boxes") or []
    if not isinstance(boxes, list):
        raise JsonError(f"it has {boxes!r:.60} as boxes, not a list")
    return AnnotatedImage(
        name=row["path"],
        labels=tuple(dict.fromkeys(_read_label(label) for label in labels)),
        boxes=tuple(read_box(box, f"boxes[{place}]") for place, box in enumerate(boxes)),
        size=get_size(row, ""),
        sha256=get_text(row, "sha256", ""),
        split=get_text(row, "split", ""),
        by=get_text(row, "by", ""),
        more={name: value for name, value in row.items() if name not in _KNOWN},
    )


def _read_label(label: Any) -> str:
    # Numbers as class names, as `pack` reads them.
    if is_whole_number(label, -(1 << 63)):
        return str(label)
    if not is_text(label) or not label.strip():
        raise JsonError(f"it has {label!r:.60} as a label, not a class name")
    text: str = label.strip()
    return text


def read_box(box: Any, path: str) -> Box:
    """Returns a box of the column `boxes`. Raises JsonError if it is not one; `path` names it."""
    expect_entries(box, {"label": (is_text, "a text")}, f"{path}.")
    forms = [form for form in _FORMS if form in box]
    if len(forms) != 1:
        raise JsonError(f"it has no box, or two, in {path}: one of {', '.join(_FORMS)}")
    more = box.get("more", {})
    if not is_object(more):
        raise JsonError(f"it has {more!r:.60} as {path}.more, not an object")
    numbers = get_numbers(box[forms[0]], f"{path}.{forms[0]}")
    return Box(label=box["label"].strip(), form=forms[0], numbers=numbers, more=more)


def render_csv(annotations: Annotations) -> Rendered:
    """Returns a list as CSV.

    Raises:
        DataError: a label holds a semicolon, which separates labels in CSV.
    """
    rows, columns = _list_rows(annotations)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_render_cell(name, row.get(name)) for name in columns])
    return Rendered(text.getvalue(), _note_losses(annotations))


def render_json_lines(annotations: Annotations) -> Rendered:
    """Returns a list as JSON objects, one a line."""
    rows, _ = _list_rows(annotations)
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    return Rendered("".join(lines), _note_losses(annotations))


def _list_rows(annotations: Annotations) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the rows, and the columns that at least one of them fills."""
    is_own = annotations.source == SOURCE
    has_several = any(len(image.labels) > 1 for image in annotations.images)
    rows: list[dict[str, Any]] = []
    for image in annotations.images:
        row: dict[str, Any] = {"path": image.name}
        if has_several:
            row["labels"] = list(image.labels)
        else:
            row["label"] = image.labels[0] if image.labels else ""
        row |= {} if image.size is None else {"width": image.size[0], "height": image.size[1]}
        ours = {"sha256": image.sha256, "split": image.split, "by": image.by}
        row |= {name: value for name, value in ours.items() if value}
        if image.boxes:
            row["boxes"] = [render_box(box) for box in image.boxes]
        rows.append(row | take_more(image.more, is_own))
    return rows, list(dict.fromkeys(name for row in rows for name in row)) or ["path", "label"]


def render_box(box: Box) -> dict[str, Any]:
    """Returns a box as an entry of the column `boxes`."""
    entry: dict[str, Any] = {"label": box.label, box.form: list(box.numbers)}
    return entry | ({"more": dict(box.more)} if box.more else {})


def _render_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "labels":
        if text := next((text for text in value if _SEPARATOR in text), ""):
            what = f"the label {text!r} holds a semicolon, which separates labels in CSV"
            raise DataError(what, fix="Write a list with the ending .jsonl.")
        return _SEPARATOR.join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _note_losses(annotations: Annotations) -> tuple[str, ...]:
    notes = []
    without: Sequence[str] = sorted(set(annotations.classes) - set(collect_classes(annotations.images)))
    if without:
        notes.append(f"A list has no classes without an image: {', '.join(without[:5])}.")
    if unlabelled := annotations.count()["unlabelled"]:
        notes.append(f"{pluralise(unlabelled, 'image')} without a label: headway pack refuses such a list.")
    return tuple(notes)
