"""Open connections to the database of a store: each is used by one thread at a time, and kept for the next call.

SQLite writes its log back and deletes it whenever the last connection closes, which costs two flushes of the disk.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import final

from headway.data.store_address import build_database_error, connect

MOST_IDLE = 8
# A forked child must not use the connections of its parent, nor close them: that might drop the parent's locks.
_INHERITED: list[sqlite3.Connection] = []


@final
class Connections:
    """Connections to the database of one store. Any thread may call."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = Lock()
        self._idle: list[sqlite3.Connection] = []
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection that nobody else uses in the block.

        Raises:
            UsageError: the store lies on a network file system.
            DataError: the database cannot be used.
        """
        try:
            database = self._take()
            try:
                yield database
            # Whatever it was about to do is undone.
            except sqlite3.Error:
                database.close()
                raise
            except BaseException:
                self._give_back(database)
                raise
            self._give_back(database)
        except sqlite3.Error as error:
            raise build_database_error(self._store, error) from error

    def _take(self) -> sqlite3.Connection:
        with self._lock:
            if self._process != os.getpid():
                _INHERITED.extend(self._idle)
                self._idle.clear()
                self._process = os.getpid()
            if self._idle:
                return self._idle.pop()
        database = connect(self._store)
        # A commit is on the disk when it returns.
        database.execute("PRAGMA synchronous = FULL")
        return database

    def _give_back(self, database: sqlite3.Connection) -> None:
        with self._lock:
            # An interrupt may have come in the middle of a transaction.
            if not database.in_transaction and len(self._idle) < MOST_IDLE:
                self._idle.append(database)
                return
        database.close()


def _close_all(connections: list[sqlite3.Connection]) -> None:
    for database in connections:
        database.close()
