"""Run folders and stores of MLflow that no training has made."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from headway.lifecycle.experiments.query import ListedRun, Selection, select_runs
from headway.lifecycle.experiments.run_index import RunIndex, UpdateResult, open_index
from headway.lifecycle.experiments.scan import find_index, scan_folders

RECIPE = {
    "name": "one",
    "batch": 32,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "data": {"train": "digits.packed/train"},
    "augment": {"flip": True, "mean": [1.5, 2.5]},
    "model": {"ema": None},
}


def write_run(
    folder: Path,
    *,
    lr: float = 0.1,
    optimizer: str = "sgd",
    summary: Mapping[str, Any] | None = None,
    losses: Sequence[float | None] = (2.0, 1.0, 0.5),
    started: str = "2026-11-28T08:00:57+0000",
    **recipe: Any,
) -> Path:
    """Writes a run folder as training does. `summary={}`: the run has not ended."""
    for part in ("panels", "checkpoints"):
        (folder / part).mkdir(parents=True)
    about = {"started": started, "fingerprint": "f" * 64, "git": "abc", "host": {"name": "box"}, "origins": {"a": "b"}}
    (folder / "provenance.json").write_text(json.dumps(about))
    tree = RECIPE | {"optimizer": {"name": optimizer, "lr": lr}} | recipe
    (folder / "recipe.yaml").write_text(yaml.dump(tree, sort_keys=False))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            line = {"kind": "train", "step": step, "position": 32 * step, "loss": loss, "seconds": 2.0 * step}
            file.write(json.dumps(line) + "\n")
        line = {"kind": "evaluate", "step": len(losses), "position": 1, "accuracy": 0.9, "classes": {"count": [1]}}
        file.write(json.dumps(line) + "\n")
    if summary is None:
        summary = {"finished": True, "step": len(losses), "accuracy": 0.9, "seconds": 6.5, "clock_excludes": "start"}
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_ensemble(folder: Path) -> Path:
    """Writes the folder of an ensemble of two."""
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(json.dumps({"started": "2026-11-27T08:00:57+0000"}))
    (folder / "ensemble.json").write_text(json.dumps({"members": [{"run": "a"}, {"run": "b"}]}))
    return folder


def write_mlruns(folder: Path, run_id: str, **changes: Any) -> Path:
    """Writes a run as MLflow's file store does, in the experiment `1` of a folder, and returns the run's folder."""
    experiment = folder / "1"
    experiment.mkdir(parents=True, exist_ok=True)
    (experiment / "meta.yaml").write_text(yaml.dump({"experiment_id": "1", "name": "digits", "tags": []}))
    run = experiment / run_id
    meta = {
        "run_id": run_id,
        "run_name": "bold-cat",
        "experiment_id": "1",
        "status": 3,
        "start_time": 1_700_000_000_000,
        "end_time": 1_700_000_005_000,
        "lifecycle_stage": "active",
        "artifact_uri": f"file:///{run_id}/artifacts",
    }
    texts = {
        "meta.yaml": yaml.dump(meta | changes),
        "params/lr": "1e-2",
        "params/optimizer.name": "sgd",
        "tags/mlflow.user": "ann",
        "tags/mlflow.log-model.history": "x" * 10_000,
        "metrics/val/acc": "1700000001000 0.5 1\n1700000002000 0.75 2\n",
        "metrics/top": "1700000001000 inf 1\n",
        "metrics/loss": "1700000001000 nan 1\n1700000002000 0.25 2\n",
        "inputs/i1/meta.yaml": yaml.dump({"source_id": "d1", "tags": {"mlflow.data.context": "train"}}),
        "../datasets/d1/meta.yaml": yaml.dump({"name": "digits", "digest": "abc123"}),
    }
    for name, text in texts.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


# As MLflow 3 creates them, without the tables and constraints that no run needs.
MLFLOW_SCHEMA = """
CREATE TABLE experiments (experiment_id INTEGER NOT NULL PRIMARY KEY, name VARCHAR(256) NOT NULL,
    artifact_location VARCHAR(256), lifecycle_stage VARCHAR(32), creation_time BIGINT, last_update_time BIGINT);
CREATE TABLE runs (run_uuid VARCHAR(32) NOT NULL PRIMARY KEY, name VARCHAR(250), source_type VARCHAR(20),
    source_name VARCHAR(500), entry_point_name VARCHAR(50), user_id VARCHAR(256), status VARCHAR(9), start_time BIGINT,
    end_time BIGINT, source_version VARCHAR(50), lifecycle_stage VARCHAR(20), artifact_uri VARCHAR(200),
    experiment_id INTEGER, deleted_time BIGINT);
