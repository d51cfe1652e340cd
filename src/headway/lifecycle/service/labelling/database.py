"""LabelDatabase: what the label page keeps beside the versions, in SQLite: queues, leases of grids, and marks.

Labels lie in the versions. What is lost with this file is who has looked at which sample, and for how long.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.mounts import is_on_network
from headway.lifecycle.service.labelling.records import Mark, Pick, Queue

FILE = "labelling.db"
_TABLES = """
create table if not exists queues (
    queue text primary key, dataset text not null, name text not null, kind text not null, version text not null,
    by text not null, created_s real not null, size integer not null, about text not null
) without rowid;
create table if not exists picks (
    queue text not null, place integer not null, sample blob not null, given text, proposed text not null,
    probability real, score real, arm text not null, copies integer not null, primary key (queue, place)
) without rowid;
create table if not exists leases (
    dataset text not null, sample blob not null, grid text not null, place integer not null, until_s real not null,
    primary key (dataset, sample)
) without rowid;
create index if not exists leases_of_grid on leases (dataset, grid);
create table if not exists marks (
    dataset text not null, queue text not null, sample blob not null, by text not null, role text not null,
    label text, seconds real not null, time_s real not null, version text not null,
    primary key (dataset, queue, sample, by, role)
) without rowid;
"""


@final
class LabelDatabase:
    """Queues, leases and marks of a store. All methods may be called by several threads, and by several processes.

    Args:
        path: of the file, which is made if it does not exist.

    Raises:
        UsageError: it lies on a network file system, whose locks SQLite cannot trust.
    """

    def __init__(self, path: Path) -> None:
        if is_on_network(path.parent):
            what = "SQLite's locks do not work on a network file system"
            raise UsageError(what, where=str(path.parent), fix="Keep the store on a local disk of the server.")
        self._lock = threading.RLock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        self._database.execute("pragma journal_mode = wal")
        self._database.executescript(_TABLES)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def add_queue(self, queue: Queue, picks: Sequence[Pick]) -> bool:
        """Adds a queue; returns False if it is there already."""
        row = (queue.queue, queue.dataset, queue.name, queue.kind, queue.version, queue.by, queue.created_s, queue.size)
        with self._write(is_synced=True) as database:
            about = json.dumps(dict(queue.about), ensure_ascii=False, allow_nan=False)
            done = database.execute("insert or ignore into queues values (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, about))
            if done.rowcount:
                rows = ((queue.queue, place, *pick) for place, pick in enumerate(picks))
                database.executemany("insert into picks values (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            return bool(done.rowcount)

    def list_queues(self, dataset: str) -> list[Queue]:
        """Returns the queues of a data set, the newest first."""
        query = "select * from queues where dataset = ? order by created_s desc, queue"
        return [
            Queue(
                queue=queue,
                dataset=dataset,
                name=name,
                kind=kind,
                version=version,
                by=by,
                created_s=created_s,
                size=size,
                about=json.loads(about),
            )
            for queue, dataset, name, kind, version, by, created_s, size, about in self._fetch(query, (dataset,))
        ]

    def read_picks(self, queue: str) -> list[Pick]:
        """Returns the samples of a queue in their order."""
        columns = "sample, given, proposed, probability, score, arm, copies"
        rows = self._fetch(f"select {columns} from picks where queue = ? order by place", (queue,))
        return [Pick._make(row) for row in rows]

    def read_marks(self, dataset: str, queue: str) -> dict[bytes, list[Mark]]:
        """Returns what people said about the samples of a queue; of each sample in the order of time."""
        found = defaultdict[bytes, list[Mark]](list)
        query = "select sample, by, label, role, seconds, time_s, version from marks where dataset = ? and queue = ?"
        for row in self._fetch(f"{query} order by time_s", (dataset, queue)):
            found[row[0]].append(Mark._make(row))
        return dict(found)

    def list_marked_queues(self, dataset: str) -> list[str]:
        """Returns the queues about whose samples somebody has said something."""
        return [row[0] for row in self._fetch("select distinct queue from marks where dataset = ?", (dataset,))]

    def set_marks(self, dataset: str, queue: str, grid: str, marks: Sequence[Mark]) -> None:
        """Keeps what a person said, in place of what the same one said before, and ends the leases of the grid."""
        rows = [
            (dataset, queue, one.sample, one.by, one.role, one.label, one.seconds, one.time_s, one.version)
            for one in marks
        ]
        # On the disk before the page forgets them.
        with self._write(is_synced=True) as database:
            database.executemany("insert or replace into marks values (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            database.execute("delete from leases where dataset = ? and grid = ?", (dataset, grid))

    def read_grid(self, dataset: str, grid: str) -> list[bytes]:
        """Returns the samples that are leased to a grid, in their order. Their time may be over."""
        query = "select sample from leases where dataset = ? and grid = ? order by place"
        return [row[0] for row in self._fetch(query, (dataset, grid))]

    def list_leased(self, dataset: str) -> list[bytes]:
        """Returns the samples that are leased now."""
        query = "select sample from leases where dataset = ? and until_s > ?"
        return [row[0] for row in self._fetch(query, (dataset, time.time()))]

    def lease(self, dataset: str, grid: str, samples: Sequence[bytes], seconds: float) -> None:
        """Leases samples to a grid, or again; leases whose time is over are taken from others."""
        until_s = time.time() + seconds
        rows = ((dataset, sample, grid, place, until_s) for place, sample in enumerate(samples))
        with self._write() as database:
            database.executemany("insert or replace into leases values (?, ?, ?, ?, ?)", rows)

    def end_lease(self, dataset: str, grid: str) -> None:
        """Gives the samples of a grid back."""
        with self._write() as database:
            database.execute("delete from leases where dataset = ? and grid = ?", (dataset, grid))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps the other threads of this process out for the block, which looks and then changes."""
        with self._lock:
            yield

    def _fetch(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _write(self, *, is_synced: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction. Args: is_synced: wait for the disk; a lease that the power takes with it costs nothing."""
        with self._lock:
            self._database.execute(f"pragma synchronous = {'full' if is_synced else 'normal'}")
            self._database.execute("begin immediate")
            try:
                yield self._database
            except BaseException:
                self._database.execute("rollback")
                raise
            self._database.execute("commit")
