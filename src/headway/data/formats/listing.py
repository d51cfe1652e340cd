"""Reads a list of images from a file: CSV with a header, or JSON objects, one a line.

Column `path` is relative to the file's own folder. One of these columns has the labels: `label` (a class name),
`labels` (several, separated by `;` in CSV, a list in JSON), `value` (a number; in JSON also a list of them), or
`value_NAME` columns (several numbers).
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import read_regular
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
    text = _read_text(path)
    # The extension decides, since a line of JSON is valid CSV.
    parse = _parse_csv if path.suffix.lower() == ".csv" else _parse_json_lines
    table = parse(path, text, columns)
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


def _read_text(path: Path) -> str:
    try:
        data = read_regular(path)
    except OSError as error:
        raise UsageError(f"the file cannot be read ({error.strerror})", where=str(path)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _build_encoding_error(path, data.count(b"\n", 0, error.start) + 1) from error
    # Null characters mean UTF-16 or a binary file.
    if "\0" in text:
        raise _build_encoding_error(path, text.count("\n", 0, text.index("\0")) + 1)
    return text


def _build_encoding_error(path: Path, line: int) -> DataError:
    return DataError("this is not UTF-8 text", where=f"{path}, line {line}", fix="Save the file as UTF-8.")


def _parse_csv(path: Path, text: str, columns: ColumnNames | None) -> _Table:
    """Returns the columns `path` and the labels of a CSV. Raises DataError, which names the line, if it is invalid."""
    # Quoted fields may contain line ends, so the file is not split into lines first.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)

    def read_rows() -> Iterator[list[str]]:
        """Yields the rows. Raises DataError if the text is not CSV."""
        while True:
            try:
                yield next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"this is not valid CSV ({error})", where=f"{path}, line {reader.line_num}") from error

    lines: list[int] = []
    target_columns: list[tuple[int, list[Any]]] = []
    header: list[str] = []
    table = _Table(path, lines, {}, [], set())
    for row in read_rows():
        if not row:
            continue
        if not header:
            where = f"{path}, line {reader.line_num}"
            header = rename_columns([name.strip() for name in row], columns, where)
            used = ["path", *find_label_columns(header, where)]
            table.cells.update({name: [] for name in used})
            # Most unused columns are legal, and a note names them.
            table.unused.extend(name for name in header if name and name not in used)
            target_columns = [(header.index(name), table.cells[name]) for name in used]
            continue
        # An unquoted comma in a path shifts every cell after it.
        if len(row) != len(header):
            raise DataError(
                f"the line has {len(row)} fields and the header {len(header)}",
                where=f"{path}, line {reader.line_num}",
                fix="Put a text that holds a comma into double quotes.",
            )
        lines.append(reader.line_num)
        for index, cells in target_columns:
            cells.append(row[index])
    # CSV has no lists: labels are separated by semicolons.
    if "labels" in table.cells:
        table.cells["labels"] = [[part for part in cell.split(";") if part.strip()] for cell in table.cells["labels"]]
    return table


def _parse_json_lines(path: Path, text: str, columns: ColumnNames | None) -> _Table:
    """Returns the columns `path` and the labels of JSON lines. Raises DataError, which names the line."""
    table = _Table(path, [], {}, [], set())
    used: list[str] = []
    previous: list[str] | None = None
    names: list[str] = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {line_number}"
        entry = _parse_json_object(line, where)
        keys = [name for name, _ in entry]
        # Most lines have the keys of the line above, which were checked there.
        if keys != previous:
            previous, names = keys, rename_columns(keys, columns, where)
            label_columns = find_label_columns(names, where)
            if not used:
                used = label_columns
                table.cells.update({name: [] for name in ("path", *used)})
            if sorted(label_columns) != sorted(used):
                raise DataError(f"here {label_columns[0]!r} is the label, in the lines above {used[0]!r}", where=where)
            # Any line may have further keys.
            table.unused.extend(name for name in names if name and name not in table.cells and name not in table.unused)
        row = {name: value for name, (_, value) in zip(names, entry, strict=True) if name}
        table.structured.update(
            name for name, value in row.items() if isinstance(value, list | dict) and name not in table.cells
        )
        table.lines.append(line_number)
        for name, cells in table.cells.items():
            cells.append(row[name])
    return table


def _parse_json_object(line: str, where: str) -> list[tuple[str, Any]]:
    fix = 'Write one JSON object a line: {"path": "a.jpg", "label": "cat"}.'
    try:
        # Pairs, not a dictionary: a repeated key must be refused, not lost.
        entry = json.loads(line, object_pairs_hook=list)
        if "\\u" in line:
            # Half of a surrogate pair cannot be encoded as text.
            json.dumps(entry, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"this is not valid JSON ({error})", where=where, fix=fix) from error
    if not line.lstrip().startswith("{"):
        raise DataError("this is not a JSON object", where=where, fix=fix)
    return [(name, value) for name, value in entry]


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
