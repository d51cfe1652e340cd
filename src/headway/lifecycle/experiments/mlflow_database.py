"""Reads MLflow's SQLite database, such as mlflow.db. Needs no MLflow, and trusts nothing in the file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, is_plain_name, open_regular
from headway.core.untrusted_json import is_whole_number
from headway.lifecycle.experiments.mlflow_run import MlflowRun
from headway.lifecycle.experiments.record import RunReadError, RunRecord, RunStore

# Columns that all versions since 1.0 (2019) have.
COLUMNS = {
    "runs": ("run_uuid", "name", "status", "start_time", "end_time", "lifecycle_stage", "experiment_id"),
    "experiments": ("experiment_id", "name"),
    "metrics": ("run_uuid", "key", "value", "timestamp", "step", "is_nan"),
    "params": ("run_uuid", "key", "value"),
    "tags": ("run_uuid", "key", "value"),
}
# Those of data sets, since 2.4 (2023).
DATASET_COLUMNS = {
    "inputs": ("input_uuid", "source_id", "destination_id"),
    "datasets": ("dataset_uuid", "name", "digest"),
    "input_tags": ("input_uuid", "name", "value"),
}
# Largest text: MLflow cuts a param at 8,000 characters.
VALUE_BYTES = 1 << 20
BUSY_S = 10.0
# Runs of one query.
CHUNK = 200

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})

Row = Sequence[Any]


def is_mlflow_database(path: Path) -> bool:
    """Returns True for an SQLite file that has MLflow's tables."""
    try:
        with open_regular(path) as file:
            if file.read(16) != b"SQLite format 3\0":
                return False
        with closing(_open(path)) as database:
            return not _list_missing(database, COLUMNS)
    except (OSError, sqlite3.Error):
        return False


