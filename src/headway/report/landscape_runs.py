"""The runs of a landscape: those that are named, and those in the folder of a sweep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder

LOG = logging.getLogger("headway.report")

# Folder of a sweep that holds its trials, each an ordinary run folder.
TRIALS = "trials"
# Most runs that a message names one by one.
MOST_NAMED = 5


def expand_folders(folders: Sequence[Path]) -> list[Path]:
    """Replaces each folder of runs, such as that of a sweep, by the finished runs in it.

    A run that has not finished, or has no weights, is left out, and a message names it. A folder that holds no runs
    stays: opening it explains what is wrong.

    Raises:
        UsageError: a folder holds runs, and none of them can be drawn.
    """
    out: list[Path] = []
    for folder in folders:
        out += _list_finished(folder) if is_folder_of_runs(folder) else [folder]
    return out


def is_folder_of_runs(folder: Path) -> bool:
    """Returns True if a folder is no run itself, and holds runs: a sweep, its trials, or `runs`."""
    return not RunFolder(folder).recipe_path.is_file() and bool(_list_runs(folder))


def _list_runs(folder: Path) -> list[Path]:
    """Lists the run folders of a sweep, or those directly in a folder, in the order of their numbers, then names."""
    trials = folder / TRIALS
    parent = trials if trials.is_dir() else folder
    found = [one for one in parent.iterdir() if RunFolder(one).recipe_path.is_file()] if parent.is_dir() else []
    return sorted(found, key=lambda one: (not one.name.isdecimal(), int(one.name) if one.name.isdecimal() else 0, one))


def _list_finished(folder: Path) -> list[Path]:
    found = _list_runs(folder)
    runs = {path: RunFolder(path) for path in found}
    unfinished = [path for path, run in runs.items() if not run.read_summary().get("finished")]
    bare = [path for path, run in runs.items() if path not in unfinished and not run.weights_path.exists()]
    finished = [path for path in found if path not in (*unfinished, *bare)]
    left_out = []
    for paths, words in ((unfinished, "not finished"), (bare, "without weights")):
        if paths:
            left_out.append(f"{len(paths)} {words} ({_name_some(paths)})")
    if not finished:
        what = f"none of the {len(found)} runs in this folder can be drawn: {', '.join(left_out)}"
        raise UsageError(what, where=str(folder), fix="Wait until some have finished, or resume them.")
    if left_out:
        LOG.warning(f"{folder}: {len(finished)} of {len(found)} runs are drawn; left out: {', '.join(left_out)}.")
    return finished


def _name_some(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(path.name for path in paths[:MOST_NAMED]) + more
