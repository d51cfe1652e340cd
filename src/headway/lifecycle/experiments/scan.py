"""Finds runs below folders: Headway's run folders, and stores of MLflow."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error
from headway.core.run_folder import RUNS, RunFolder
from headway.lifecycle.experiments.mlflow_database import MlflowDatabase, is_mlflow_database
from headway.lifecycle.experiments.mlflow_files import MlflowFiles, is_mlflow_folder
from headway.lifecycle.experiments.mlflow_json import MlflowJson, is_mlflow_export
from headway.lifecycle.experiments.record import RunReadError, RunRecord, RunStore
from headway.lifecycle.experiments.run_folders import RunFolders
from headway.storage.addresses import get_cache_folder

# Folders below the one that is named. A sweep's trials are two below `runs`.
MOST_LEVELS = 8
# Folders that are looked into: more are a file system, and not a folder of runs.
MOST_FOLDERS = 200_000
INDEX_NAME = "index.sqlite"


@final
@dataclass(frozen=True)
class Found:
    """The stores of runs below the folders that the user named.

    Attributes:
        roots: absolute paths of the folders and files.
        stores: what holds runs.
    """

    roots: tuple[Path, ...]
    stores: tuple[RunStore, ...]

    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord]]:
        """Yields each of these runs, as its files are now. Raises RunReadError if one cannot be read."""
        waiting = set(paths)
        for store in self.stores:
            wanted = sorted(waiting.intersection(store.list_runs()))
            waiting.difference_update(wanted)
            for path, record in store.read_runs(wanted):
                if isinstance(record, RunReadError):
                    raise record
                yield path, record


def scan_folders(folders: Sequence[Path]) -> Found:
    """Finds the runs in some folders, and in the folders below them.

    Args:
        folders: folders of runs, run folders, sweeps, `mlruns`, an `mlflow.db`, or an export of MLflow's runs. Default:
            `runs`.

    Raises:
        UsageError: a folder does not exist, is not a folder of runs, or has too many folders below it.
    """
    roots = [Path(os.path.abspath(folder)) for folder in folders or [RUNS]]
    stores: list[RunStore] = []
    found: dict[Path, Path] = {}
    for root in dict.fromkeys(roots):
        if root.is_file():
            if not is_mlflow_database(root):
                what = "this file is not a database of MLflow's runs"
                raise UsageError(what, where=str(root), fix="Name a folder of runs, mlruns, or an mlflow.db.")
            stores.append(MlflowDatabase(root))
        elif root.is_dir():
            _walk(root, stores, found)
        else:
            fix = "Name a folder of runs: headway runs FOLDER." if folders else "Name one: headway runs FOLDER."
            raise UsageError("there is no such folder of runs", where=str(root), fix=fix)
    return Found(tuple(roots), (RunFolders(found.values()), *stores))


def find_index(folders: Sequence[Path]) -> Path:
    """Returns where the index of some folders lies by default.

    It is the first folder that is not a store of MLflow, or the one above it if that is a run. An index of stores of
    MLflow alone lies in the cache folder, which is created, since nothing is written into them.
    """
    roots = [Path(os.path.abspath(folder)) for folder in folders or [RUNS]]
    if (first := next((root for root in roots if not _is_foreign(root)), None)) is not None:
        return (first.parent if _is_run(first) else first) / INDEX_NAME
    folder = get_cache_folder() / "indexes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Name a file for the index: --index FILE."
        raise UsageError(f"it cannot be created ({describe_os_error(error)})", where=str(folder), fix=fix) from None
    return folder / f"{hashlib.sha256(os.fsencode(roots[0])).hexdigest()[:16]}.sqlite"


def _is_foreign(root: Path) -> bool:
    """Returns True for a database of MLflow, an export of it, and an `mlruns` folder or a part of one."""
    if not root.is_dir():
        return root.is_file()
    if is_mlflow_export(root) or is_mlflow_folder(root):
        return True
    try:
        with os.scandir(root) as entries:
            return any(is_mlflow_folder(Path(entry.path)) for entry in entries if not entry.name.startswith("."))
    except OSError:
        return False


def _walk(root: Path, stores: list[RunStore], found: dict[Path, Path]) -> None:
    """Adds the runs below a folder. `found` has a run by its real path, so that a link adds none twice."""
    waiting, looked_at = [(root, Path(os.path.realpath(root)), 0)], 0
    while waiting:
        folder, real, level = waiting.pop()
        looked_at += 1
        if looked_at > MOST_FOLDERS:
            what = f"it has more than {MOST_FOLDERS:,} folders below it"
            raise UsageError(what, where=str(root), fix="Name the folders that hold the runs.")
        if _is_run(folder):
            # A path without links is the better name.
            if real not in found or folder == real:
                found[real] = folder
            continue
        if is_mlflow_export(folder):
            stores.append(MlflowJson(folder))
            continue
        if is_mlflow_folder(folder):
            stores.append(MlflowFiles(folder))
            continue
        if level == MOST_LEVELS:
            continue
        try:
            # Backwards, since the last one that waits is looked at first.
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            if folder == root:
                what = f"this folder cannot be read ({describe_os_error(error)})"
                raise UsageError(what, where=str(root)) from None
            continue
        for entry in entries:
            if not entry.name.startswith(".") and _is_folder(entry):
                path = Path(entry.path)
                waiting.append(
                    (path, Path(os.path.realpath(path)) if entry.is_symlink() else real / entry.name, level + 1)
                )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns True for a folder, and for a link to a run. Other links could lead in a circle."""
    try:
        return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and _is_run(Path(entry.path)))
    except OSError:
        return False


def _is_run(folder: Path) -> bool:
    """Returns True for the folder of a run, also of a damaged one.

    A recipe alone is not a run: a sweep writes one for its winner, with a provenance beside it.
    """
    run = RunFolder(folder)
    if run.ensemble_path.is_file():
        return True
    # A recipe that is not a file, such as a link that leads nowhere, is damage, and the index says so.
    return os.path.lexists(run.recipe_path) and (
        run.metrics_path.exists() or run.panels.is_dir() or run.checkpoints.is_dir()
    )
