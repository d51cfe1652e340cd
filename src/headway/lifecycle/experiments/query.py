"""Selects runs of an index: conditions, order, columns and series.

A key is one of a run's own FIELDS, or a key of its recipe, its summary, its metrics or its facts. `accuracy` means the
first of these that any run has; `summary.accuracy` says which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, final

from headway.core.errors import UsageError, suggest_nearest
from headway.lifecycle.experiments.record import SOURCES, fold_text
from headway.lifecycle.experiments.run_index import RunIndex

FIELDS = ("name", "path", "kind", "state", "started")
OPERATORS = ("!=", "<=", ">=", "=", "<", ">", "~")
"""`~` means: has this text somewhere in it, in capitals or not."""

_CONDITION = re.compile(r"([^=<>!~]+)(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)


class Value(NamedTuple):
    """A value of a run: as a number, if it is one, and as text."""

    number: float | None
    text: str


@final
@dataclass(frozen=True)
class Condition:
    """One condition on a run: `optimizer.lr<0.1`. A run that lacks the key fulfils `!=` alone."""

    key: str
    operator: str
    value: str

    @staticmethod
    def parse(text: str) -> Condition:
        """Parses a condition. Raises UsageError if it is not one."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            fix = f"Write KEY, one of {' '.join(OPERATORS)}, and a value, for example optimizer.lr<0.1."
            raise UsageError(f"{text!r} is not a condition", fix=fix)
        return Condition(found[1].strip(), found[2], found[3].strip())


class ListedRun(NamedTuple):
    """A run of a list, with the values of the columns that it has."""

    # A tuple with the path as the index has it: a list of 1,000 dataclasses with paths takes three times as long.
    number: int
    raw_path: bytes
    kind: str
    name: str
    state: str
    started: float | None
    values: dict[str, Value]

    @property
    def path(self) -> Path:
        """The run folder, or the path of MLflow's run in its store."""
        return Path(os.fsdecode(self.raw_path))

    def to_json(self) -> dict[str, Any]:
        """Returns the run as a JSON tree. Numbers are numbers, and all other values are texts."""
        return {
            "run": str(self.path),
            "kind": self.kind,
            "name": self.name,
            "state": self.state,
            "started": self.started,
            "values": {key: value.text if value.number is None else value.number for key, value in self.values.items()},
        }