@final
class MlflowDatabase(RunStore):
    """The runs of an SQLite database of MLflow. A run's path is that of the file and its id.

    Raises:
        UsageError: from all methods, the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def list_runs(self) -> dict[Path, str]:
        with closing(self._connect()) as database:
            rows = self._query(
                database,
                "SELECT run_uuid, runs.lifecycle_stage, runs.name, status, start_time, end_time, experiments.name "
                "FROM runs LEFT JOIN experiments USING (experiment_id) ORDER BY run_uuid",
            )
            # An id is a file name in every other store; one that is not would lead elsewhere.
            facts = {row[0]: [row[2:]] for row in rows if is_plain_name(row[0]) and row[1] != "deleted"}
            for run, *more in self._query_changes(database):
                if run in facts:
                    facts[run].append(tuple(more))
        return {self._path / run: hashlib.sha256(repr(own).encode()).hexdigest() for run, own in facts.items()}

    def _query_changes(self, database: sqlite3.Connection) -> Iterator[Row]:
        """Yields what changes when a run does, in a fixed order. The file as a whole changes with any run of it."""
        # MLflow only adds metrics and params, and replaces tags. Each count is answered by an index.
        for table in ("metrics", "params"):
            counts = f"SELECT run_uuid, '{table}', count(*) FROM {table} GROUP BY run_uuid"
            yield from self._query(database, counts)
        yield from self._query(database, "SELECT run_uuid, 'tags', key, value FROM tags ORDER BY run_uuid, key")
        if not _list_missing(database, DATASET_COLUMNS):
            counts = "SELECT destination_id, 'inputs', count(*) FROM inputs GROUP BY destination_id"
            yield from self._query(database, counts)

    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        ids = sorted(path.name for path in paths)
        with closing(self._connect()) as database:
            for start in range(0, len(ids), CHUNK):
                yield from self._read_chunk(database, ids[start : start + CHUNK])

    def _read_chunk(
        self, database: sqlite3.Connection, ids: list[str]
    ) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        marks = f"({', '.join('?' * len(ids))})"
        runs = {
            row[0]: row
            for row in self._query(
                database,
                "SELECT runs.run_uuid, runs.name, status, start_time, end_time, experiments.name FROM runs "
                f"LEFT JOIN experiments USING (experiment_id) WHERE run_uuid IN {marks}",
                ids,
            )
        }
        texts = {
            table: _group(
                self._query(database, f"SELECT run_uuid, key, value FROM {table} WHERE run_uuid IN {marks}", ids)
            )
            for table in ("params", "tags")
        }
        datasets = _group(self._query_datasets(database, marks, ids))
        rows = self._query(
            database,
            f"SELECT run_uuid, key, step, value, timestamp, is_nan FROM metrics WHERE run_uuid IN {marks} "
            "ORDER BY run_uuid, key, step, timestamp, value",
            ids,
        )
        # Streamed: a store may have more values than memory holds.
        groups = groupby(rows, key=lambda row: row[0])
        group = next(groups, None)
        for run_id in ids:
            metrics: Iterator[Row] = iter(())
            if group is not None and group[0] == run_id:
                metrics = group[1]
            path = self._path / run_id
            try:
                if (about := runs.get(run_id)) is None:
                    raise RunReadError("the run is no longer in the database")
                run = MlflowRun(
                    run_id=run_id,
                    name=about[1] if isinstance(about[1], str) else "",
                    status=str(about[2]),
                    start_ms=about[3] if is_whole_number(about[3]) else None,
                    end_ms=about[4] if is_whole_number(about[4]) else None,
                    experiment=str(about[5]),
                    params=texts["params"].get(run_id, {}),
                    tags=texts["tags"].get(run_id, {}),
                    datasets=datasets.get(run_id, {}),
                    metrics=(read for row in metrics if (read := _read_metric(row)) is not None),
                )
                yield path, run.to_record()
            except RunReadError as error:
                yield path, RunReadError(error.what, where=str(path))
            if group is not None and group[0] == run_id:
                group = next(groups, None)

    def _query_datasets(self, database: sqlite3.Connection, marks: str, ids: list[str]) -> Iterator[Row]:
        if _list_missing(database, DATASET_COLUMNS):
            return iter(())
        return self._query(
            database,
            "SELECT inputs.destination_id, coalesce(input_tags.value, datasets.name), "
            "datasets.name || ' ' || datasets.digest FROM inputs "
            "JOIN datasets ON datasets.dataset_uuid = inputs.source_id "
            "LEFT JOIN input_tags ON input_tags.input_uuid = inputs.input_uuid "
            f"AND input_tags.name = 'mlflow.data.context' WHERE inputs.destination_id IN {marks}",
            ids,
        )

    def _connect(self) -> sqlite3.Connection:
        try:
            database = _open(self._path)
        except (OSError, sqlite3.Error) as error:
            raise self._explain(error) from None
        try:
            if missing := _list_missing(database, COLUMNS):
                what = f"this database has no {missing}, so no version of MLflow wrote it that can be read"
                raise UsageError(what, where=str(self._path), fix="Upgrade it: mlflow db upgrade sqlite:///FILE.")
        except sqlite3.Error as error:
            database.close()
            raise self._explain(error) from None
        except BaseException:
            database.close()
            raise
        return database

    def _query(self, database: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> Iterator[Row]:
        try:
            yield from database.execute(sql, values)
        except sqlite3.Error as error:
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> UsageError:
        what = f"this database cannot be read ({describe_os_error(error)})"
        return UsageError(what, where=str(self._path), fix="Copy it again, or name another one.")


def _open(path: Path) -> sqlite3.Connection:
    """Opens a database for reading alone, so that nothing in the file can run or grow."""
    database = sqlite3.connect(
        f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None
    )
    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # Views and columns of a hostile schema could call functions that it has no business with.
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cell_size_check = ON")
        database.execute("PRAGMA query_only = ON")
    except BaseException:
        database.close()
        raise
    return database


def _list_missing(database: sqlite3.Connection, columns: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the first table or column that a database lacks, as words; empty if it has all. Then queries alone are
    allowed."""
    database.set_authorizer(None)
    # A view or a virtual table of such a name could run anything.
    tables = {
        row[0]
        for row in database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        if isinstance(row[1], str) and not row[1].lstrip().upper().startswith("CREATE VIRTUAL")
    }
    missing = ""
    for table, names in columns.items():
        if table not in tables:
            missing = f"table {table}"
            break
        have = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        if lacks := [name for name in names if name not in have]:
            missing = f"column {table}.{lacks[0]}"
            break
    database.set_authorizer(_authorise)
    return missing


def _authorise(action: int, name: str | None, other: str | None, *_: Any) -> int:
    is_function = action == sqlite3.SQLITE_FUNCTION and other in ("coalesce", "count")
    return sqlite3.SQLITE_OK if action in _ALLOWED or is_function else sqlite3.SQLITE_DENY


def _group(rows: Iterator[Row]) -> dict[str, dict[str, str]]:
    """Returns texts by run and key. Values of other kinds are left out."""
    found: dict[str, dict[str, str]] = {}
    for run, key, value in rows:
        if isinstance(run, str) and isinstance(key, str) and isinstance(value, str):
            found.setdefault(run, {})[key] = value
    return found


def _read_metric(row: Row) -> tuple[str, int, float | None, int] | None:
    _, key, step, value, time_ms, is_nan = row
    if not isinstance(key, str) or not is_whole_number(step, -(1 << 63)):
        return None
    # MLflow writes the largest float for infinity.
    is_finite = isinstance(value, int | float) and not is_nan and abs(value) < sys.float_info.max
    number = value if is_finite else None
    return key, step, number, time_ms if is_whole_number(time_ms) else 0
