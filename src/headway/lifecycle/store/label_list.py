"""Lists of labels for samples in a store: CSV or JSON lines with `name` (or `path`, or `sample`) and `label`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.core.errors import DataError
from headway.core.list_rows import parse_rows, read_list_text
from headway.core.untrusted_json import JsonError, is_object, parse_object
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.steps import label_sample

_SAMPLE_COLUMNS = ("sample", "name", "path")
_ANNOTATIONS = "annotations"
_PICK_COLUMNS = ("proposed", "arm")
"""Columns that mark a list of picks, in which an empty label means that nobody has set it yet."""
_LAYOUT = 'Write a header name,label (CSV), or a line such as {"name": "a.jpg", "label": "cat"} for each sample.'


def read_labels(path: Path) -> list[Change]:
    """Reads the labels of a list; an empty label takes one away, and a column `by` says who set it.

    A column `split` moves the samples, those without a label once they get one; where it is empty, they stay, or go
    where their name says. A column `annotations` holds a JSON object; where it is empty, the annotations stay.
    If a list has the columns `proposed` and `arm`, as the picks of `headway mine`, rows without a label are skipped.

    Raises:
        UsageError: the file cannot be read.
        DataError: a line is not as it should be; the message names it.
    """
    changes = []
    for where, row in _read_rows(path):
        if "label" not in row:
            raise DataError("there is no label", where=where, fix=_LAYOUT)
        # Somebody may have labelled the image elsewhere since it was picked.
        if not row["label"] and all(column in row for column in _PICK_COLUMNS):
            continue
        try:
            annotations = parse_object(text) if (text := row.get(_ANNOTATIONS)) else None
        except JsonError as error:
            raise DataError(f"the annotations cannot be read: {error}", where=where, fix=_LAYOUT) from None
        sample, label = _find_sample(row, where), row["label"] or None
        changes.append(label_sample(sample, label, row.get("by") or "", annotations, row.get("split") or ""))
    return changes


def read_samples(path: Path) -> list[str]:
    """Reads the names or IDs of a list; other columns do not matter. Raises as `read_labels`."""
    return [_find_sample(row, where) for where, row in _read_rows(path)]


def _find_sample(row: Mapping[str, str], where: str) -> str:
    for column in _SAMPLE_COLUMNS:
        if row.get(column):
            return row[column]
    raise DataError("no sample is named", where=where, fix=_LAYOUT)


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (file and line, texts by column)."""
    for row in parse_rows(path, read_list_text(path)):
        found = row.to_dict()
        # Spreadsheet programs write semicolons in some locales.
        if len(row.names) == 1 and ";" in row.names[0]:
            fix = "Separate the columns with commas."
            raise DataError(f"there is one column, {row.names[0]!r:.100}", where=row.names_where, fix=fix)
        # As in a cell of a CSV file.
        if is_object(found.get(_ANNOTATIONS)):
            found[_ANNOTATIONS] = json.dumps(found[_ANNOTATIONS])
        texts = {name: "" if value is None else value for name, value in found.items() if name in _USED}
        if not all(isinstance(value, str) for value in texts.values()):
            raise DataError("names and labels are texts, and annotations objects", where=row.where, fix=_LAYOUT)
        yield row.where, texts | {name: "" for name in _PICK_COLUMNS if name in found}


_USED = (*_SAMPLE_COLUMNS, "label", "by", "split", _ANNOTATIONS)
