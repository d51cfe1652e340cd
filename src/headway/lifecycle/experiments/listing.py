"""Lists of runs and keys as text for a terminal."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headway.core.printable import escape_controls
from headway.core.text_format import align_table, format_duration, pluralise
from headway.lifecycle.experiments.query import KeyUse, ListedRun, Value, has_key, list_keys
from headway.lifecycle.experiments.run_index import RunIndex

# Columns of a list unless the user names some: those that any run has.
USUAL_COLUMNS = ("summary.accuracy", "summary.loss", "summary.images_s", "summary.seconds")
# Number of metrics that stand for the summary, which MLflow's runs lack: the commonest.
MOST_METRICS = 2
# Longest cell of a list.
MOST_CELL = 40


def choose_columns(index: RunIndex) -> list[str]:
    """Returns the usual columns that any run has. Where none has a result, the commonest metrics stand for it."""
    found = [key for key in USUAL_COLUMNS if has_key(index, key)]
    if not any(key in found for key in USUAL_COLUMNS[:2]):
        uses = sorted((use for use in list_keys(index) if use.source == "metric"), key=lambda use: -use.runs)
        found = [use.key for use in uses[:MOST_METRICS]] + found
    return found


def format_list(runs: Sequence[ListedRun], columns: Sequence[str], damaged: int, *, is_filtered: bool) -> str:
    """Formats a list of runs as a table, and says below it how many were left out."""
    lines = []
    if runs:
        rows = [["run", "state", "started", *map(shorten_key, columns)]]
        for run, name in zip(runs, name_runs(runs), strict=True):
            values = [format_value_of(key, run.values.get(key)) for key in columns]
            rows.append([_fit(name), run.state, format_started(run.started), *map(_fit, values)])
        lines = align_table(rows)
    else:
        lines.append("No run fulfils these conditions." if is_filtered else "There are no runs here.")
    if damaged:
        lines.append(f"Left out {pluralise(damaged, 'damaged run')}: headway index names them.")
    return "\n".join(lines)


def format_keys(keys: Sequence[KeyUse]) -> str:
    """Formats the keys of an index as a table."""
    rows = [["key", "runs", "different values"]]
    rows += [[_fit(use.key, 70), f"{use.runs:,}", f"{use.different:,}"] for use in keys]
    return "\n".join(align_table(rows)) if keys else "There are no runs here."


def name_runs(runs: Sequence[ListedRun]) -> list[str]:
    """Names runs by their paths below the folder that all have in common. MLflow's have a name and an id."""
    folder = find_folder(runs)
    names = []
    for run in runs:
        place = show_path(Path(os.path.relpath(run.path, folder)))
        names.append(f"{run.name} {run.path.name[:8]}" if run.kind == "mlflow" else place)
    counts = Counter(names)
    return [name if counts[name] == 1 else show_path(run.path) for name, run in zip(names, runs, strict=True)]


def find_folder(runs: Sequence[ListedRun]) -> Path:
    """Returns the folder that all runs have in common."""
    # That of their parents: a single run would else be named by a dot.
    return Path(os.path.commonpath([run.path.parent for run in runs]))


def show_path(path: Path) -> str:
    """Returns a path as text. Bytes of a name that are not UTF-8 are shown as replacement characters."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shorten_key(key: str) -> str:
    """Returns a key without its source, for a heading."""
    for source in ("recipe.", "summary.", "metric.", "about."):
        if key.startswith(source):
            return key.removeprefix(source)
    return key


def format_value_of(key: str, value: Value | None) -> str:
    """Formats a value for a table; `-` if a run lacks it."""
    if value is None:
        return "-"
    if value.number is None:
        return value.text
    if key in ("seconds", "summary.seconds"):
        return format_duration(value.number)
    # Whole numbers (seeds, parameters) keep all of their digits.
    return value.text if value.text.lstrip("+-").isdigit() else f"{value.number:.4g}"


def format_started(started: float | None) -> str:
    """Formats the start of a run in the local time zone."""
    try:
        return "-" if started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
    # A store from outside may have any number.
    except (OverflowError, ValueError, OSError):
        return "-"


def _fit(text: str, most: int = MOST_CELL) -> str:
    """Returns a text on one line of at most `most` characters."""
    shown = escape_controls(text, lines=False)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