CREATE TABLE metrics (key VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
    run_uuid VARCHAR(32) NOT NULL, step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    PRIMARY KEY (key, timestamp, step, run_uuid, value, is_nan));
CREATE TABLE params (key VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    PRIMARY KEY (key, run_uuid));
CREATE TABLE tags (key VARCHAR(250) NOT NULL, value VARCHAR(5000), run_uuid VARCHAR(32) NOT NULL,
    PRIMARY KEY (key, run_uuid));
CREATE TABLE inputs (input_uuid VARCHAR(36) NOT NULL, source_type VARCHAR(36) NOT NULL, source_id VARCHAR(36) NOT NULL,
    destination_type VARCHAR(36) NOT NULL, destination_id VARCHAR(36) NOT NULL,
    PRIMARY KEY (source_type, source_id, destination_type, destination_id));
CREATE TABLE input_tags (input_uuid VARCHAR(36) NOT NULL, name VARCHAR(255) NOT NULL, value VARCHAR(500) NOT NULL,
    PRIMARY KEY (input_uuid, name));
CREATE TABLE datasets (dataset_uuid VARCHAR(36) NOT NULL, experiment_id INTEGER NOT NULL, name VARCHAR(500) NOT NULL,
    digest VARCHAR(36) NOT NULL, dataset_source_type VARCHAR(36) NOT NULL, dataset_source TEXT NOT NULL,
    dataset_schema TEXT, dataset_profile TEXT, PRIMARY KEY (experiment_id, name, digest));
"""


def write_mlflow_database(path: Path, run_ids: Sequence[str]) -> Path:
    """Writes a database of MLflow whose runs are those of `write_mlruns`."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(MLFLOW_SCHEMA)
        database.execute(
            "INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (1, 'digits', 'active')"
        )
        for run_id in run_ids:
            database.execute(
                "INSERT INTO runs (run_uuid, name, user_id, status, start_time, end_time, lifecycle_stage, "
                "experiment_id) VALUES (?, 'bold-cat', 'ann', 'FINISHED', 1700000000000, 1700000005000, 'active', 1)",
                (run_id,),
            )
            for key, value in {"lr": "1e-2", "optimizer.name": "sgd"}.items():
                database.execute("INSERT INTO params VALUES (?, ?, ?)", (key, value, run_id))
            for key, value in {"mlflow.user": "ann", "mlflow.log-model.history": "x" * 4_000}.items():
                database.execute("INSERT INTO tags VALUES (?, ?, ?)", (key, value, run_id))
            rows = [("val/acc", 0.5, 1, 0), ("val/acc", 0.75, 2, 0), ("loss", 0.0, 1, 1), ("loss", 0.25, 2, 0)]
            # The largest float stands for infinity.
            rows.append(("top", sys.float_info.max, 1, 0))
            for key, value, step, is_nan in rows:
                time_ms = 1_700_000_000_000 + 1000 * step
                values = (key, value, time_ms, run_id, step, is_nan)
                database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", values)
            database.execute("INSERT INTO inputs VALUES (?, 'DATASET', 'd1', 'RUN', ?)", (f"i-{run_id}"[:36], run_id))
            database.execute("INSERT INTO input_tags VALUES (?, 'mlflow.data.context', 'train')", (f"i-{run_id}"[:36],))
        database.execute(
            "INSERT INTO datasets VALUES ('d1', 1, 'digits', 'abc123', 'local', '{}', NULL, ?)", ("x" * 3_000_000,)
        )
        database.commit()
    return path


def update(*folders: Path) -> UpdateResult:
    """Brings the index of some folders up to date."""
    with open_index(find_index(folders)) as index:
        return index.update(scan_folders(folders))


def updated(index: RunIndex, *folders: Path) -> RunIndex:
    """The same index, brought up to date."""
    index.update(scan_folders(folders))
    return index


def list_runs(*folders: Path, **selection: Any) -> list[ListedRun]:
    """Lists runs of an index that is brought up to date before."""
    with open_index(find_index(folders)) as index:
        return select_runs(updated(index, *folders), Selection(**selection))


def compute_digest(*folders: Path) -> str:
    """Returns the digest of the index of some folders, which is not updated."""
    with open_index(find_index(folders)) as index:
        return index.compute_digest()
