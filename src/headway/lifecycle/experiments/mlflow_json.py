"""Writes and reads the JSON files of mlflow-export-import, by which runs come into any store of MLflow.

The folder has experiment.json and runs/ID/run.json, as version 2 of these files. Each file has `system` (who wrote it)
and `mlflow` (what MLflow's REST API says of the object).
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import posixpath
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, expect_empty_folder, is_plain_name, read_text, write_atomically
from headway.core.untrusted_json import JsonError, is_any_number, is_text, is_whole_number, parse_object
from headway.lifecycle.experiments.mlflow_run import FACT_TAG, STATES, SUMMARY, SUMMARY_TAG, MlflowRun
from headway.lifecycle.experiments.record import RunReadError, RunRecord, RunStore, encode_value, to_finite
from headway.lifecycle.experiments.run_folders import sign_files

FILE_VERSION = "2"
EXPERIMENT = "experiment.json"
RUN = "run.json"
# What MLflow refuses: longer keys and values, and other characters in a key.
KEY_CHARACTERS = 250
VALUE_CHARACTERS = 5000
DIGEST_CHARACTERS = 36
_REFUSED = re.compile(r"[^/\w.\- ]", re.ASCII)
_RUN_ID = re.compile(r"[0-9a-f]{32}")
# Largest run.json that is read.
FILE_BYTES = 512 << 20


def write_mlflow_export(folder: Path, runs: Iterable[tuple[Path, RunRecord]], experiment: str) -> int:
    """Writes runs as files that mlflow-export-import reads, and returns their number.

    Values that are not finite are left out: JSON has none.

    Args:
        folder: folder to create.
        experiment: name of the experiment.

    Raises:
        UsageError: the folder holds files, or cannot be written.
    """
    expect_empty_folder(folder, "--mlflow")
    try:
        ids: dict[str, None] = {}
        for path, record in runs:
            run_id = choose_run_id(path, record)
            if run_id in ids:
                continue
            ids[run_id] = None
            place = folder / "runs" / run_id
            place.mkdir(parents=True)
            _write(place / RUN, "export_run.py", _build_run(path, record, run_id))
        now = round(time.time() * 1000)
        about = {
            "experiment_id": "0",
            "name": experiment,
            "artifact_location": "",
            "lifecycle_stage": "active",
            "tags": {},
            "creation_time": now,
            "last_update_time": now,
        }
        folder.mkdir(parents=True, exist_ok=True)
        counts = {"num_total_runs": len(ids), "num_ok_runs": len(ids), "num_failed_runs": 0, "failed_runs": []}
        # Last: an importer begins with this file.
        _write(folder / EXPERIMENT, "export_experiment.py", {"experiment": about, "runs": list(ids)}, counts)
    except OSError as error:
        what = f"this folder cannot be written ({describe_os_error(error)})"
        raise UsageError(what, where=str(folder), fix="Name another one with --mlflow.") from None
    return len(ids)


def choose_run_id(path: Path, record: RunRecord) -> str:
    """Returns the id of a run in MLflow: its own, or one that depends on its path and start alone."""
    own = record.about.get("run_id")
    if isinstance(own, str) and _RUN_ID.fullmatch(own):
        return own
    return hashlib.sha256(os.fsencode(path) + repr(record.started).encode()).hexdigest()[:32]


def is_mlflow_export(folder: Path) -> bool:
    """Returns True for a folder that `write_mlflow_export` or mlflow-export-import wrote."""
    return (folder / EXPERIMENT).is_file()


@final
class MlflowJson(RunStore):
    """The runs in a folder of mlflow-export-import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_runs(self) -> dict[Path, str]:
        found: dict[Path, str] = {}
        # Versions of the format before 2 have the runs beside experiment.json.
        for above in (self._folder / "runs", self._folder):
            # A link may lead to any folder of the machine.
            if above != self._folder and above.is_symlink():
                continue
            try:
                entries = sorted(os.scandir(above), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                path = Path(entry.path)
                if is_plain_name(entry.name) and entry.is_dir(follow_symlinks=False) and (path / RUN).is_file():
                    found[path] = sign_files(path, [RUN])
        return found

    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        experiment = self._read_name()
        for path in paths:
            try:
                yield path, _read_run(path, experiment).to_record()
            except RunReadError as error:
                yield path, RunReadError(error.what, where=str(path))

    def _read_name(self) -> str:
        """Returns the name of the experiment, or that of the folder if the file does not say it."""
        try:
            tree: Any = parse_object(read_text(self._folder / EXPERIMENT, FILE_BYTES))
            name = tree["mlflow"]["experiment"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            name = None
        return name if is_text(name) else self._folder.name


def _build_run(path: Path, record: RunRecord, run_id: str) -> dict[str, Any]:
    start = 0 if record.started is None else round(record.started * 1000)
    seconds = to_finite(record.summary.get("seconds")) if is_any_number(record.summary.get("seconds")) else None
    end = start + round(seconds * 1000) if seconds is not None and 0 <= seconds < 1e12 else start
    step = record.summary.get("step")
    summary_step = step if is_whole_number(step) else 0
    metrics: dict[str, list[dict[str, Any]]] = {}
    for key, points in record.metrics.items():
        rows = [
            {"value": point.value, "timestamp": max(point.time_ms, 0), "step": point.step}
            for point in points
            if point.value is not None
        ]
        if rows:
            metrics[_clean_key(key, metrics)] = rows
    tags = {"mlflow.runName": _cut(record.name), "headway.run": _cut(encode_value(str(path))[1])}
    for key, value in record.summary.items():
        number = to_finite(value) if is_any_number(value) else None
        if number is not None:
            name = _clean_key(f"{SUMMARY}{key}", metrics)
            metrics[name] = [{"value": number, "timestamp": end, "step": summary_step}]
        else:
            tags[_clean_key(f"{SUMMARY_TAG}{key}", tags)] = _cut(encode_value(value)[1])
    for key, value in record.about.items():
        # The tags that a run of MLflow had keep their names.
        name = key if record.kind == "mlflow" and not key.startswith("data.") else f"{FACT_TAG}{key}"
        if key not in ("run_id", "experiment"):
            tags[_clean_key(name, tags)] = _cut(encode_value(value)[1])
    params: dict[str, str] = {}
    for key, value in record.recipe.items():
        params[_clean_key(key, params)] = _cut(encode_value(value)[1])
    status = next((name for name, state in STATES.items() if state == record.state), "FINISHED")
    info = {
        "run_id": run_id,
        "run_uuid": run_id,
        "run_name": _cut(record.name),
        "experiment_id": "0",
        "user_id": _get_user(),
        "status": status,
        "start_time": start,
        "end_time": end,
        "lifecycle_stage": "active",
        "artifact_uri": "",
    }
    inputs = {"dataset_inputs": _build_inputs(record), "model_inputs": []}
    return {"info": info, "params": params, "metrics": metrics, "tags": tags, "inputs": inputs}


def _build_inputs(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the training set as MLflow's input: its name, and its fingerprint as the digest."""
    fingerprint, train = record.about.get("fingerprint"), record.recipe.get("data.train")
    if not isinstance(fingerprint, str) or not isinstance(train, str):
        return []
    source = json.dumps({"uri": train})
    data = {"name": _cut(train, 500), "digest": fingerprint[:DIGEST_CHARACTERS], "source_type": "local"}
    return [{"dataset": data | {"source": source}, "tags": [{"key": "mlflow.data.context", "value": "train"}]}]


def _clean_key(key: str, taken: Collection[str]) -> str:
    """Returns a key that MLflow takes, and that none of these has: other characters become `_`."""
    name = posixpath.normpath(_REFUSED.sub("_", key)[:KEY_CHARACTERS]).lstrip("/") if key else "_"
    while name.startswith("..") or name == ".":
        name = f"_{name}"
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name[: KEY_CHARACTERS - 8]}_{number}"
    return free


def _cut(text: str, most: int = VALUE_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _get_user() -> str:
    try:
        return getpass.getuser()
    # A container may have no name for the user's number.
    except (OSError, KeyError):
        return "unknown"


def _write(path: Path, script: str, mlflow: Mapping[str, Any], info: Mapping[str, Any] | None = None) -> None:
    now = time.time()
    system = {
        "package_version": f"headway {metadata.version('headway')}",
        "script": script,
        "export_file_version": FILE_VERSION,
        "export_time": round(now),
        "_export_time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)),
        "mlflow_version": "",
        "mlflow_tracking_uri": "",
        "platform": {"python_version": platform.python_version(), "system": platform.system()},
        "user": _get_user(),
    }
    tree = {"system": system, **({"info": info} if info is not None else {}), "mlflow": mlflow}
    text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode("utf-8", "replace"))


def _read_run(folder: Path, experiment: str) -> MlflowRun:
    try:
        tree = parse_object(read_text(folder / RUN, FILE_BYTES))
    except JsonError as error:
        raise RunReadError(f"{RUN} is damaged: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunReadError(f"{RUN} cannot be read ({describe_os_error(error)})") from None
    # Files of the first versions have the run at their top.
    run = tree.get("mlflow", tree)
    if not isinstance(run, dict) or not isinstance(run.get("info"), dict):
        raise RunReadError(f"{RUN} is damaged: it has no run")
    info = run["info"]
    start, end = info.get("start_time"), info.get("end_time")
    return MlflowRun(
        run_id=folder.name,
        name=str(info.get("run_name") or ""),
        status=str(info.get("status")),
        # 0: unknown, as `write_mlflow_export` writes it.
        start_ms=start if is_whole_number(start, 1) else None,
        end_ms=end if is_whole_number(end, 1) else None,
        experiment=experiment,
        params=_read_texts(run.get("params")),
        tags=_read_texts(run.get("tags")),
        datasets=_read_inputs(run.get("inputs")),
        metrics=_read_metrics(run.get("metrics")),
    )


def _read_texts(tree: object) -> dict[str, str]:
    return {key: value for key, value in tree.items() if is_text(value)} if isinstance(tree, dict) else {}


def _read_inputs(tree: object) -> dict[str, str]:
    found: dict[str, str] = {}
    inputs = tree.get("dataset_inputs") if isinstance(tree, dict) else None
    for entry in inputs if isinstance(inputs, list) else ():
        data = entry.get("dataset") if isinstance(entry, dict) else None
        if not isinstance(data, dict):
            continue
        tags = entry.get("tags")
        contexts = [
            tag.get("value")
            for tag in (tags if isinstance(tags, list) else ())
            if isinstance(tag, dict) and tag.get("key") == "mlflow.data.context"
        ]
        found[str(contexts[0] if contexts else data.get("name"))] = f"{data.get('name')} {data.get('digest')}"
    return found


def _read_metrics(tree: object) -> Iterator[tuple[str, int, float | None, int]]:
    for key, rows in tree.items() if isinstance(tree, dict) else ():
        for row in rows if isinstance(rows, list) else ():
            value, step, time_ms = _read_point(row)
            if not is_any_number(value) or not is_whole_number(step, -(1 << 63)):
                raise RunReadError(f"{RUN} is damaged: metric {key[:100]} has a row without a value and a step")
            yield key, step, value, time_ms if is_whole_number(time_ms) else 0


def _read_point(row: object) -> tuple[Any, Any, Any]:
    return (row.get("value"), row.get("step"), row.get("timestamp")) if isinstance(row, dict) else (None, None, None)
