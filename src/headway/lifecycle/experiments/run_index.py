"""RunIndex: an SQLite file over many runs. Run folders and stores of MLflow stay the truth: delete it at any time.

An update reads only runs whose files changed. Several processes may update and read at once (WAL).
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, open_regular
from headway.core.mounts import find_mount
from headway.core.text_format import pluralise
from headway.lifecycle.experiments.record import (
    RunReadError,
    RunRecord,
    RunStore,
    Source,
    clean_text,
    encode_value,
    fold_text,
)
from headway.lifecycle.experiments.scan import Found

LOG = logging.getLogger("headway.lifecycle")

# In the header of the file, so that no other program's database is taken for an index, or deleted.
APPLICATION_ID = 0x48575849
VERSION = 1
BUSY_S = 10.0
# Runs of one transaction, and values of metrics: an update that is stopped keeps what it has, and memory holds no more
# than one run beyond these. A value takes some 150 bytes.
CHUNK = 64
CHUNK_POINTS = 1_000_000

SCHEMA = (
    # `reason`: the run is damaged, and has no other values than its path.
    "CREATE TABLE runs (run INTEGER PRIMARY KEY, path BLOB NOT NULL UNIQUE, signature TEXT NOT NULL, reason TEXT, "
    "kind TEXT, name TEXT, state TEXT, started REAL)",
    "CREATE TABLE keys (key INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (source, name))",
    # The last value of a metric is an entry too: looking for it in `metrics` would take 50 times as long.
    "CREATE TABLE entries (key INTEGER NOT NULL, run INTEGER NOT NULL, number REAL, text TEXT NOT NULL, "
    "PRIMARY KEY (key, run)) WITHOUT ROWID",
    "CREATE INDEX entries_of_run ON entries (run)",
    "CREATE TABLE metrics (run INTEGER NOT NULL, key INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, "
    "PRIMARY KEY (run, key, step)) WITHOUT ROWID",
)


_Read = tuple[Path, RunRecord | RunReadError]


@final
@dataclass(frozen=True, kw_only=True)
class DamagedRun:
    """A run that cannot be read, and why."""

    path: Path
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of an update.

    Attributes:
        index: the file.
        runs: number of runs that can be listed.
        read: number of runs that were new or had changed.
        gone: number of runs that are no longer there.
        damaged: runs that cannot be read, by path.
    """

    index: Path
    runs: int
    read: int
    gone: int
    damaged: tuple[DamagedRun, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers and the damaged runs as a JSON tree."""
        return {
            "index": str(self.index),
            "runs": self.runs,
            "read": self.read,
            "gone": self.gone,
            "damaged": [{"run": str(one.path), "reason": one.reason} for one in self.damaged],
        }

    def describe(self) -> str:
        """Describes the update in a sentence, and each damaged run in a line."""
        text = f"{self.index} has {pluralise(self.runs, 'run')}: {self.read:,} new or changed, {self.gone:,} gone"
        lines = [f"{text}, {len(self.damaged):,} damaged." if self.damaged else f"{text}."]
        return "\n".join([*lines, *(f"Left out {one.path}: {one.reason}." for one in self.damaged)])


@final
class RunIndex:
    """The index, open. Use `open_index`.

    Attributes:
        path: the file.
        database: its connection. The table `temp.chosen` has the runs that the last `update` listed.
    """

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self._keys: dict[tuple[str, str], int] = {}

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.database.close()

    def update(self, found: Found) -> UpdateResult:
        """Reads the runs that are new or have changed, and removes those that are gone from the scanned folders.

        Raises:
            HeadwayError: the index cannot be written. UsageError: a store of MLflow cannot be read.
        """
        listed: dict[bytes, tuple[RunStore, Path, str]] = {}
        for store in found.stores:
            for path, signature in store.list_runs().items():
                # The first store wins: roots may overlap.
                listed.setdefault(os.fsencode(path), (store, path, signature))
        with self._explain():
            known = dict(self.database.execute("SELECT path, signature FROM runs"))
        gone = [path for path in known if path not in listed and _is_below(path, found.roots)]
        changed = {raw: entry for raw, entry in listed.items() if known.get(raw) != entry[2]}
        if gone:
            with self._write():
                for raw in gone:
                    self._remove(raw)
        for store in found.stores:
            wanted = {path: signature for owner, path, signature in changed.values() if owner is store}
            if wanted:
                self._read(store, wanted)
        with self._explain():
            self.database.execute("CREATE TEMP TABLE IF NOT EXISTS chosen (run INTEGER PRIMARY KEY)")
            self.database.execute("DELETE FROM temp.chosen")
            # An index may hold runs of other folders too, which the next command may ask for.
            numbers = self.database.execute("SELECT run, path, reason FROM runs ORDER BY path").fetchall()
            here = [(run, path, reason) for run, path, reason in numbers if path in listed]
            self.database.executemany(
                "INSERT INTO temp.chosen VALUES (?)", ((run,) for run, _, reason in here if reason is None)
            )
        damaged = tuple(
            DamagedRun(path=Path(os.fsdecode(path)), reason=reason) for _, path, reason in here if reason is not None
        )
        return UpdateResult(
            index=self.path, runs=len(here) - len(damaged), read=len(changed), gone=len(gone), damaged=damaged
        )

    def fetch(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query. Raises HeadwayError if the index is damaged."""
        with self._explain():
            return self.database.execute(query, values).fetchall()

    def compute_digest(self) -> str:
        """Returns the SHA-256 of all that the index has of its runs: equal for equal runs, however it was built."""
        digest = hashlib.sha256()
        queries = (
            "SELECT path, signature, reason, kind, name, state, started FROM runs ORDER BY path",
            "SELECT path, source, keys.name, number, text FROM entries JOIN runs USING (run) JOIN keys USING (key) "
            "ORDER BY path, source, keys.name",
            "SELECT path, keys.name, step, value FROM metrics JOIN runs USING (run) JOIN keys USING (key) "
            "ORDER BY path, keys.name, step",
        )
        with self._explain():
            for query in queries:
                for row in self.database.execute(query):
                    digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def _read(self, store: RunStore, wanted: dict[Path, str]) -> None:
        # Read first and then written, so that other processes wait for the writing alone.
        for chunk in _split_runs(store.read_runs(list(wanted))):
            with self._write():
                for path, record in chunk:
                    self._remove(os.fsencode(path))
                    self._insert(path, wanted[path], record)

    def _remove(self, path: bytes) -> None:
        row = self.database.execute("SELECT run FROM runs WHERE path = ?", (path,)).fetchone()
        if row is not None:
            for table in ("entries", "metrics", "runs"):
                self.database.execute(f"DELETE FROM {table} WHERE run = ?", row)

    def _insert(self, path: Path, signature: str, record: RunRecord | RunReadError) -> None:
        insert = "INSERT INTO runs (path, signature, reason, kind, name, state, started) VALUES (?, ?, ?, ?, ?, ?, ?)"
        raw = os.fsencode(path)
        if isinstance(record, RunReadError):
            self.database.execute(insert, (raw, signature, clean_text(record.what), None, None, None, None))
            return
        values = (raw, signature, None, record.kind, clean_text(record.name), record.state, record.started)
        run = self.database.execute(insert, values).lastrowid
        entries = [
            (self._number_key(source, key), run, *encode_value(value)) for source, key, value in record.list_values()
        ]
        # Two keys may be the same once they are cleaned; the last one wins, as in the list of a sink.
        self.database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", entries)
        for name, points in record.metrics.items():
            key = self._number_key("metric", name)
            self.database.executemany(
                "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)",
                ((run, key, point.step, point.value) for point in points),
            )

    def _number_key(self, source: Source, name: str) -> int:
        """Returns the number of a key, which is new for the first run that has it."""
        pair = (source, clean_text(name))
        if (number := self._keys.get(pair)) is None:
            row = self.database.execute("SELECT key FROM keys WHERE source = ? AND name = ?", pair).fetchone()
            if row is None:
                row = (self.database.execute("INSERT INTO keys (source, name) VALUES (?, ?)", pair).lastrowid,)
            number = self._keys[pair] = int(row[0])
        return number

    @contextmanager
    def _write(self) -> Iterator[None]:
        """Holds the one lock for writing for the duration of the block."""
        with self._explain():
            self.database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.database.execute("COMMIT")
            except BaseException:
                # Numbers that were given in this transaction are free again.
                self._keys.clear()
                with suppress(sqlite3.Error):
                    self.database.execute("ROLLBACK")
                raise

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _describe_failure(self.path, error) from error


def _split_runs(runs: Iterator[_Read]) -> Iterator[list[_Read]]:
    """Yields lists of at most CHUNK runs. A list ends at the run that brings it to CHUNK_POINTS values."""
    chunk, points = list[_Read](), 0
    for path, record in runs:
        chunk.append((path, record))
        points += record.count_points() if isinstance(record, RunRecord) else 0
        if len(chunk) >= CHUNK or points >= CHUNK_POINTS:
            yield chunk
            # Emptied, not replaced: the caller still has the list while the next runs are read.
            chunk.clear()
            points = 0
    if chunk:
        yield chunk


def open_index(path: Path) -> RunIndex:
    """Opens an index, or begins one. A damaged index, or one of another version, is begun anew.

    Raises:
        UsageError: the file is not an index, lies on a network file system, or cannot be written.
    """
    path = Path(os.path.abspath(path))
    fix = "Name a file on a disk of this machine: --index FILE."
    if (mount := find_mount(path.parent)) is not None and mount.is_network:
        what = (
            f"an index needs locks and shared memory, and those of a network file system ({mount.kind}) do not hold "
            "between machines"
        )
        raise UsageError(what, where=str(path), fix=fix)
    if not path.parent.is_dir():
        raise UsageError("there is no such folder for an index", where=str(path.parent), fix=fix)
    if os.path.lexists(path):
        _expect_index(path)
    for attempt in (1, 2):
        try:
            return RunIndex(path, _connect(path))
        except (sqlite3.Error, _StaleError) as error:
            # Only a file that says of itself that it is an index is deleted.
            is_damage = isinstance(error, _StaleError) or type(error) is sqlite3.DatabaseError
            if attempt == 2 or not is_damage:
                raise _describe_failure(path, error) from None
            LOG.info("%s is begun anew: %s.", path, error)
            _delete(path)
    raise AssertionError("unreachable")


@final
class _StaleError(Exception):
    """The file is an index that cannot be used."""


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        # It may have come with the folder from elsewhere: nothing in it may run.
        database.execute("PRAGMA trusted_schema = OFF")
        # SQLite's own `lower` changes ASCII alone.
        database.create_function("fold", 1, fold_text, deterministic=True)
        # Without a sync for each transaction: what a power failure takes, the next update reads again.
        database.execute("PRAGMA synchronous = NORMAL")
        # 64 MB instead of 2: each run has a row below every key, all over the file.
        database.execute("PRAGMA cache_size = -64000")
        if not _count_objects(database):
            database.execute("BEGIN IMMEDIATE")
            # Another process may have been first.
            if not _count_objects(database):
                for statement in SCHEMA:
                    database.execute(statement)
                database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("COMMIT")
        have = [
            row[0] for row in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        ]
        if have != list(SCHEMA) or database.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            raise _StaleError("another version of Headway wrote it")
        # After the first transaction, whose application id would else stand in the log alone if the process is killed.
        # While another process holds the file, it stays as it is: slower, and as right.
        with suppress(sqlite3.OperationalError):
            database.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        database.close()
        raise
    return database


def _count_objects(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _expect_index(path: Path) -> None:
    """Raises UsageError if a file is not an index of Headway: it must not be written to, nor deleted."""
    try:
        with open_regular(path) as file:
            head = file.read(72)
    except OSError as error:
        what = f"this index cannot be read ({describe_os_error(error)})"
        raise UsageError(what, where=str(path), fix="Name another file: --index FILE.") from None
    # A process that was killed as it began leaves an empty file, or zeros. Bytes 68 to 71 are the application id.
    if any(head) and (head[:16] != b"SQLite format 3\0" or int.from_bytes(head[68:72], "big") != APPLICATION_ID):
        raise UsageError(
            "this file is not an index of Headway", where=str(path), fix="Name another file: --index FILE."
        )


def _delete(path: Path) -> None:
    # The file first: SQLite drops a log whose database is empty, and would replay one into another database.
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)


def _describe_failure(path: Path, error: Exception) -> HeadwayError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError) and any(
        word in text for word in ("unable to open", "readonly", "attempt to write")
    ):
        what, fix = f"the index cannot be written ({text})", "Name a file in a folder that you may write: --index FILE."
        return UsageError(what, where=str(path), fix=fix)
    if "locked" in text:
        what = f"other processes have written to the index for {BUSY_S:g} s"
        return HeadwayError(what, where=str(path), fix="Try again.")
    what = f"the index cannot be used ({text})"
    return HeadwayError(what, where=str(path), fix="Delete it: the next update builds it from the runs.")


def _is_below(path: bytes, roots: Iterable[Path]) -> bool:
    return any(path == (raw := os.fsencode(root)) or path.startswith(raw.rstrip(b"/") + b"/") for root in roots)
