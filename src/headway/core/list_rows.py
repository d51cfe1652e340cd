"""Rows of a list that people write: CSV with a header, or JSON objects, one a line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import DataError, UsageError
from headway.core.files import describe_os_error, read_regular
from headway.core.untrusted_json import JsonError, is_object, parse_value

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_JSON_FIX = 'Write one JSON object a line: {"path": "a.jpg", "label": "cat"}.'


class ListRow(NamedTuple):
    """One row of a list."""

    path: Path
    """File of the list."""
    line: int
    names: list[str]
    """Names of its columns. Rows of one CSV share the list."""
    values: list[Any]
    """Texts in a CSV, and any values of JSON in JSON lines."""
    names_line: int
    """Line that names the columns: the header of a CSV."""

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.path}, line {self.line}"

    @property
    def names_where(self) -> str:
        """File and line that name the columns, for messages."""
        return f"{self.path}, line {self.names_line}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the values by column. Raises DataError if two columns have one name."""
        found = dict(zip(self.names, self.values, strict=True))
        if len(found) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            what = f"column {twice!r:.100} occurs twice"
            raise DataError(what, where=self.names_where, fix="Give each column its own name.")
        return found


def is_csv(path: Path) -> bool:
    """Returns True for the name of a list that is CSV: all but those whose ending says JSON."""
    return path.suffix.lower() not in JSON_ENDINGS


def read_list_text(path: Path) -> str:
    """Returns the text of a list.

    Raises:
        UsageError: the file cannot be read.
        DataError: it is not UTF-8 text; the message names the line.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise UsageError(f"the file cannot be read ({describe_os_error(error)})", where=str(path)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _build_encoding_error(path, data.count(b"\n", 0, error.start) + 1) from error
    # Null characters mean UTF-16 or a binary file.
    if "\0" in text:
        raise _build_encoding_error(path, text.count("\n", 0, text.index("\0")) + 1)
    return text


def parse_rows(path: Path, text: str) -> Iterator[ListRow]:
    """Yields the rows of a list; empty lines are left out.

    Args:
        path: file of the text, for messages; its ending says the format, since a line of JSON is valid CSV.

    Raises:
        DataError: the text is neither; the message names the line.
    """
    return (_parse_csv if is_csv(path) else _parse_json_lines)(path, text)


def _parse_csv(path: Path, text: str) -> Iterator[ListRow]:
    # Quoted fields may contain line ends, so the file is not split into lines first.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names, names_line = list[str](), 0
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            where = f"{path}, line {reader.line_num}"
            raise DataError(f"this is not valid CSV ({error})", where=where) from None
        if cells is None:
            return
        if not cells:
            continue
        if not names:
            names, names_line = [cell.strip() for cell in cells], reader.line_num
            continue
        # An unquoted comma in a path shifts every cell after it.
        if len(cells) != len(names):
            what = f"the line has {len(cells)} fields and the header {len(names)}"
            where = f"{path}, line {reader.line_num}"
            raise DataError(what, where=where, fix="Put a text that holds a comma into double quotes.")
        yield ListRow(path, reader.line_num, names, cells, names_line)


def _parse_json_lines(path: Path, text: str) -> Iterator[ListRow]:
    # Not `splitlines`, which would split at other characters than line feeds too.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            tree = parse_value(line)
            if "\\u" in line:
                # Half of a surrogate pair cannot be encoded as text.
                json.dumps(tree, ensure_ascii=False).encode()
        except (JsonError, UnicodeEncodeError) as error:
            raise DataError(f"this is not a line of JSON: {error}", where=where, fix=_JSON_FIX) from None
        if not is_object(tree):
            raise DataError("this is not a JSON object", where=where, fix=_JSON_FIX)
        yield ListRow(path, number, list(tree), list(tree.values()), number)


def _build_encoding_error(path: Path, line: int) -> DataError:
    return DataError("this is not UTF-8 text", where=f"{path}, line {line}", fix="Save the file as UTF-8.")
