"""Rows: numbers of many things at many steps in one file: a line of JSON that names them, then rows of one length."""

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
    """What such a file holds.

    Attributes:
        names: of the things, n of them. columns: of what is known of each, m of them.
        positions, steps: int64 [rows], of the run after the step that a row was taken in.
        values: float32 [rows, n, m]; NaN where nothing is known.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    positions: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


def append_row(
    path: Path, names: Sequence[str], columns: Sequence[str], position: int, step: int, values: NDArray[np.float32]
) -> None:
    """Adds one row; the file is made by the first, and anew where it is of other things.

    Args:
        values: [n, m].
    """
    head, kind = _encode_header(names, columns), _build_row_type(len(names), len(columns))
    row = np.zeros(1, kind)
    row["position"], row["step"], row["values"] = position, step, values
    with path.open("a+b") as file:
        file.seek(0)
        known = file.read(len(head))
        end = file.seek(0, os.SEEK_END)
        if known != head:
            file.truncate(0)
            file.write(head)
        elif torn := (end - len(head)) % kind.itemsize:  # a kill left it; what comes after it could not be read
            file.truncate(end - torn)
        file.write(row.tobytes())


def read_rows(path: Path) -> RowTable | None:
    """What a file holds up to its last whole row; None where there is no file, or no such file."""
    found = _open_rows(path)
    if found is None:
        return None
    head, rows = found
    return RowTable(
        names=tuple(head["names"]),
        columns=tuple(head["columns"]),
        positions=rows["position"].astype(np.int64),
        steps=rows["step"].astype(np.int64),
        values=rows["values"].astype(np.float32),
    )


def truncate_rows(path: Path, position: int) -> None:
    """Takes out the rows of positions after this one."""
    found = _open_rows(path)
    if found is not None:
        head, rows = found
        kept = rows[rows["position"] <= position]
        write_atomically(path, _encode_header(head["names"], head["columns"]) + kept.tobytes())


def _open_rows(path: Path) -> tuple[dict[str, Any], NDArray[Any]] | None:
    try:
        line, _, content = read_regular(path).partition(b"\n")
        head = parse_object(line)
        if not all(isinstance(name, str) for kind in ("names", "columns") for name in head[kind]):
            return None
        kind = _build_row_type(len(head["names"]), len(head["columns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return head, np.frombuffer(content[: len(content) // kind.itemsize * kind.itemsize], kind)


def _encode_header(names: Sequence[str], columns: Sequence[str]) -> bytes:
    return json.dumps({"names": list(names), "columns": list(columns)}).encode() + b"\n"


def _build_row_type(names: int, columns: int) -> np.dtype[Any]:
    return np.dtype([("position", "<i8"), ("step", "<i8"), ("values", "<f4", (names, columns))])
