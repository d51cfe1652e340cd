"""Append-only tables of float32 per logging step (`*.rows`): a line of JSON with the names, then rows of fixed length.

A table has n items (layers, ranks, devices) with m columns each. A row is position and step (int64), then n x m values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.files import read_regular, write_atomically
from headway.core.untrusted_json import parse_object


@final
@dataclass(frozen=True, kw_only=True)
class RowTable:
    """The content of a row file.

    Attributes:
        names: names of the n items.
        columns: names of the m columns.
        positions, steps: int64 [rows], of the run after the step that the row was taken in.
        values: float32 [rows, n, m]; NaN for a missing value.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    positions: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


def append_row(
    path: Path,
    names: Sequence[str],
    columns: Sequence[str],
    position: int,
    step: int,
    values: NDArray[np.float32],
    *,
    keeps_names: bool = False,
) -> None:
    """Appends one row. The first call creates the file; a file with other columns is replaced.

    Args:
        values: [n, m].
        keeps_names: a file with other names gets those that it lacks, and keeps its own: NaN is in each row for the
            names that it did not have. False: a file with other names is replaced.
    """
    if keeps_names:
        names, values = _join_names(path, names, columns, values)
    head, kind = _encode_header(names, columns), _build_row_type(len(names), len(columns))
    row = np.zeros(1, kind)
    row["position"], row["step"], row["values"] = position, step, values
    # Appending is one small write per logging step; only a header that differs rewrites the file.
    with path.open("a+b") as file:
        file.seek(0)
        known = file.read(len(head))
        end = file.seek(0, os.SEEK_END)
        if known != head:
            file.truncate(0)
            file.write(head)
        # A killed process left part of a row: rows appended after it could not be read.
        elif torn := (end - len(head)) % kind.itemsize:
            file.truncate(end - torn)
        file.write(row.tobytes())


def read_rows(path: Path) -> RowTable | None:
    """Reads a file up to its last whole row; None if there is no file or its header is damaged."""
    opened = _open_rows(path)
    if opened is None:
        return None
    head, rows = opened
    return RowTable(
        names=head[0],
        columns=head[1],
        positions=rows["position"].astype(np.int64),
        steps=rows["step"].astype(np.int64),
        values=rows["values"].astype(np.float32),
    )


def truncate_rows(path: Path, position: int) -> None:
    """Removes the rows after a position."""
    # Resuming from an older checkpoint writes the later rows again.
    opened = _open_rows(path)
    if opened is not None:
        head, rows = opened
        kept = rows[rows["position"] <= position]
        write_atomically(path, _encode_header(*head) + kept.tobytes())


def _join_names(
    path: Path, names: Sequence[str], columns: Sequence[str], values: NDArray[np.float32]
) -> tuple[Sequence[str], NDArray[np.float32]]:
    """Returns the names of a file and of a new row together, and the row for them; earlier rows are rewritten."""
    with path.open("a+b") as file:
        file.seek(0)
        # The names of the last step, as a rule: nothing has to be parsed.
        line = file.readline()
    if line == _encode_header(names, columns) or (head := _parse_header(line)) is None:
        return names, values
    known, known_columns = head
    if known_columns != tuple(columns):
        return names, values
    joined = list(known)
    place = 0
    for name in names:
        # A new name comes behind the one before it: the order of the names may mean something.
        place = joined.index(name) if name in joined else place
        if name not in joined:
            joined.insert(place, name)
        place += 1
    if len(joined) > len(known) and (table := read_rows(path)) is not None:
        kind = _build_row_type(len(joined), len(columns))
        rows = np.zeros(len(table.steps), kind)
        rows["position"], rows["step"] = table.positions, table.steps
        rows["values"] = _spread(table.values, table.names, joined)
        write_atomically(path, _encode_header(joined, columns) + rows.tobytes())
    return joined, _spread(values[None], names, joined)[0]


def _spread(values: NDArray[np.float32], names: Sequence[str], joined: Sequence[str]) -> NDArray[np.float32]:
    """Returns [rows, names, m] as [rows, joined, m], with NaN for the others."""
    places = {name: place for place, name in enumerate(joined)}
    spread = np.full((len(values), len(joined), values.shape[-1]), np.nan, np.float32)
    spread[:, [places[name] for name in names]] = values
    return spread


def _open_rows(path: Path) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], NDArray[Any]] | None:
    try:
        line, _, content = read_regular(path).partition(b"\n")
    except OSError:
        return None
    if (head := _parse_header(line)) is None:
        return None
    kind = _build_row_type(*map(len, head))
    # The last row may be incomplete: a run is killed at any time, and a live run is read while it writes.
    return head, np.frombuffer(content[: len(content) // kind.itemsize * kind.itemsize], kind)


def _parse_header(line: bytes) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns names and columns; None if the header is damaged."""
    try:
        head = parse_object(line)
        names, columns = tuple(head["names"]), tuple(head["columns"])
    except (ValueError, KeyError, TypeError):
        return None
    return (names, columns) if all(isinstance(name, str) for name in names + columns) else None


def _encode_header(names: Sequence[str], columns: Sequence[str]) -> bytes:
    return json.dumps({"names": list(names), "columns": list(columns)}).encode() + b"\n"


def _build_row_type(names: int, columns: int) -> np.dtype[Any]:
    return np.dtype([("position", "<i8"), ("step", "<i8"), ("values", "<f4", (names, columns))])
