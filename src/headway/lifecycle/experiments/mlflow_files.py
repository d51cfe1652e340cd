"""Reads MLflow's folders: mlruns/EXPERIMENT/RUN with meta.yaml, params, metrics, tags and inputs. Needs no MLflow."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, final

from headway.core.errors import RecipeError
from headway.core.files import describe_os_error, read_regular, read_text
from headway.core.recipe_yaml import parse_recipe_tree
from headway.core.untrusted_json import is_whole_number
from headway.lifecycle.experiments.mlflow_run import STATUS_NUMBERS, MlflowRun
from headway.lifecycle.experiments.record import RunReadError, RunRecord, RunStore
from headway.lifecycle.experiments.run_folders import sign_files

META = "meta.yaml"
# Folders of a run that an index reads. A key with slashes is a file in folders below them.
PARTS = ("params", "metrics", "tags", "inputs")
# Most files below one of them, and most slashes of a key.
MOST_FILES = 20_000
MOST_SLASHES = 8
# Largest value of a param or a tag, and largest file of a metric: a million lines.
VALUE_BYTES = 64 << 10
METRIC_BYTES = 64 << 20

_DELETED = re.compile(r"^lifecycle_stage: *['\"]?deleted", re.MULTILINE)


def is_mlflow_folder(folder: Path) -> bool:
    """Returns True for the folder of an experiment of MLflow, or of one of its runs."""
    return _is_file(folder / META)


@final
class MlflowFiles(RunStore):
    """One experiment of MLflow's file store, or one run. Links are not followed: a store from outside could read any
    file by them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_runs(self) -> dict[Path, str]:
        found = [self._folder] if self._is_run(self._folder) else []
        if not found:
            try:
                entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
            except OSError:
                entries = []
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        return {path: _sign(path) for path in found if self._is_run(path)}

    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        for path in paths:
            try:
                yield path, _read_run(path).to_record()
            except RunReadError as error:
                yield path, RunReadError(error.what, where=str(path))
            # Python prints no whole number of more than 4,300 digits, and YAML may hold one as a name.
            except ValueError as error:
                yield path, RunReadError(f"{META} has a value that cannot be read ({error})", where=str(path))
            except OSError as error:
                named = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
                yield path, RunReadError(f"{named}it cannot be read ({describe_os_error(error)})", where=str(path))

    @staticmethod
    def _is_run(folder: Path) -> bool:
        """Returns True for a run that was not deleted in MLflow."""
        if not _is_file(folder / META) or not any((folder / part).is_dir() for part in ("params", "metrics")):
            return False
        try:
            return _DELETED.search(read_text(folder / META, VALUE_BYTES)) is None
        # A damaged one is listed, with the reason.
        except (OSError, UnicodeDecodeError):
            return True


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _sign(folder: Path) -> str:
    digest = hashlib.sha256()
    paths = [folder / META]
    for part in PARTS:
        paths += (path for _, path in _list_files(folder / part, []))
    for path in paths:
        name = path.relative_to(folder)
        digest.update(os.fsencode(name) + sign_files(folder, [name]).encode())
    return digest.hexdigest()


def _list_files(folder: Path, keys: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields (key, path) of the files below a folder in order, without links. Stops after MOST_FILES."""
    if folder.is_symlink():
        return
    waiting, count = [(folder, tuple(keys))], 0
    while waiting:
        above, parts = waiting.pop()
        try:
            entries = sorted(os.scandir(above), key=lambda entry: entry.name)
        except OSError:
            continue
        below = []
        for entry in entries:
            key = (*parts, entry.name)
            if entry.is_dir(follow_symlinks=False) and len(key) <= MOST_SLASHES:
                below.append((Path(entry.path), key))
            elif entry.is_file(follow_symlinks=False):
                count += 1
                if count > MOST_FILES:
                    return
                yield "/".join(key), Path(entry.path)
        waiting += reversed(below)


def _read_run(folder: Path) -> MlflowRun:
    meta = _read_meta(folder / META)
    status = meta.get("status")
    start, end = meta.get("start_time"), meta.get("end_time")
    params = {key: _read_value(path) for key, path in _list_files(folder / "params", [])}
    tags = {key: _read_value(path) for key, path in _list_files(folder / "tags", [])}
    return MlflowRun(
        run_id=folder.name,
        name=str(meta.get("run_name") or ""),
        # Newer stores have its name, and older ones its number.
        status=STATUS_NUMBERS.get(status, "") if isinstance(status, int) else str(status),
        start_ms=start if is_whole_number(start) else None,
        end_ms=end if is_whole_number(end) else None,
        experiment=_read_experiment(folder.parent),
        params=params,
        tags=tags,
        datasets=_read_datasets(folder),
        metrics=_read_metrics(folder / "metrics"),
    )


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        return parse_recipe_tree(read_text(path, VALUE_BYTES), path.name)
    except UnicodeDecodeError:
        raise RunReadError(f"{path.name} is not UTF-8 text") from None
    except RecipeError as error:
        raise RunReadError(f"{error.where}: {error.what}") from None


def _read_experiment(folder: Path) -> str:
    if not _is_file(folder / META):
        return folder.name
    try:
        return str(_read_meta(folder / META).get("name") or folder.name)
    # The runs are whole even if the experiment above them is not.
    except (RunReadError, OSError, ValueError):
        return folder.name


def _read_datasets(folder: Path) -> dict[str, str]:
    """Returns the digest of each data set that the run had as an input, by its context (`train`) or its name."""
    found: dict[str, str] = {}
    for key, path in _list_files(folder / "inputs", []):
        if key.count("/") != 1 or not key.endswith(f"/{META}"):
            continue
        about = _read_meta(path)
        place = folder.parent / "datasets" / str(about.get("source_id")).replace("/", "_") / META
        if not _is_file(place):
            continue
        data = _read_meta(place)
        tags = about.get("tags")
        context = tags.get("mlflow.data.context") if isinstance(tags, dict) else None
        found[str(context or data.get("name"))] = f"{data.get('name')} {data.get('digest')}"
    return found


def _read_value(path: Path) -> str:
    return read_regular(path, VALUE_BYTES).decode("utf-8", "replace").rstrip("\n")


def _read_metrics(folder: Path) -> Iterator[tuple[str, int, float | None, int]]:
    for key, path in _list_files(folder, []):
        # The last line has no end while it is written, or since a kill tore it.
        *lines, _ = read_regular(path, METRIC_BYTES).decode("utf-8", "replace").split("\n")
        for number, line in enumerate(lines, 1):
            parts = line.split()
            # Time, value, step. The first versions had no step; newer ones write a model and a data set behind it.
            try:
                time_ms, value, step = int(parts[0]), float(parts[1]), int(parts[2]) if len(parts) > 2 else 0
            except (ValueError, IndexError):
                raise RunReadError(f"metrics/{key} is damaged in line {number:,}") from None
            if not is_whole_number(step, -(1 << 63)):
                raise RunReadError(f"metrics/{key} has a step that is too large in line {number:,}")
            yield key, step, value, time_ms
