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

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.parallel.ledger import Update

ROW = struct.Struct("<HIII")
CRC = struct.Struct("<I")
ROW_BYTES = ROW.size + CRC.size

COLUMNS = np.dtype([("worker", "<u2"), ("step", "<u4"), ("read", "<u4"), ("applied", "<u4"), ("crc", "<u4")])
"""A row, as numpy reads it."""
# The table of CRC-32, of zlib's own sums of single bytes.
CRC_TABLE = np.array([zlib.crc32(bytes([byte ^ 0xFF])) ^ 0xFF000000 for byte in range(256)], np.uint32)


@final
class UpdateLog:
    """Appends updates to the log of a run. What is there already is checked once, and never written again.

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
        self._path, self._file = path, path.open("a+b", buffering=0)
        self.rewind(version)

    def rewind(self, version: int) -> None:
        """Removes the rows behind a number of updates, which the run goes back to. Without any it does nothing.

        Raises:
            DataError: the file has fewer updates.
        """
        found = os.fstat(self._file.fileno()).st_size // ROW_BYTES
        if found < version:
            raise _build_error(self._path, f"it has {found} updates, and the run has made {version}")
        self._file.truncate(version * ROW_BYTES)
        self._crc = 0
        if version:
            (self._crc,) = CRC.unpack(os.pread(self._file.fileno(), CRC.size, version * ROW_BYTES - CRC.size))

    def write(self, update: Update) -> None:
        """Appends one update."""
        row = ROW.pack(*update)
        self._crc = zlib.crc32(row, self._crc)
        self._file.write(row + CRC.pack(self._crc))

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
    if damaged := damaged or _find_gap(rows):
        raise _build_error(path, damaged)
    return [Update(*row) for row in rows.tolist()]


def find_gaps(updates: Sequence[Update]) -> str:
    """Returns what is impossible in a log, or an empty text: every step is applied once, after it was read."""
    return _find_gap(np.array(updates, np.int64).reshape(-1, len(Update._fields)))


def _find_gap(rows: NDArray[np.int64]) -> str:
    worker, step, read, applied = rows.T
    numbers = np.arange(1, len(rows) + 1)
    # The update before of the same worker: its neighbour, once they are sorted by worker.
    order = np.argsort(worker, kind="stable")
    has_earlier = worker[order][1:] == worker[order][:-1]
    last = np.zeros(len(rows), np.int64)
    last[order[1:][has_earlier]] = applied[order[:-1][has_earlier]]
    is_first = np.zeros(len(rows), bool)
    is_first[np.unique(step, return_index=True)[1]] = True
    faults = np.stack([applied != numbers, read >= applied, read < last, ~is_first])
    if not faults.any():
        return ""
    place = int(np.argmax(faults.any(axis=0)))
    update = Update(*rows[place].tolist())
    what = (
        f"says that it was applied as {update.applied}",
        f"has read version {update.read}, which came later",
        f"has read version {update.read}, before its worker's last update was applied",
        f"computes step {update.step} again",
    )[int(np.argmax(faults[:, place]))]
    return f"update {place + 1} {what}"


def _read_rows(path: Path) -> tuple[NDArray[np.int64], str]:
    """Returns the rows [n, 4] up to the first damaged one, and what is wrong with that; empty if none is."""
    content = path.read_bytes() if path.exists() else b""
    table = np.frombuffer(content, COLUMNS, len(content) // ROW_BYTES)
    # Each sum begins with the one stored before, so all rows are checked at once, and the first wrong one is the same.
    crc = ~np.concatenate([np.zeros(1, np.uint32), table["crc"]])[: len(table)]
    for byte in table.view(np.uint8).reshape(-1, ROW_BYTES)[:, : ROW.size].T:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    rows = np.stack([table[name].astype(np.int64) for name in Update._fields], axis=1)
    wrong = np.flatnonzero(~crc != table["crc"])
    if len(wrong):
        return rows[: wrong[0]], f"update {wrong[0] + 1} is not what was written"
    return rows, ""


def _build_error(path: Path, what: str) -> DataError:
    return DataError(f"the log of updates is damaged: {what}", where=str(path), fix="Copy the run folder again.")