@final
@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which runs to list, and what of them.

    Attributes:
        conditions: all of them have to hold.
        sort: key to sort by; empty: by start, the newest first. Runs that lack it come last.
        descending: the highest first.
        limit: most runs.
        columns: keys whose values are wanted.
    """

    conditions: tuple[Condition, ...] = ()
    sort: str = ""
    descending: bool = False
    limit: int | None = None
    columns: tuple[str, ...] = ()


def select_runs(index: RunIndex, selection: Selection) -> list[ListedRun]:
    """Lists the runs of the last update that fulfil all conditions.

    Raises:
        UsageError: no run has a key, or a value cannot be compared with the key.
    """
    where, values = ["run IN (SELECT run FROM temp.chosen)"], list[Any]()
    for condition in selection.conditions:
        sql, more = _build_condition(index, condition)
        where.append(sql)
        values += more
    join, order, first = _build_order(index, selection)
    limit = -1 if selection.limit is None else selection.limit
    query = f"SELECT runs.run, path, kind, name, state, started FROM runs{join} WHERE {' AND '.join(where)}"
    rows = index.fetch(f"{query} ORDER BY {order}, path LIMIT ?", [*first, *values, limit])
    listed = [ListedRun._make((*row, {})) for row in rows]
    by_number = {run.number: run.values for run in listed}
    for column in selection.columns:
        for number, value, text in _fetch_column(index, column):
            if (own := by_number.get(number)) is not None:
                own[column] = Value(value, text)
    return listed


def read_column(index: RunIndex, key: str) -> dict[int, Value]:
    """Returns the value of a key by run. Raises UsageError if no run has it."""
    return {run: Value(number, text) for run, number, text in _fetch_column(index, key)}


def _fetch_column(index: RunIndex, key: str) -> list[tuple[Any, ...]]:
    if key in FIELDS:
        raise UsageError(f"{key} is in every list", fix="Leave it out of the columns.")
    return index.fetch("SELECT run, number, text FROM entries WHERE key = ?", [find_key(index, key)])


def has_key(index: RunIndex, key: str) -> bool:
    """Returns True if a run of the last update has a key."""
    return _find_key(index, key) is not None


def find_key(index: RunIndex, key: str) -> int:
    """Returns the number of a key in the index. Raises UsageError with the nearest one if no run has it."""
    if (number := _find_key(index, key)) is None:
        known = [*FIELDS, *(use.name for use in list_keys(index))]
        source, _, rest = key.partition(".")
        fix = suggest_nearest(rest if source in SOURCES and rest else key, known, only_close=True)
        raise UsageError(f"no run has the key {key!r}", fix=fix or "headway runs --keys lists all keys.")
    return number


@final
@dataclass(frozen=True, kw_only=True)
class KeyUse:
    """How the runs of the last update use a key.

    Attributes:
        runs: number of runs that have it.
        different: number of different values.
        numbers: number of runs in which it is a number.
    """

    source: str
    name: str
    runs: int
    different: int
    numbers: int

    @property
    def key(self) -> str:
        """The key with its source."""
        return f"{self.source}.{self.name}"


def list_keys(index: RunIndex) -> list[KeyUse]:
    """Lists all keys that the runs of the last update have, by source and name."""
    rows = index.fetch(
        "SELECT source, name, count(*), count(DISTINCT text), count(number) FROM entries JOIN keys USING (key) "
        "WHERE run IN (SELECT run FROM temp.chosen) GROUP BY entries.key"
    )
    uses = [
        KeyUse(source=source, name=name, runs=runs, different=different, numbers=numbers)
        for source, name, runs, different, numbers in rows
    ]
    return sorted(uses, key=lambda use: (SOURCES.index(use.source), use.name))


def read_series(index: RunIndex, runs: Sequence[int], metric: str) -> dict[int, list[tuple[int, float | None]]]:
    """Returns (step, value) of a metric in the order of steps by run; runs without it are left out.

    Raises:
        UsageError: no run has the metric.
    """
    key = find_key(index, metric if metric.startswith("metric.") else f"metric.{metric}")
    found: dict[int, list[tuple[int, float | None]]] = {}
    for run in runs:
        if rows := index.fetch("SELECT step, value FROM metrics WHERE run = ? AND key = ? ORDER BY step", [run, key]):
            found[run] = rows
    return found


def _find_key(index: RunIndex, key: str) -> int | None:
    source, _, rest = key.partition(".")
    pairs = [(source, rest)] if source in SOURCES and rest else []
    # A recipe may have a part that is called like a source; the plain meaning comes second.
    pairs += [(one, key) for one in SOURCES]
    for pair in pairs:
        rows = index.fetch(
            "SELECT key FROM keys WHERE source = ? AND name = ? AND EXISTS (SELECT 1 FROM entries "
            "WHERE entries.key = keys.key AND run IN (SELECT run FROM temp.chosen))",
            pair,
        )
        if rows:
            return int(rows[0][0])
    return None


def _build_condition(index: RunIndex, condition: Condition) -> tuple[str, list[Any]]:
    """Returns a condition as SQL over the table `runs`, and its values."""
    if condition.key in FIELDS:
        return _compare_field(condition)
    key, number = find_key(index, condition.key), _parse_number(condition.value)
    operator = condition.operator
    if operator in ("=", "!="):
        # `true`, `null` and names are compared as texts; 1e-3 and 0.001 are the same number.
        test = "text = ?" if number is None else "(number = ? OR text = ?)"
        values: list[Any] = [condition.value] if number is None else [number, condition.value]
    elif operator == "~":
        test, values = "instr(fold(text), ?)", [fold_text(condition.value)]
    elif number is None:
        what = f"{condition.value!r} is not a number, and {condition.key} is compared with one by {operator}"
        raise UsageError(what, fix="Compare texts by = or ~.")
    else:
        test, values = f"number {operator} ?", [number]
    sign = "NOT IN" if operator == "!=" else "IN"
    return f"run {sign} (SELECT run FROM entries WHERE key = ? AND {test})", [key, *values]


def _compare_field(condition: Condition) -> tuple[str, list[Any]]:
    field, operator = condition.key, condition.operator
    if field == "started":
        if operator == "~":
            raise UsageError("started is a time, and ~ compares texts", fix="Write for example started>2026-11-28.")
        try:
            value: Any = datetime.fromisoformat(condition.value).timestamp()
        except (ValueError, OverflowError, OSError):
            what, fix = (
                f"{condition.value!r} is not a date",
                "Write for example started>2026-11-28 or 2026-11-28T14:30.",
            )
            raise UsageError(what, fix=fix) from None
        # A run whose start is not known differs from every date.
        return f"started {'IS NOT' if operator == '!=' else operator} ?", [value]
    if operator not in ("=", "!=", "~"):
        raise UsageError(f"{field} is a text, and {operator} compares numbers", fix="Compare texts by = or ~.")
    if operator == "~":
        return f"instr(fold({field}), ?)", [fold_text(condition.value)]
    # Paths are bytes in the index, since a file name may be in any encoding.
    column = "CAST(path AS TEXT)" if field == "path" else field
    return f"{column} {operator} ?", [condition.value]


def _build_order(index: RunIndex, selection: Selection) -> tuple[str, str, list[Any]]:
    """Returns the join that an order needs, the order, and the values of the join."""
    way = "DESC" if selection.descending else "ASC"
    if not selection.sort:
        if selection.descending:
            raise UsageError("--descending sorts by a key", fix="Add --sort KEY.")
        return "", "started DESC NULLS LAST", []
    if selection.sort in FIELDS:
        return "", f"{selection.sort} {way} NULLS LAST", []
    key = find_key(index, selection.sort)
    join = " LEFT JOIN (SELECT run AS sorted_run, number, text FROM entries WHERE key = ?) ON sorted_run = runs.run"
    # Numbers come before texts in both directions, and runs without the key last.
    return join, f"number {way} NULLS LAST, text {way} NULLS LAST", [key]


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if number != number else number
