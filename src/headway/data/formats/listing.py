"""Reads a list of images from a file: CSV with a header, or JSON objects, one a line.

Column `path` is relative to the file's own folder. One of these columns has the labels: `label` (a class name),
`labels` (several, separated by `;` in CSV, a list in JSON), `value` (a number; in JSON also a list of them), or
`value_NAME` columns (several numbers).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.list_rows import ListRow, is_csv, parse_rows, read_list_text
from headway.data.columns import LabelKind
from headway.data.formats.foreign_records import build_multi_labels
from headway.data.formats.listing_columns import (
    LAYOUT_HINT,
    ColumnNames,
    check_dropped_columns,
    find_label_columns,
    rename_columns,
)
from headway.data.formats.pack_source import ImageFiles, PackSource

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def list_file(path: Path, columns: ColumnNames | None = None) -> PackSource:
    """Lists the images that a CSV or JSONL file names, in the order of the file; classes are sorted by name.

    Args:
        columns: our names of the columns to use, by their names in the file. None: the file has our names, and no
            other column may hold boxes, masks or the like.

    Raises:
        UsageError: the file is missing or cannot be read.
        DataError: its content is invalid; the message names the line. A column that would be lost matters.
    """
    table = _build_table(path, parse_rows(path, read_list_text(path)), columns)
    if not table.lines:
        raise DataError("the file lists no images", where=str(path), fix=LAYOUT_HINT)
    check_dropped_columns(table.unused, list(table.cells), table.structured, str(path))
    paths = _resolve_paths(table)
    kind, classes, labels = _parse_labels(table)
    return PackSource(
        names=tuple(table.cells["path"]),
        images=ImageFiles(paths),
        labels=labels,
        label_kind=kind,
        classes=classes,
        root=str(path.parent),
        notes=(f"columns not used: {', '.join(table.unused)}",) if table.unused else (),
    )


@final
@dataclass(frozen=True)
class _Table:
    """The used columns of a listing.

    Attributes:
        lines: line number in the file of each row.
        cells: the cells of each used column, by column name.
        unused: names of the other columns, unless the user chose the columns.
        structured: those of `unused` that hold lists or mappings.
    """

    file: Path
    lines: list[int]
    cells: dict[str, list[Any]]
    unused: list[str]
    structured: set[str]

    @property
    def label_columns(self) -> list[str]:
        """Names of the columns that hold labels."""
        return [name for name in self.cells if name != "path"]

    def build_error(self, row: int, what: str, fix: str = "") -> DataError:
        """Builds an error that names the line of a row."""
        return DataError(what, where=f"{self.file}, line {self.lines[row]}", fix=fix)


def _build_table(path: Path, rows: Iterable[ListRow], columns: ColumnNames | None) -> _Table:
    """Returns the columns `path` and the labels. Raises DataError, which names the line."""
    table = _Table(path, [], {}, [], set())
    used: list[str] = []
    previous: list[str] | None = None
    names: list[str] = []
    for row in rows:
        # Most rows have the columns of the row above, which were checked there.
        if row.names != previous:
            previous, names = row.names, rename_columns(row.names, columns, row.names_where)
            label_columns = find_label_columns(names, row.names_where)
            if not used:
                used = label_columns
                table.cells.update({name: [] for name in ("path", *used)})
            if sorted(label_columns) != sorted(used):
                what = f"here {label_columns[0]!r} is the label, in the lines above {used[0]!r}"
                raise DataError(what, where=row.where)
            # Most unused columns are legal, and a note names them. In JSON, any line may have further ones.
            table.unused.extend(name for name in names if name and name not in table.cells and name not in table.unused)
        values = {name: value for name, value in zip(names, row.values, strict=True) if name}
        table.structured.update(
            name for name, value in values.items() if isinstance(value, list | dict) and name not in table.cells
        )
        table.lines.append(row.line)
        for name, cells in table.cells.items():
            cells.append(values[name])
    # CSV has no lists: labels are separated by semicolons.
    if is_csv(path) and "labels" in table.cells:
        table.cells["labels"] = [[part for part in cell.split(";") if part.strip()] for cell in table.cells["labels"]]
    return table


def _resolve_paths(table: _Table) -> tuple[str, ...]:
    """Returns the absolute path of each row. Raises DataError if a file is missing or listed twice."""
    root = os.path.abspath(table.file.parent)
    row_by_path: dict[str, int] = {}
    missing: list[int] = []
    for row, name in enumerate(table.cells["path"]):
        if not isinstance(name, str) or not name:
            raise table.build_error(row, "the path is empty or not text")
        # normpath, not realpath: two links to one image are two samples.
        path = os.path.normpath(os.path.join(root, name))
        if not os.path.isfile(path):
            # All paths are checked before the error, which counts the missing ones.
            missing.append(row)
        # Paths are compared after normalisation: a.jpg and ./a.jpg are one file.
        if (first_row := row_by_path.setdefault(path, row)) != row:
            fix = "Name each image once; several labels of one image go into a column 'labels'."
            raise table.build_error(row, f"{name!r} was named before, in line {table.lines[first_row]}", fix)
    if missing:
        total_text = f" ({len(missing)} such paths in all)" if len(missing) > 1 else ""
        name = table.cells["path"][missing[0]]
        raise table.build_error(missing[0], f"there is no file {name!r}{total_text}", f"Paths are relative to {root}.")
    return tuple(row_by_path)


def _parse_labels(table: _Table) -> tuple[LabelKind, tuple[str, ...], NDArray[Any]]:
    """Returns the kind of the labels, the names of the classes or outputs, and the labels of all rows."""
    columns = table.label_columns
    if columns == ["label"]:
        return _parse_class_labels(table)
    if columns == ["labels"]:
        return _parse_multi_labels(table)
    if columns == ["value"]:
        return _parse_values(table)
    values_by_column = [
        [_parse_number(table, row, cell) for row, cell in enumerate(table.cells[name])] for name in columns
    ]
    # One list for each column: transposed to one row for each sample.
    names = tuple(name.removeprefix("value_") for name in columns)
    return "value", names, np.ascontiguousarray(np.array(values_by_column, np.float32).T)


def _parse_class_labels(table: _Table) -> tuple[LabelKind, tuple[str, ...], NDArray[Any]]:
    names = [_parse_class_name(table, row, cell) for row, cell in enumerate(table.cells["label"])]
    classes = sorted(set(names))
    index_by_class = {name: index for index, name in enumerate(classes)}
    return "class", tuple(classes), np.array([index_by_class[name] for name in names], np.int64)


def _parse_multi_labels(table: _Table) -> tuple[LabelKind, tuple[str, ...], NDArray[Any]]:
    label_names: list[list[str]] = []
    for row, cell in enumerate(table.cells["labels"]):
        if not isinstance(cell, list):
            raise table.build_error(row, f"labels are {cell!r}, which is not a list")
        label_names.append([_parse_class_name(table, row, name) for name in cell])
    if not any(label_names):
        raise DataError("no image has a label", where=str(table.file), fix="Fill the column 'labels'.")
    return build_multi_labels(label_names)


def _parse_values(table: _Table) -> tuple[LabelKind, tuple[str, ...], NDArray[Any]]:
    cells = table.cells["value"]
    if not isinstance(cells[0], list):
        return "value", (), np.array([_parse_number(table, row, cell) for row, cell in enumerate(cells)], np.float32)
    length = len(cells[0])
    values: list[list[float]] = []
    for row, cell in enumerate(cells):
        if not isinstance(cell, list) or not cell or len(cell) != length:
            raise table.build_error(
                row, f"the value is {cell!r}, which is not a list of numbers as long as the first line's"
            )
        values.append([_parse_number(table, row, element) for element in cell])
    return "value", tuple(map(str, range(length))), np.array(values, np.float32)


def _parse_class_name(table: _Table, row: int, cell: Any) -> str:
    # In Python, True is an int.
    if isinstance(cell, int) and not isinstance(cell, bool):
        # Numbers as class names, for files made from numeric labels.
        return str(cell)
    if not isinstance(cell, str) or not cell.strip():
        raise table.build_error(row, f"the label is {cell!r}, which is not a class name", "Give every image a label.")
    return cell.strip()


def _parse_number(table: _Table, row: int, cell: Any) -> float:
    number = math.nan
    # float() would read 1_000 as a thousand.
    if isinstance(cell, str) and "_" in cell:
        pass
    elif isinstance(cell, str | int | float) and not isinstance(cell, bool):
        try:
            number = float(cell)
        except (ValueError, OverflowError):
            number = math.nan
    if not abs(number) <= _MAX_FLOAT32:
        raise table.build_error(row, f"the value is {cell!r}, which is not a finite number (float32)")
    return number
