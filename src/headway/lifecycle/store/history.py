"""The database of a store: data sets, their histories and tags. It holds no images and no labels.

Names move by compare-and-swap: a commit names the entry that it was made from, and fails if that is no longer the
newest one. SQLite serialises writers, and a killed one leaves the previous state.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.data.store_address import check_name, find_entry, is_version_text
from headway.lifecycle.store.connections import Connections
from headway.lifecycle.store.records import Version

_TABLES = """
CREATE TABLE datasets (name TEXT PRIMARY KEY, head INTEGER NOT NULL, about TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, number INTEGER NOT NULL, version TEXT NOT NULL,
    parent INTEGER, merged INTEGER, time REAL NOT NULL, by TEXT NOT NULL, message TEXT NOT NULL, counts TEXT NOT NULL,
    UNIQUE (dataset, number)
);
CREATE TABLE tags (dataset TEXT NOT NULL, tag TEXT NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (dataset, tag))
    WITHOUT ROWID;
CREATE TABLE setters (entry INTEGER NOT NULL, sample BLOB NOT NULL, by TEXT NOT NULL, PRIMARY KEY (entry, sample))
    WITHOUT ROWID;
PRAGMA user_version = 1;
"""
# Not with the others: stores of earlier versions lack these, and get them when they are changed.
_LATER_TABLES = """
CREATE INDEX IF NOT EXISTS entries_by_version ON entries (dataset, version);
CREATE TABLE IF NOT EXISTS requests (
    dataset TEXT NOT NULL, request TEXT NOT NULL, entry INTEGER NOT NULL, time REAL NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (dataset, request)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (time);
"""
REQUEST_AGE_S = 7 * 86400.0
"""Seconds for which a request is remembered: longer than the service promises to know a key."""
_ENTRY = """
SELECT e.dataset, e.number, e.version, p.version, m.version, e.time, e.by, e.message, e.counts,
    (SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE entry = e.id ORDER BY tag))
