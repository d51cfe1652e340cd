"""The log of an asynchronous run: one row of 18 bytes for each update, from which the run can be repeated bit for bit.

A row has the worker, the step, the version read and the version applied, and a CRC-32 over itself and the CRC of the
row before. So a row that was changed, removed or moved is found.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import final

from headway.core.errors import DataError
from headway.core.files import write_atomically
from headway.parallel.ledger import Update

ROW = struct.Struct("<HIII")
CRC = struct.Struct("<I")
ROW_BYTES = ROW.size + CRC.size


@final
class UpdateLog:
    """Appends updates to the log of a run.

    Args:
        path: the file.
        version: updates that the run has made; rows behind them, of steps that are repeated, are removed.

    Raises:
        DataError: the file has fewer updates, or a damaged one.
    """

    def __init__(self, path: Path, version: int) -> None:
        rows, damaged = _read_rows(path)
        if len(rows) < version:
            raise _build_error(path, damaged or f"it has {len(rows)} updates, and the run has made {version}")
        self._crc = 0
        kept = b""
        for row in rows[:version]:
            self._crc, data = _encode(row, self._crc)
            kept += data
        write_atomically(path, kept)
        self._file = path.open("ab", buffering=0)

    def write(self, update: Update) -> None:
        """Appends one update."""
        self._crc, data = _encode(update, self._crc)
        self._file.write(data)

    def sync(self) -> None:
        """Syncs the file to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_updates(path: Path) -> list[Update]:
    """Reads a log. A torn last row, of a run that was killed, is left out.

    Raises:
        DataError: there is none, or a row was changed.
    """
    if not path.exists():
        raise DataError("this run has no log of updates", where=str(path), fix="Only runs of parallel: async have one.")
    rows, damaged = _read_rows(path)
    if damaged:
        raise _build_error(path, damaged)
    return rows


def find_gaps(updates: Sequence[Update]) -> str:
    """Returns what is impossible in a log, or an empty text: every step is applied once, after it was read."""
    seen: set[int] = set()
    last: dict[int, int] = {}
    for number, update in enumerate(updates, 1):
        if update.applied != number:
            return f"update {number} says that it was applied as {update.applied}"
        if update.read >= update.applied:
            return f"update {number} has read version {update.read}, which came later"
        if update.read < last.get(update.worker, 0):
            return f"update {number} has read version {update.read}, before its worker's last update was applied"
        if update.step in seen:
            return f"update {number} computes step {update.step} again"
        seen.add(update.step)
        last[update.worker] = update.applied
    return ""


def _encode(update: Update, crc: int) -> tuple[int, bytes]:
    row = ROW.pack(*update)
    crc = zlib.crc32(row, crc)
    return crc, row + CRC.pack(crc)


def _read_rows(path: Path) -> tuple[list[Update], str]:
    """Returns the rows up to the first damaged one, and what is wrong with that; empty if none is."""
    content = path.read_bytes() if path.exists() else b""
    rows: list[Update] = []
    crc = 0
    for start in range(0, len(content) - ROW_BYTES + 1, ROW_BYTES):
        row = content[start : start + ROW.size]
        crc = zlib.crc32(row, crc)
        if CRC.pack(crc) != content[start + ROW.size : start + ROW_BYTES]:
            return rows, f"update {len(rows) + 1} is not what was written"
        rows.append(Update(*ROW.unpack(row)))
    return rows, find_gaps(rows)


def _build_error(path: Path, what: str) -> DataError:
    return DataError(f"the log of updates is damaged: {what}", where=str(path), fix="Copy the run folder again.")
