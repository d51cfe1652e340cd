"""MLflow's folders, databases and exported files: the same run from each, and nothing that a hostile one wants."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import UsageError
from headway.lifecycle.experiments import mlflow_files
from headway.lifecycle.experiments.mlflow_database import MlflowDatabase, is_mlflow_database
from headway.lifecycle.experiments.mlflow_files import MlflowFiles, is_mlflow_folder
from headway.lifecycle.experiments.mlflow_json import MlflowJson, choose_run_id, is_mlflow_export, write_mlflow_export
from headway.lifecycle.experiments.record import RunReadError, RunRecord, RunStore, encode_value
from headway.lifecycle.experiments.run_folders import read_run_folder
from headway.lifecycle.experiments.scan import scan_folders

from ._runs import update, write_ensemble, write_mlflow_database, write_mlruns, write_run

RUN = "0123456789abcdef" * 2


def read(store: RunStore) -> dict[str, RunRecord | RunReadError]:
    """All runs of a store by the last part of their paths."""
    return {path.name: record for path, record in store.read_runs(store.list_runs())}


def read_one(store: RunStore) -> RunRecord:
    (record,) = read(store).values()
    assert isinstance(record, RunRecord), record
    return record


def reason(store: RunStore) -> str:
    (record,) = read(store).values()
    assert isinstance(record, RunReadError)
    return str(record)


def encode(record: RunRecord) -> dict[tuple[str, str], Any]:
    """What an index has of a run, but for facts."""
    values: dict[tuple[str, str], Any] = {}
    for source, key, value in record.list_values():
        if source != "about":
            number, text = encode_value(value)
            # 60.0 and 60 are the same number: MLflow has floats alone.
            values[source, key] = text if number is None else number
    points = {("points", key): [(one.step, one.value) for one in rows] for key, rows in record.metrics.items()}
    return values | points


def test_a_run_is_the_same_from_every_store(tmp_path: Path) -> None:
    write_mlruns(tmp_path / "mlruns", RUN)
    files = read_one(MlflowFiles(tmp_path / "mlruns/1"))
    assert (files.kind, files.name, files.state, files.started) == ("mlflow", "bold-cat", "finished", 1.7e9)
    assert files.recipe == {"lr": "1e-2", "optimizer.name": "sgd"}
    assert files.summary == {"seconds": 5.0}
    assert {key: [point[:2] for point in points] for key, points in files.metrics.items()} == {
        "loss": [(1, None), (2, 0.25)],
        "top": [(1, None)],
        "val/acc": [(1, 0.5), (2, 0.75)],
    }
    # The history of logged models is left out.
    assert files.about == {"mlflow.user": "ann", "experiment": "digits", "run_id": RUN, "data.train": "digits abc123"}
    # One run of the folder alone, and the database.
    assert read_one(MlflowFiles(tmp_path / "mlruns/1" / RUN)) == files
    database = MlflowDatabase(write_mlflow_database(tmp_path / "mlflow.db", [RUN]))
    assert read_one(database) == files
    # Written for mlflow-export-import and read again. A value that is not finite is no JSON.
    assert write_mlflow_export(tmp_path / "out", [(tmp_path / "x", files)], "digits") == 1
    again = read_one(MlflowJson(tmp_path / "out"))
    assert again.recipe == files.recipe
    assert again.summary == files.summary
    assert again.metrics == {
        key: kept for key, rows in files.metrics.items() if (kept := [one for one in rows if one.value is not None])
    }
    assert (again.name, again.state, again.started) == (files.name, files.state, files.started)


def test_headways_runs_become_files_for_mlflow_and_back(tmp_path: Path) -> None:
    write_run(
        tmp_path / "a", summary={"finished": True, "step": 3, "accuracy": 0.9, "seconds": 6.5, "x/../y": 1, "ö?": 2}
    )
    write_run(tmp_path / "b", summary={}, losses=[1.0], **{"weird: key\n": 1, "weird: key\t": 2, "long": "x" * 9000})
    write_run(tmp_path / "c", summary={"finished": False, "ended": "callback"})
    write_ensemble(tmp_path / "e")
    paths = [tmp_path / name for name in "abce"]
    records = {path: read_run_folder(path) for path in paths}
    assert write_mlflow_export(tmp_path / "out", records.items(), "photographs") == 4
    store = MlflowJson(tmp_path / "out")
    found = read(store)
    for path, record in records.items():
        again = found[choose_run_id(path, record)]
        assert isinstance(again, RunRecord)
        assert again.name == path.name
        assert (again.state, again.started) == (record.state, record.started)
        if path.name != "b":
            own = {key: value for key, value in encode(record).items() if not re.search("[?ö]|/../", key[1])}
            found_values = encode(again)
            assert {key: found_values.get(key) for key in own} == own
            assert {"fingerprint": "f" * 64}.items() <= again.about.items() or path.name == "e"
    tree = json.loads((tmp_path / "out/experiment.json").read_text())
    assert tree["mlflow"]["experiment"]["name"] == "photographs"
    assert tree["mlflow"]["runs"] == [choose_run_id(path, record) for path, record in records.items()]
    assert tree["info"]["failed_runs"] == []
    for run_id in tree["mlflow"]["runs"]:
        run = json.loads((tmp_path / "out/runs" / run_id / "run.json").read_text())["mlflow"]
        # What MLflow checks of keys and values.
        for key, value in [*run["params"].items(), *run["tags"].items()]:
            assert len(value) <= 5000
            assert_key(key)
        for key, points in run["metrics"].items():
            assert_key(key)
            assert all(isinstance(point["value"], float | int) and point["timestamp"] >= 0 for point in points)
        assert run["info"]["lifecycle_stage"] == "active"
        assert run["info"]["user_id"]
        assert set(run["inputs"]) == {"dataset_inputs", "model_inputs"}
    first = json.loads((tmp_path / "out/runs" / tree["mlflow"]["runs"][0] / "run.json").read_text())["mlflow"]
    # Time goes on with the run's clock.
    assert [one["timestamp"] - first["info"]["start_time"] for one in first["metrics"]["train/loss"]] == [
        2000,
        4000,
        6000,
    ]
    assert first["info"]["end_time"] - first["info"]["start_time"] == 6500
    (data,) = first["inputs"]["dataset_inputs"]
    assert (data["dataset"]["name"], data["dataset"]["digest"]) == ("digits.packed/train", "f" * 36)
    with pytest.raises(UsageError, match="this folder is not empty"):
        write_mlflow_export(tmp_path / "out", [], "x")


def assert_key(key: str) -> None:
    assert re.fullmatch(r"[/\w.\- ]{1,250}", key)
    assert os.path.normpath(key) == key
    assert not key.startswith(("/", ".."))


def test_runs_that_were_deleted_in_mlflow_are_left_out(tmp_path: Path) -> None:
    write_mlruns(tmp_path, RUN, lifecycle_stage="deleted")
    write_mlruns(tmp_path, "f" * 32)
    assert list(read(MlflowFiles(tmp_path / "1"))) == ["f" * 32]
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN, "f" * 32])
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", [RUN])
        database.commit()
    assert list(read(MlflowDatabase(path))) == ["f" * 32]


def test_a_change_in_a_store_is_seen(tmp_path: Path) -> None:
    run = write_mlruns(tmp_path / "mlruns", RUN)
    write_mlruns(tmp_path / "mlruns", "f" * 32)
    database = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    both = tmp_path / "mlruns", database
    assert update(*both).read == 3
    assert update(*both).read == 0
    with (run / "metrics/val/acc").open("a") as file:
        file.write("1700000003000 0.8 3\n")
    assert update(*both).read == 1
    (run / "tags/note").write_text("good")
    assert update(*both).read == 1
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("INSERT INTO tags VALUES ('note', 'good', ?)", [RUN])
        opened.commit()
    assert update(*both).read == 1


def test_of_a_database_only_the_runs_that_changed_are_read_again(tmp_path: Path) -> None:
    ids = [RUN, "e" * 32, "f" * 32]
    path = write_mlflow_database(tmp_path / "mlflow.db", ids)
    assert update(path).read == 3
    names = {one.name for one in tmp_path.iterdir()}
    for statement in (
        "INSERT INTO metrics VALUES ('loss', 0.125, 1700000009000, ?, 9, 0)",
        "INSERT INTO params VALUES ('new', '1', ?)",
        "INSERT INTO tags VALUES ('note', 'good', ?)",
        "UPDATE tags SET value = 'evil' WHERE key = 'note' AND run_uuid = ?",
        "UPDATE runs SET status = 'FAILED' WHERE run_uuid = ?",
        "UPDATE runs SET name = 'shy-cow' WHERE run_uuid = ?",
    ):
        with closing(sqlite3.connect(path)) as database:
            database.execute(statement, [RUN])
            database.commit()
        assert (update(path).read, update(path).read) == (1, 0), statement
    # The store is only read: its index lies elsewhere.
    assert {one.name for one in tmp_path.iterdir()} == names


@pytest.mark.parametrize("name", ["0x" + "f" * 4000, "[0x" + "f" * 4000 + "]"])
def test_a_number_that_python_does_not_print_stops_no_other_run(tmp_path: Path, name: str) -> None:
    run = write_mlruns(tmp_path / "mlruns", RUN)
    write_mlruns(tmp_path / "mlruns", "f" * 32)
    (run / "meta.yaml").write_text((run / "meta.yaml").read_text().replace("bold-cat", name))
    own = write_run(tmp_path / "runs/a")
    (own / "recipe.yaml").write_text((own / "recipe.yaml").read_text() + f"seed: {name}\n")
    result = update(tmp_path)
    assert (result.runs, len(result.damaged)) == (2, 1)
    assert "meta.yaml has a value that cannot be read" in result.describe()
    # Of the whole experiment the name is only decoration.
    (tmp_path / "mlruns/1/meta.yaml").write_text(f"name: {name}\n")
    assert update(tmp_path).runs == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("meta.yaml", "a: [", "meta.yaml:1: this is not YAML"),
        ("meta.yaml", b"\xff", "meta.yaml is not UTF-8 text"),
        ("metrics/loss", "1 2 3\nx\n1 2 3\n", "metrics/loss is damaged in line 2"),
        ("metrics/loss", "1 2 1e400\n", "metrics/loss is damaged in line 1"),
        ("metrics/loss", f"1 2 {1 << 70}\n", "has a step that is too large"),
        ("params/lr", "x" * 70_000, "lr: it cannot be read (it has 70,000 bytes, more than the 65,536 that are read)"),
    ],
)
def test_a_damaged_run_of_mlflow_is_a_sentence(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    run = write_mlruns(tmp_path, RUN)
    (run / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert said in reason(MlflowFiles(tmp_path / "1"))
    assert said in update(tmp_path).describe()


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_mlruns(tmp_path, RUN)
    (run / "metrics/loss").write_text("1 0.5 1\n1 0.2")
    assert [point.value for point in read_one(MlflowFiles(tmp_path / "1")).metrics["loss"]] == [0.5]
    # The first versions of MLflow wrote no step, and the newest write a model behind it.
    (run / "metrics/loss").write_text("1 0.5\n2 0.25 7 digits abc m-1\n")
    assert [point[:2] for point in read_one(MlflowFiles(tmp_path / "1")).metrics["loss"]] == [(0, 0.5), (7, 0.25)]


def test_links_of_a_store_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("hunter2")
    run = write_mlruns(tmp_path / "store", RUN)
    (run / "params/stolen").symlink_to(secret / "key")
    (run / "tags/folder").symlink_to(secret)
    (run / "metrics/m").symlink_to(secret / "key")
    other = write_mlruns(tmp_path / "other", RUN)
    shutil.rmtree(other / "params")
    (other / "params").symlink_to(secret)
    assert "hunter2" not in repr(read(MlflowFiles(tmp_path / "other/1")))
    (tmp_path / "store/1/link").symlink_to(secret)
    (tmp_path / "store/2").symlink_to(tmp_path / "store/1")
    assert "hunter2" not in repr(read(MlflowFiles(tmp_path / "store/1")))
    assert update(tmp_path / "store").runs == 1
    os.remove(run / "meta.yaml")
    (run / "meta.yaml").symlink_to(secret / "key")
    assert not is_mlflow_folder(run)


def test_a_store_of_files_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_files, "MOST_FILES", 5)
    run = write_mlruns(tmp_path, RUN)
    for number in range(9):
        (run / f"params/p{number}").write_text("1")
    # A key of more folders than any has.
    deep = run / "params" / "/".join("d" * 20)
    deep.mkdir(parents=True)
    (deep / "x").write_text("1")
    os.mkfifo(run / "metrics/pipe")
    record = read_one(MlflowFiles(tmp_path / "1"))
    assert len(record.recipe) == 5
    assert set(record.metrics) == {"loss", "top", "val/acc"}


def test_a_database_is_opened_for_reading_alone(tmp_path: Path) -> None:
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    before, names = path.read_bytes(), {one.name for one in tmp_path.iterdir()}
    assert read_one(MlflowDatabase(path))
    assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    ("statements", "missing"),
    [
        (["ALTER TABLE params RENAME TO p", "CREATE VIEW params AS SELECT * FROM p"], "table params"),
        (["DROP TABLE tags"], "table tags"),
        (["ALTER TABLE runs DROP COLUMN status"], "column runs.status"),
        (
            ["DROP TABLE params", "CREATE VIRTUAL TABLE params USING fts5(key, value, run_uuid)"],
            "table params",
        ),
    ],
)
def test_a_database_with_another_schema_is_refused(tmp_path: Path, statements: list[str], missing: str) -> None:
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    assert not is_mlflow_database(path)
    with pytest.raises(UsageError, match=f"this database has no {missing}"):
        MlflowDatabase(path).list_runs()
    with pytest.raises(UsageError, match="this file is not a database of MLflow's runs"):
        scan_folders([path])


def test_columns_that_compute_do_not_run(tmp_path: Path) -> None:
    """A column may call a function for every row, for example one that makes a gigabyte."""
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA writable_schema = ON")
        changed = database.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'value VARCHAR(5000)', "
            "'value VARCHAR(5000) AS (hex(zeroblob(500000000)))') WHERE name = 'tags' AND sql LIKE '%VARCHAR(5000)%'"
        ).rowcount
        database.commit()
    assert changed == 1
    with pytest.raises(UsageError, match=r"this database has no column tags\.value"):
        read(MlflowDatabase(path))


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH ':memory:' AS other",
        "SELECT upper('x')",
        "PRAGMA writable_schema = ON",
        "CREATE TABLE t (x)",
        "DELETE FROM runs",
    ],
)
def test_an_opened_database_answers_queries_alone(tmp_path: Path, statement: str) -> None:
    """Whatever the schema of a hostile file leads to, nothing but reading is allowed."""
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    with closing(MlflowDatabase(path)._connect()) as database:
        assert database.execute("SELECT run_uuid FROM runs").fetchall() == [(RUN,)]
        with pytest.raises(sqlite3.DatabaseError, match=r"not authorized"):
            database.execute(statement)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [damage, lambda path: os.truncate(path, 5000)])
def test_a_damaged_database_is_a_sentence(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN])
    spoil(path)
    with pytest.raises(UsageError, match=r"this database cannot be read|this database has no|not a database of MLflow"):
        read(MlflowDatabase(path))


def test_rows_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    """SQLite keeps any kind of value in any column."""
    path = write_mlflow_database(tmp_path / "mlflow.db", [RUN, "../../etc"])
    with closing(sqlite3.connect(path)) as database:
        rows: list[tuple[Any, ...]] = [
            (b"\xff\xfe", 1.0, 1, RUN, 1, 0),
            ("blob", b"x", 1, RUN, 1, 0),
            ("step", 1.0, 1, RUN, "soon", 0),
            ("time", 1.0, "now", RUN, 1, 0),
        ]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.execute("INSERT INTO params VALUES (x'ff', 'x', ?)", [RUN])
        database.execute("INSERT INTO params VALUES ('odd', CAST(x'ff41' AS TEXT), ?)", [RUN])
        database.execute("UPDATE runs SET start_time = 'then', name = x'00'")
        database.commit()
    record = read_one(MlflowDatabase(path))
    assert record.started is None
    assert record.name == RUN
    assert record.recipe["odd"] == "\ufffdA"
    assert {key: points[-1][1:] for key, points in record.metrics.items() if key in ("blob", "step", "time")} == {
        "blob": (None, 1),
        "time": (1.0, 0),
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "run.json is damaged"),
        ("[]", "run.json is damaged: it holds a list"),
        ('{"mlflow": 3}', "it has no run"),
        ('{"mlflow": {"info": []}}', "it has no run"),
        ('{"mlflow": {"info": {}, "metrics": {"a": [3]}}}', "metric a has a row without a value and a step"),
        ('{"mlflow": {"info": {}, "metrics": {"a": [{"value": 1}]}}}', "metric a has a row without a value and a step"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "it is nested"),
    ],
)
def test_a_damaged_export_is_a_sentence(tmp_path: Path, content: str, said: str) -> None:
    record = read_run_folder(write_run(tmp_path / "a"))
    write_mlflow_export(tmp_path / "out", [(tmp_path / "a", record)], "x")
    (path,) = (tmp_path / "out/runs").glob("*/run.json")
    path.write_text(content)
    assert said in reason(MlflowJson(tmp_path / "out"))
    assert said in update(tmp_path / "out").describe()


def test_exports_of_older_versions_are_read(tmp_path: Path) -> None:
    """They have the runs beside experiment.json, and the first ones had the run at the top of its file."""
    (tmp_path / "old/r1").mkdir(parents=True)
    (tmp_path / "old/experiment.json").write_text("{}")
    run = {
        "info": {"run_name": "one", "status": "FAILED", "start_time": 1000},
        "params": {"lr": "0.1", "bad": 3},
        "metrics": {"loss": [{"value": 1.5, "timestamp": 5, "step": 0}]},
        "tags": {},
    }
    (tmp_path / "old/r1/run.json").write_text(json.dumps(run))
    assert is_mlflow_export(tmp_path / "old")
    record = read_one(MlflowJson(tmp_path / "old"))
    assert (record.name, record.state, record.started, record.recipe) == ("one", "failed", 1.0, {"lr": "0.1"})
    assert record.metrics["loss"] == [(0, 1.5, 5)]
