"""Keys: the first answer to each Idempotency-Key (draft-ietf-httpapi-idempotency-key-header-06), in SQLite."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.mounts import is_on_network
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.structured_fields import parse_string

LOG = logging.getLogger("headway.lifecycle")

MAX_KEY = 255
"""Most characters of a key."""
_TABLE = """
create table if not exists keys (
    principal text not null,
    target text not null,
    key text not null,
    fingerprint text not null,
    server text not null,
    answer text,
    created_s real not null,
    primary key (principal, target, key)
) without rowid
"""
_INDEX = "create index if not exists keys_by_age on keys (created_s)"


def read_key(headers: Mapping[str, str]) -> str:
    """Returns the Idempotency-Key of a request. Raises ProblemError (400) if it is missing or malformed."""
    key = parse_string("Idempotency-Key", headers.get("idempotency-key"))
    if key is None:
        raise refuse("key-missing", "the request has no Idempotency-Key", "Send one, in quotes.")
    if len(key) > MAX_KEY:
        raise refuse("malformed", f"the Idempotency-Key has more than {MAX_KEY} characters", "Send a UUID.")
    return key


def name_request(principal: str, target: str, key: str, fingerprint: str) -> str:
    """Returns the name under which the store remembers a request.

    Its body is part of it, as a fingerprint: a key that is forgotten may come again with another one.
    """
    return hashlib.sha256(json.dumps([principal, target, key, fingerprint]).encode()).hexdigest()[:32]


@final
class Keys:
    """Keys of requests that have changed something.

    Args:
        path: of the database, which is made if it does not exist.
        age_s: seconds for which a key is kept.

    Raises:
        UsageError: the file lies on a network file system, whose locks SQLite cannot trust.
    """

    def __init__(self, path: Path, age_s: float) -> None:
        if is_on_network(path.parent):
            what = "SQLite's locks do not work on a network file system"
            raise UsageError(what, where=str(path.parent), fix="Keep the store on a local disk of the server.")
        self._path, self._age_s = path, age_s
        # Rows of another server: it was killed, and its requests run no more.
        self._server = secrets.token_hex(8)
        # Requests that have ended, which could not be written down: see `_end`.
        self._ended = set[tuple[str, str, str]]()
        # One writer at a time, so that nobody meets "database is locked".
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        self._database.execute("pragma journal_mode = wal")
        # A process that is killed loses nothing by it, and what the power takes is found in the store.
        self._database.execute("pragma synchronous = normal")
        self._database.execute(_TABLE)
        self._database.execute(_INDEX)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def begin(self, principal: str, target: str, key: str, fingerprint: str) -> KeyState:
        """Notes that a request begins, or finds that it has been answered.

        Args:
            fingerprint: SHA-256 of the body.

        Raises:
            ProblemError: the first request still runs (409), or had another body (422).
        """
        now = time.time()
        with self._lock, closing(self._database.cursor()) as cursor:
            cursor.execute("begin immediate")
            try:
                where = (principal, target, key)
                cursor.execute(
                    "select fingerprint, server, answer, created_s from keys"
                    " where principal = ? and target = ? and key = ?",
                    where,
                )
                row = cursor.fetchone()
                if row is None or row[3] < now - self._age_s:
                    cursor.execute(
                        "insert or replace into keys values (?, ?, ?, ?, ?, null, ?)",
                        (*where, fingerprint, self._server, now),
                    )
                    self._ended.discard(where)
                    return KeyState()
                first, server, answer, _ = row
                if first != fingerprint:
                    raise refuse("key-reused", "the Idempotency-Key was used with another body", "Use a new one.")
                if answer is not None:
                    return KeyState(Answer.from_json(answer))
                if server == self._server and where not in self._ended:
                    what = "the first request with this Idempotency-Key still runs"
                    raise refuse("key-in-use", what, "Try again later.", headers=[(b"retry-after", b"1")])
                cursor.execute(
                    "update keys set server = ? where principal = ? and target = ? and key = ?", (self._server, *where)
                )
                # A server was killed while it ran the request, or could not write down that it has ended. The store
                # knows whether it is done.
                self._ended.discard(where)
                return KeyState()
            finally:
                cursor.execute("commit")

    def finish(self, principal: str, target: str, key: str, answer: Answer) -> None:
        """Keeps the answer. The store keeps it too, with the version, so this need not wait for the disk.

        Raises sqlite3.OperationalError if it cannot be written, for example since the disk is full. The request counts
        as ended all the same: sent again, it runs again, and finds in the store what it has done.
        """
        statement = "update keys set answer = ? where principal = ? and target = ? and key = ?"
        self._end(statement, answer.to_json(), where=(principal, target, key))

    def sweep(self) -> None:
        """Drops keys that are too old."""
        with self._lock:
            self._database.execute("delete from keys where created_s < ?", (time.time() - self._age_s,))

    def forget(self, principal: str, target: str, key: str) -> None:
        """Drops a key whose request was refused: it has changed nothing, and may be mended and sent again."""
        # Why the request was refused matters more.
        with suppress(sqlite3.OperationalError):
            self._end("delete from keys where principal = ? and target = ? and key = ?", where=(principal, target, key))

    def _end(self, statement: str, *values: str, where: tuple[str, str, str]) -> None:
        with self._lock:
            try:
                self._database.execute(statement, (*values, *where))
            except sqlite3.OperationalError as error:
                LOG.warning(f"The end of a request could not be written into {self._path}: {error}.")
                self._ended.add(where)
                raise


@final
@dataclass(frozen=True, slots=True)
class KeyState:
    """The state of a key when a request begins.

    Attributes:
        answer: the first answer; None: the request has to run.
    """

    answer: Answer | None = None
