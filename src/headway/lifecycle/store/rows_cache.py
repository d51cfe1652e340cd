"""The samples of versions that were read or made last. Versions never change, so what is known stays true."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import final

from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.version_files import get_version_folder, read_rows

LEAST_VERSIONS, MOST_VERSIONS, MOST_SAMPLES = 4, 64, 4_000_000
"""Versions that are kept in any case, and at most; and samples up to which more than the least are kept. Columns that
were read are mapped, and a process has a limited number of mappings; those that were just made have about 100 bytes a
sample."""


@final
class RowsCache:
    """Samples of a few versions of a store. Any thread may call."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = Lock()
        # By version and number of its folder: a folder that was mended has other places of the bytes.
        self._rows = OrderedDict[tuple[str, int], Rows]()

    def read(self, version: str) -> Rows:
        """Returns the samples of a version. Raises DataError if it is damaged, or was collected as garbage."""
        key = self._build_key(version)
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
                return self._rows[key]
        rows = read_rows(self._store, version)
        self.keep(version, rows)
        return rows

    def keep(self, version: str, rows: Rows) -> None:
        """Remembers the samples of a version whose folder is there."""
        key = self._build_key(version)
        with self._lock:
            self._rows[key] = rows
            self._rows.move_to_end(key)
            while len(self._rows) > LEAST_VERSIONS and (
                len(self._rows) > MOST_VERSIONS or sum(map(len, self._rows.values())) > MOST_SAMPLES
            ):
                self._rows.popitem(last=False)

    def _build_key(self, version: str) -> tuple[str, int]:
        try:
            return version, get_version_folder(self._store, version).stat().st_ino
        except OSError:
            return version, 0
