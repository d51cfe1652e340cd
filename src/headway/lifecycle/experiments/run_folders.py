"""Reads Headway's run folders for an index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.core.files import describe_os_error, open_regular
from headway.core.recipe import flatten
from headway.core.run_folder import MOST_LINE_BYTES, RunFolder
from headway.core.untrusted_json import (
    JsonError,
    is_any_number,
    is_number,
    is_text,
    is_whole_number,
    parse_object,
)
from headway.lifecycle.experiments.record import (
    MOST_METRICS,
    Point,
    RunReadError,
    RunRecord,
    RunState,
    RunStore,
    name_path,
    to_finite,
)

# Files that an index reads. Any change of one of them changes the signature of the run.
FILES = ("recipe.yaml", "ensemble.json", "provenance.json", "summary.json", "metrics.jsonl")
# Longest run, 30,000 years: a larger number is damage, and not a time.
MOST_SECONDS = 1e12
# Keys of provenance.json that a list of runs may be asked for. The origins of recipe values would double the index.
ABOUT = (
    "fingerprint",
    "samples",
    "device",
    "ranks",
    "torch_threads",
    "git",
    "host.name",
    "host.processor",
    "host.cores",
    "versions.headway",
    "versions.python",
    "versions.torch",
)


@final
class RunFolders(RunStore):
    """The run folders that were found below some folders.

    Args:
        folders: run folders, and ensembles.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)

    def list_runs(self) -> dict[Path, str]:
        return {folder: sign_files(folder, FILES) for folder in self._folders}

    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        for path in paths:
            try:
                yield path, read_run_folder(path)
            except HeadwayError as error:
                # The file and the line, if the error names them.
                place = error.where.removeprefix(f"{path}/")
                what = f"{place}: {error.what}" if place not in (error.where, "") else error.what
                yield path, RunReadError(what, where=str(path), fix=error.fix)


def sign_files(folder: Path, names: Iterable[str | Path]) -> str:
    """Returns a text that changes if one of these files of a folder does."""
    signs = []
    for name in names:
        try:
            status = os.stat(folder / name)
        except OSError:
            signs.append("-")
            continue
        # A file that is replaced within the clock's resolution has another inode; one that is edited another ctime.
        signs.append(f"{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}.{status.st_ino}")
    return " ".join(signs)


def read_run_folder(folder: Path) -> RunRecord:
    """Reads the folder of a run or an ensemble.

    Raises:
        HeadwayError: it is damaged. An incomplete last line of metrics.jsonl is not damage: a kill leaves it.
    """
    run = RunFolder(folder)
    about = run.read_provenance()
    # Flattened on the way, since a file from outside may have any kind of value there.
    facts = {key: value for key, value in flatten({name: about.get(name) for name in _TOPS}) if key in ABOUT}
    started = _read_time(about.get("started"))
    if run.ensemble_path.is_file():
        members = run.read_json("ensemble").get("members")
        facts["members"] = len(members) if isinstance(members, list) else None
        return RunRecord(kind="ensemble", name=name_path(folder), state="finished", started=started, about=facts)
    recipe, summary = run.read_recipe_tree(), run.read_summary()
    state: RunState = "unfinished"
    if summary:
        state = "finished" if summary.get("finished") is True else "stopped"
    start = 0 if started is None else round(started * 1000)
    return RunRecord(
        kind="run",
        name=name_path(folder),
        state=state,
        started=started,
        recipe=dict(flatten(recipe)),
        summary={key: value for key, value in flatten(summary) if key != "clock_excludes"},
        about={key: value for key, value in facts.items() if value is not None},
        metrics=_read_metrics(run, start),
    )


_TOPS = tuple(dict.fromkeys(key.partition(".")[0] for key in ABOUT))


def _read_metrics(run: RunFolder, start_ms: int) -> dict[str, list[Point]]:
    """Reads metrics.jsonl: numbers by `KIND/NAME`, as in sinks. Raises HeadwayError if another than the last line is
    damaged."""
    points: dict[tuple[str, str], dict[int, Point]] = {}
    for record in _read_lines(run.metrics_path):
        kind: Any = record.get("kind")
        step: Any = record.get("step")
        seconds: Any = record.get("seconds")
        if not is_whole_number(step) or not is_text(kind):
            raise HeadwayError("metrics.jsonl has a record without its step or kind", where=str(run.folder))
        elapsed = round(seconds * 1000) if is_number(seconds, -MOST_SECONDS, MOST_SECONDS) else 0
        time_ms = start_ms and start_ms + elapsed
        for name, value in record.items():
            # null stands for a number that is not finite.
            if name in ("kind", "step", "position") or not (value is None or is_any_number(value)):
                continue
            if (series := points.get((kind, name))) is None:
                series = points[kind, name] = {}
            # A step that is written again, after a resume, replaces the earlier one.
            series[step] = Point(step, to_finite(value), time_ms)
        if len(points) > MOST_METRICS:
            raise HeadwayError(f"metrics.jsonl has more than {MOST_METRICS:,} metrics", where=str(run.folder))
    return {f"{kind}/{name}": [series[step] for step in sorted(series)] for (kind, name), series in points.items()}


def _read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path) as file:
            number, damage = 0, ""
            while line := file.readline(MOST_LINE_BYTES):
                # Only the last line may be damaged: a kill tears it, and a live run is read while it writes.
                if damage:
                    raise HeadwayError(f"metrics.jsonl is damaged in line {number:,}: {damage}", where=str(path.parent))
                number += 1
                try:
                    record = parse_object(line)
                except JsonError as error:
                    damage = str(error)
                else:
                    yield record
    except OSError as error:
        what = f"metrics.jsonl cannot be read ({describe_os_error(error)})"
        raise HeadwayError(what, where=str(path.parent)) from None


def _read_time(text: object) -> float | None:
    """Returns Unix time, or None for a text that is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None