FROM entries e LEFT JOIN entries p ON p.id = e.parent LEFT JOIN entries m ON m.id = e.merged
"""
_ANCESTORS = """
WITH RECURSIVE old(id) AS (
    SELECT ? UNION SELECT e.parent FROM entries e JOIN old ON e.id = old.id WHERE e.parent IS NOT NULL
    UNION SELECT e.merged FROM entries e JOIN old ON e.id = old.id WHERE e.merged IS NOT NULL
) SELECT id FROM old
"""

Entry = int
"""Number of an entry of a history, over all data sets: later entries have larger numbers."""


def create_database(store: Path) -> None:
    """Creates the database in an existing folder. Raises UsageError on a network file system."""
    with Connections(store).open() as database:
        # Readers and one writer at a time; a commit is on the disk when it returns.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("BEGIN IMMEDIATE")
        # Another process may have created the tables since.
        if database.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _TABLES.split(";"):
                database.execute(statement)
        database.execute("COMMIT")


@final
@dataclass(frozen=True, kw_only=True)
class NewEntry:
    """A version that is about to become the newest one of its data set."""

    version: str
    """ID."""
    by: str
    message: str
    counts: Mapping[str, int]
    merged: Entry | None = None
    setters: Sequence[tuple[bytes, str]] = ()
    """(ID of a sample, who set its label), where that is another one than who made the version."""


@final
@dataclass(frozen=True, kw_only=True)
class Answered:
    """A request with a name, which is known as carried out once this is committed."""

    request: str
    result: str
    """Facts to remember about it, as JSON."""
    place: int
    """Number of its version among the new entries; -1: the version before all of them."""


@final
class History:
    """Data sets, versions and tags of a store. Any thread may call."""

    def __init__(self, store: Path) -> None:
        self._connections = Connections(store)

    def read(self) -> AbstractContextManager[sqlite3.Connection]:
        """Returns a context with a connection; writers may go on."""
        return self._connections.open()

    @contextmanager
    def lock(self) -> Iterator[sqlite3.Connection]:
        """Keeps all other writers out in the block; what it changes is undone if the block fails."""
        with self._connections.open() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def create(
        self,
        name: str,
        about: Mapping[str, str],
        start: Entry | None,
        entry: NewEntry,
        check: Callable[[], None] = lambda: None,
        *,
        request: str = "",
    ) -> Version:
        """Creates a data set with its first version. Raises UsageError if the name is taken or impossible.

        Args:
            start: entry that it comes from.
            check: see `commit`.
            request: name under which `find_request` finds the version for a week; empty: none.
        """
        check_name(name, "data set")
        with self.lock() as database:
            if database.execute("SELECT 1 FROM datasets WHERE name = ?", (name,)).fetchone():
                raise UsageError(f"the store has a data set {name!r} already", fix="Choose another name.")
            check()
            number = _insert(database, name, 0, start, entry)
            database.execute("INSERT INTO datasets VALUES (?, ?, ?)", (name, number, json.dumps(dict(about))))
            if request:
                _create_later_tables(database)
                _remember(database, name, [(request, number, "{}")])
            return _load(database, number)

    def commit(
        self,
        name: str,
        head: Entry,
        entries: Sequence[NewEntry],
        answered: Sequence[Answered] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[Version] | None:
        """Puts versions at the end of the history of a data set, all or none.

        Args:
            head: the entry that the first one was made from.
            answered: requests that were carried out.
            check: called while no garbage can be collected; raises if a file of a version is missing.

        Returns:
            the new versions, or None if `head` is no longer the newest entry, so that nothing was changed.
        """
        with self.lock() as database:
            now, last = database.execute(
                "SELECT d.head, e.number FROM datasets d JOIN entries e ON e.id = d.head WHERE d.name = ?", (name,)
            ).fetchone() or (None, 0)
            if now != head:
                return None
            check()
            _create_later_tables(database)
            numbers = [head]
            for place, entry in enumerate(entries, start=last + 1):
                numbers.append(_insert(database, name, place, numbers[-1], entry))
                rows = ((numbers[-1], sample, by) for sample, by in entry.setters)
                database.executemany("INSERT OR REPLACE INTO setters VALUES (?, ?, ?)", rows)
            database.execute("UPDATE datasets SET head = ? WHERE name = ?", (numbers[-1], name))
            _remember(database, name, [(one.request, numbers[one.place + 1], one.result) for one in answered])
            return [_load(database, number) for number in numbers[1:]]

    def find_request(self, name: str, request: str) -> tuple[Version, str] | None:
        """Returns the version that answers a request, and what is remembered of it; None: it is not known."""
        query = "SELECT entry, result FROM requests WHERE dataset = ? AND request = ?"
        with self.read() as database:
            # A store of an earlier version has no such table.
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'requests'").fetchone():
                return None
            found = database.execute(query, (name, request)).fetchone()
            return None if found is None else (_load(database, found[0]), str(found[1]))

    def find(self, name: str, version: str = "") -> tuple[Entry, Version]:
        """Returns a version of a data set; see `StoreAddress`. Raises UsageError if there is none."""
        with self.read() as database:
            entry = find_entry(database, name, version)
            return entry, _load(database, entry)

    def list_versions(self, name: str, below: int | None = None, count: int | None = None) -> list[Version]:
        """Returns versions of a data set, the newest first. Raises UsageError if there is no such data set.

        Args:
            below: only those with smaller numbers; None: all.
            count: most versions; None: all.
        """
        limits = (name, 1 << 62 if below is None else below, -1 if count is None else count)
        with self.read() as database:
            find_entry(database, name)
            query = f"{_ENTRY} WHERE e.dataset = ? AND e.number < ? ORDER BY e.number DESC LIMIT ?"
            rows = database.execute(query, limits).fetchall()
        return [_build_version(row) for row in rows]

    def list_datasets(self) -> dict[str, Version]:
        """Returns the newest version of each data set, by name."""
        with self.read() as database:
            rows = database.execute(f"{_ENTRY} JOIN datasets d ON d.head = e.id ORDER BY d.name").fetchall()
        return {row[0]: _build_version(row) for row in rows}

    def read_about(self, name: str) -> dict[str, str]:
        """Returns what the creator of a data set said about it: description, license, creator, url."""
        with self.read() as database:
            find_entry(database, name)
            (text,) = database.execute("SELECT about FROM datasets WHERE name = ?", (name,)).fetchone()
        about: dict[str, str] = json.loads(text)
        return about

    def find_common_entry(self, first: Entry, second: Entry) -> tuple[Entry, Version] | None:
        """Returns the newest entry that two entries both come from; None: there is none."""
        with self.read() as database:
            common = {row[0] for row in database.execute(_ANCESTORS, (first,))}
            common &= {row[0] for row in database.execute(_ANCESTORS, (second,))}
            # Numbers grow with time, so none of the others comes from this one.
            return (max(common), _load(database, max(common))) if common else None

    def list_parents(self, entry: Entry) -> tuple[str, list[tuple[Entry, str]], str, dict[bytes, str]]:
        """Returns the version of an entry, its parents with theirs, who made it, and who set which label instead."""
        with self.read() as database:
            version, by, *numbers = database.execute(
                "SELECT version, by, parent, merged FROM entries WHERE id = ?", (entry,)
            ).fetchone()
            parents = [
                (number, database.execute("SELECT version FROM entries WHERE id = ?", (number,)).fetchone()[0])
                for number in numbers
                if number is not None
            ]
            setters = dict(database.execute("SELECT sample, by FROM setters WHERE entry = ?", (entry,)).fetchall())
        return version, parents, by, setters

    def tag(self, name: str, tag: str, version: str, *, replace: bool) -> Version:
        """Gives a version a name of its own.

        Raises UsageError if the tag is taken and not to be replaced, or reads like the number or ID of a version.
        """
        check_name(tag, "tag")
        if is_version_text(tag):
            what = f"{tag!r} reads like the number or the ID of a version, so it cannot be a tag"
            raise UsageError(what, fix="Choose a tag such as release-3 or gold.")
        with self.lock() as database:
            entry = find_entry(database, name, version)
            old = database.execute("SELECT entry FROM tags WHERE dataset = ? AND tag = ?", (name, tag)).fetchone()
            if old is not None and old[0] != entry and not replace:
                what = f"{name} has a tag {tag!r} already, on v{_load(database, old[0]).number}"
                raise UsageError(what, fix="Choose another tag, or move this one with --replace.")
            database.execute("INSERT OR REPLACE INTO tags VALUES (?, ?, ?)", (name, tag, entry))
            return _load(database, entry)


def list_kept_versions(database: sqlite3.Connection, keep: int | None) -> set[str]:
    """Returns the IDs of all versions that names lead to.

    Args:
        keep: only the newest so many of each data set, those with tags, and those that a version of another data set
            comes from: the next merge needs them; None: all.
    """
    if keep is None:
        return {row[0] for row in database.execute("SELECT version FROM entries")}
    query = """
        SELECT e.version FROM entries e JOIN datasets d ON d.name = e.dataset JOIN entries h ON h.id = d.head
        WHERE e.number > h.number - ? OR e.id IN (SELECT entry FROM tags) OR e.id IN (
            SELECT p.id FROM entries c JOIN entries p ON p.id IN (c.parent, c.merged) WHERE c.dataset != p.dataset
        )
    """
    return {row[0] for row in database.execute(query, (keep,))}


def _insert(database: sqlite3.Connection, name: str, number: int, parent: Entry | None, entry: NewEntry) -> Entry:
    about = (time.time(), entry.by, entry.message, json.dumps(dict(entry.counts)))
    found = database.execute(
        "INSERT INTO entries (dataset, number, version, parent, merged, time, by, message, counts)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (name, number, entry.version, parent, entry.merged, *about),
    )
    assert found.lastrowid is not None
    return found.lastrowid


def _create_later_tables(database: sqlite3.Connection) -> None:
    for statement in _LATER_TABLES.split(";"):
        database.execute(statement)


def _remember(database: sqlite3.Connection, name: str, answered: Sequence[tuple[str, Entry, str]]) -> None:
    """Remembers requests of a data set: (request, entry, result)."""
    now = time.time()
    database.execute("DELETE FROM requests WHERE time < ?", (now - REQUEST_AGE_S,))
    rows = ((name, request, entry, now, result) for request, entry, result in answered)
    database.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?)", rows)


def _load(database: sqlite3.Connection, entry: Entry) -> Version:
    return _build_version(database.execute(f"{_ENTRY} WHERE e.id = ?", (entry,)).fetchone())


def _build_version(row: Sequence[Any]) -> Version:
    dataset, number, version, parent, merged, when, by, message, counts, tags = row
    return Version(
        dataset=dataset,
        number=number,
        version=version,
        parent=parent,
        merged=merged,
        time=when,
        by=by,
        message=message,
        counts=json.loads(counts),
        tags=tuple(json.loads(tags)),
    )
