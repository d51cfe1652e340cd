"""BlobIndex: where the bytes of a sample lie, in any version of any data set.

Every sample of a version is one of the newest version, or was removed by a later one. The newest versions are searched
as they are; samples that were removed are noted in a small database, each removal once. So a digest that nobody has
costs no reading of old versions. The database is made anew if it is deleted.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from headway.core.errors import HeadwayError
from headway.data.columns import FLAG_SPLIT
from headway.http.problems import ProblemError
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.store.objects import Objects
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.records import Version
from headway.lifecycle.store.rows import Ids, Rows
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.version_files import get_version_folder

_TABLES = (
    "create table if not exists removed (sample blob primary key, shard text not null, offset integer not null,"
    " length integer not null, is_split integer not null) without rowid",
    "create table if not exists seen (dataset text primary key, number integer not null) without rowid",
)


@final
@dataclass(frozen=True, slots=True)
class Blob:
    """The place of the bytes of a sample.

    Attributes:
        objects: the objects of the store.
        shard: SHA-256 of its shard.
        offset: where its bytes are there, or its record.
        length: number of its bytes.
        is_split: the record holds them in several parts.
    """

    objects: Objects
    shard: str
    offset: int
    length: int
    is_split: bool = False


@final
class BlobIndex:
    """Finds the bytes of samples. All methods may be called by several threads.

    Args:
        path: of the database, which is made if it does not exist.
        read_rows: reads a version by its ID.
    """

    def __init__(self, store: Store, path: Path, read_rows: Callable[[str], Rows]) -> None:
        self._store, self._path, self._read_rows = store, path, read_rows
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect()) as database:
            for statement in _TABLES:
                database.execute(statement)

    def find(self, sha256: str) -> Blob:
        """Returns where the bytes of a sample lie. Raises ProblemError (404)."""
        key = bytes.fromhex(sha256)
        heads = self._store.list_datasets()
        for head in heads.values():
            try:
                rows = self._read_rows(head.version)
            # It is damaged or gone: another data set may have the sample.
            except (HeadwayError, ProblemError):
                continue
            row = int(rows.find(np.array([key], "S32"))[0])
            if row >= 0:
                _, shard, offset, length, is_split = next(_list_places(rows, np.array([row])))
                return Blob(open_objects(self._store.folder), shard, offset, length, is_split)
        with self._lock, closing(self._connect()) as database:
            for head in heads.values():
                self._note_removals(database, head)
            found = database.execute(
                "select shard, offset, length, is_split from removed where sample = ?", (key,)
            ).fetchone()
        # Else it was collected as garbage, with the versions that had it.
        objects = open_objects(self._store.folder)
        if found is not None and objects.measure(found[0]) is not None:
            return Blob(objects, found[0], found[1], found[2], bool(found[3]))
        raise refuse("not-found", "no sample has these bytes", "GET /datasets/{id}/samples lists them.")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)

    def _note_removals(self, database: sqlite3.Connection, head: Version) -> None:
        """Notes the samples that versions up to this one have removed since the last call."""
        name = head.dataset
        seen = database.execute("select number from seen where dataset = ?", (name,)).fetchone()
        if seen is not None and seen[0] >= head.number:
            return
        newer = head.number + 1
        versions = self._store.log(name, below=newer, count=None if seen is None else newer - seen[0])
        if seen is not None and not self._is_kept(versions[-1]):
            # What was seen last was collected as garbage, and an older version may have its samples.
            versions = self._store.log(name, below=newer)
        last: Version | None = None
        has_removed = False
        for version in reversed(versions):
            if not self._is_kept(version):
                # One that was collected as garbage may be what has removed samples of the version before.
                has_removed |= version.counts.get("removed", 0) > 0
                continue
            if seen is None or version.number > seen[0]:
                has_removed |= version.counts.get("removed", 0) > 0
                if has_removed and last is not None:
                    self._note_difference(database, last, version)
            last, has_removed = version, False
        database.execute("insert or replace into seen values (?, ?)", (name, head.number))

    def _is_kept(self, version: Version) -> bool:
        return get_version_folder(self._store.folder, version.version).is_dir()

    def _note_difference(self, database: sqlite3.Connection, before: Version, after: Version) -> None:
        try:
            rows = self._read_rows(before.version)
            gone = np.flatnonzero(self._read_rows(after.version).find(rows.keys) < 0)
        # One that is damaged has nothing to give.
        except (HeadwayError, ProblemError):
            return
        database.execute("begin immediate")
        database.executemany("insert or replace into removed values (?, ?, ?, ?, ?)", _list_places(rows, gone))
        database.execute("commit")


def _list_places(rows: Rows, numbers: Ids) -> Iterator[tuple[bytes, str, int, int, bool]]:
    """Yields (ID, digest of the shard, offset, length, whether the record is split) of samples."""
    for row in numbers.tolist():
        offset, length, flags = (int(rows.places[column][row]) for column in ("offset", "length", "flags"))
        shard = rows.shards[rows.shard[row]].digest
        yield rows.sample_id[row].tobytes(), shard, offset, length, bool(flags & FLAG_SPLIT)
