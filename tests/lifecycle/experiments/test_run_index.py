"""The index of runs: whatever happened before, it has what the run folders have."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._support import collect_messages

from headway.core.errors import HeadwayError, UsageError
from headway.core.mounts import Mount
from headway.lifecycle.experiments import run_folders, run_index
from headway.lifecycle.experiments.query import Selection, list_keys, read_column, read_series, select_runs
from headway.lifecycle.experiments.run_index import SCHEMA, open_index
from headway.lifecycle.experiments.scan import find_index, scan_folders

from ._runs import compute_digest, list_runs, update, updated, write_ensemble, write_mlruns, write_run


def rebuild(folder: Path) -> str:
    """The digest of an index that is built from nothing."""
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    update(folder)
    return compute_digest(folder)


def test_a_run_is_in_the_index_with_all_that_it_has(tmp_path: Path) -> None:
    write_run(tmp_path / "a", lr=0.25, losses=(2.0, None, 0.5))
    write_run(tmp_path / "b", summary={})
    write_run(tmp_path / "c", summary={"finished": False, "step": 1})
    write_ensemble(tmp_path / "e")
    found = {run.name: run for run in list_runs(tmp_path)}
    assert {name: (run.kind, run.state) for name, run in found.items()} == {
        "a": ("run", "finished"),
        "b": ("run", "unfinished"),
        "c": ("run", "stopped"),
        "e": ("ensemble", "finished"),
    }
    assert found["a"].started == 1795852857.0
    assert [run.path for run in found.values()] == [tmp_path / name for name in "abce"]
    with open_index(find_index([tmp_path])) as index:
        updated(index, tmp_path)
        first = found["a"].number
        keys = {use.key for use in list_keys(index)}
        assert {"recipe.optimizer.lr", "recipe.augment.mean", "summary.accuracy", "about.host.name"} <= keys
        # Where values of a recipe came from, and what a clock excludes, are no values of a run.
        assert not any("origins" in key or "clock_excludes" in key or "classes" in key for key in keys)
        columns = {key: read_column(index, key).get(first) for key in ("optimizer.lr", "augment.flip", "model.ema")}
        assert columns == {"optimizer.lr": (0.25, "0.25"), "augment.flip": (None, "true"), "model.ema": (None, "null")}
        assert read_column(index, "augment.mean")[first] == (None, "[1.5, 2.5]")
        assert read_column(index, "members") == {found["e"].number: (2.0, "2")}
        assert read_series(index, [first], "train/loss") == {first: [(1, 2.0), (2, None), (3, 0.5)]}
        # The last value of a metric is a value of the run.
        assert read_column(index, "train/loss")[first] == (0.5, "0.5")
        assert read_column(index, "evaluate/accuracy")[first] == (0.9, "0.9")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "remove", "log", "damage", "rename", "update"]), st.integers(0, 3), st.integers(0, 3)
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(ACTIONS)
def test_an_index_that_followed_all_changes_equals_one_that_is_built_anew(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    update(folder)
    for action, one, other in actions:
        run, target = folder / f"r{one}", folder / f"r{other}"
        if action == "write":
            shutil.rmtree(run, ignore_errors=True)
            write_run(run, lr=0.1 * (1 + other))
        elif action == "update":
            update(folder)
        elif not run.exists():
            continue
        elif action == "remove":
            shutil.rmtree(run)
        elif action == "log":
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": "train", "step": 10 + other, "position": 1, "loss": 0.1}) + "\n")
        elif action == "damage":
            (run / ("summary.json", "recipe.yaml", "provenance.json", "metrics.jsonl")[other]).write_text("{ torn\n{\n")
        elif not target.exists():
            run.rename(target)
    result = update(folder)
    followed, listed = compute_digest(folder), [run.to_json() for run in list_runs(folder, sort="path")]
    assert rebuild(folder) == followed
    assert [run.to_json() for run in list_runs(folder, sort="path")] == listed
    assert result.runs == len(listed)
    assert result.runs + len(result.damaged) == sum(1 for _ in folder.glob("r*"))


def test_only_runs_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write_run(tmp_path / name)
    read, real = list[str](), run_folders.read_run_folder

    def count(folder: Path) -> Any:
        read.append(folder.name)
        return real(folder)

    monkeypatch.setattr(run_folders, "read_run_folder", count)
    assert update(tmp_path).read == 3
    assert sorted(read) == ["a", "b", "c"]
    assert update(tmp_path).read == 0
    # A damaged run is not read again either, until its files change.
    (tmp_path / "b/summary.json").write_text("{")
    read.clear()
    assert [one.path.name for one in update(tmp_path).damaged] == ["b"]
    assert [one.path.name for one in update(tmp_path).damaged] == ["b"]
    # The same size within the same tick of the clock: the file is another one.
    text = (tmp_path / "a/summary.json").read_text()
    (tmp_path / "a/new").write_text(text.replace("0.9", "0.8"))
    os.utime(tmp_path / "a/new", ns=(0, (tmp_path / "a/summary.json").stat().st_mtime_ns))
    (tmp_path / "a/new").rename(tmp_path / "a/summary.json")
    shutil.rmtree(tmp_path / "c")
    result = update(tmp_path)
    assert (result.runs, result.read, result.gone) == (1, 1, 1)
    assert read == ["b", "a"]
    (run,) = list_runs(tmp_path, columns=("accuracy",))
    assert run.values["accuracy"].number == 0.8


def test_runs_with_many_values_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcde":
        write_run(tmp_path / name, losses=(3.0,) * (50 if name == "b" else 2))
    written, real = list[int](), run_index._split_runs

    def count(runs: Any) -> Any:
        for chunk in real(runs):
            written.append(len(chunk))
            yield chunk

    monkeypatch.setattr(run_index, "_split_runs", count)
    monkeypatch.setattr(run_index, "CHUNK", 2)
    monkeypatch.setattr(run_index, "CHUNK_POINTS", 50)
    # b alone is more than memory should hold, so it ends its list; then lists end by their length.
    assert update(tmp_path).read == 5
    assert written == [2, 2, 1]
    written.clear()
    monkeypatch.setattr(run_index, "CHUNK", 64)
    rebuild(tmp_path)
    assert written == [2, 3]


def test_a_last_line_that_is_torn_anywhere_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", losses=(2.0, 1.0))
    content = (run / "metrics.jsonl").read_bytes()
    *whole, last = content.splitlines(keepends=True)
    for cut in range(len(last) - 1):
        (run / "metrics.jsonl").write_bytes(b"".join(whole) + last[:cut])
        record = run_folders.read_run_folder(run)
        assert [point.value for point in record.metrics["train/loss"]] == [2.0, 1.0]
        assert "evaluate/accuracy" not in record.metrics
    # Blocks of a line reach the disk in any order: a power failure leaves zeros, with or without the line's end.
    for torn in (b"\0" * 40, b"\0" * 40 + b"\n"):
        (run / "metrics.jsonl").write_bytes(b"".join(whole) + torn)
        assert "evaluate/accuracy" not in run_folders.read_run_folder(run).metrics
    (run / "metrics.jsonl").write_bytes(content)
    assert "evaluate/accuracy" in run_folders.read_run_folder(run).metrics
    (run / "metrics.jsonl").unlink()
    assert run_folders.read_run_folder(run).metrics == {}


DAMAGES = {
    "recipe.yaml": [
        (b"a: [1", "recipe.yaml:1: this is not YAML"),
        (b"\xff", "recipe.yaml cannot be read"),
        (b"- 1", "recipe.yaml: a recipe is a mapping of keys to values"),
        (b"a: " + b"[" * 700, "recipe.yaml: this YAML holds itself, or is nested too deeply"),
    ],
    "provenance.json": [(b"{", "provenance.json is damaged"), (None, "the run has no provenance.json")],
    "summary.json": [(b"[]", "summary.json is damaged: it holds a list, not an object")],
    "metrics.jsonl": [
        (b'{"kind": "train"}\n', "metrics.jsonl has a record without its step or kind"),
        (b'{"kind": "train", "step": 1e3}\n{}\n', "metrics.jsonl has a record without its step or kind"),
        (b'{"kind": "a", "step": 1}\n{torn\n{"kind": "a", "step": 2}\n', "metrics.jsonl is damaged in line 2"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "reason"), [(name, *case) for name, cases in DAMAGES.items() for case in cases]
)
def test_a_damaged_run_is_listed_with_the_reason(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    write_run(tmp_path / "good")
    run = write_run(tmp_path / "bad")
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    result = update(tmp_path)
    assert [one.path for one in result.damaged] == [run]
    assert reason in result.damaged[0].reason
    assert f"Left out {run}: {reason}" in result.describe()
    assert result.to_json()["damaged"][0]["run"] == str(run)
    assert [one.name for one in list_runs(tmp_path)] == ["good"]
    shutil.rmtree(run)
    write_run(run)
    assert update(tmp_path).damaged == ()


def test_a_file_that_is_none_does_not_stop_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    for number, name in enumerate(("recipe.yaml", "summary.json", "metrics.jsonl")):
        run = write_run(tmp_path / f"bad{number}")
        (run / name).unlink()
        # Opening it would wait for a writer.
        os.mkfifo(run / name)
    assert [one.path.name for one in update(tmp_path).damaged] == ["bad0", "bad1", "bad2"]


def test_values_of_every_kind_are_kept(tmp_path: Path) -> None:
    """Numbers without end, unpaired surrogates and NaN come from JSON of others; a name may be in any encoding."""
    run = write_run(tmp_path / "a", summary={"finished": True, "big": 10**400, "nan": float("nan"), "text": "\ud800"})
    (run / "metrics.jsonl").write_text(
        '{"kind": "a", "step": 1, "x": 1' + "0" * 400 + ', "y": NaN, "t": true, "s": "text", "z": -0.0}\n'
        '{"kind": "a", "step": 1, "z": 5}\n'
    )
    odd = os.fsdecode(b"\xff\x00\x1b[31m"[:1] + b"\x1b[31m")
    write_run(tmp_path / odd)
    with open_index(find_index([tmp_path])) as index:
        assert updated(index, tmp_path)
        first = next(one.number for one in select_runs(index, Selection()) if one.name == "a")
        assert read_column(index, "big")[first].number is None
        assert read_column(index, "summary.nan")[first] == (None, "nan")
        assert read_column(index, "summary.text")[first] == (None, "?")
        series = {name: read_series(index, [first], f"a/{name}")[first] for name in "xyz"}
        # A step that is written again replaces the first.
        assert series == {"x": [(1, None)], "y": [(1, None)], "z": [(1, 5.0)]}
        assert {use.name for use in list_keys(index) if use.source == "metric" and use.name.startswith("a/")} == {
            "a/x",
            "a/y",
            "a/z",
        }
    assert {one.path.name for one in list_runs(tmp_path)} == {"a", odd}


def test_an_index_keeps_runs_of_other_folders_and_lists_those_that_are_named(tmp_path: Path) -> None:
    for name in ("x/a", "x/b", "y/c"):
        write_run(tmp_path / name)
    index = tmp_path / "index.sqlite"
    assert [one.name for one in list_runs(tmp_path)] == ["a", "b", "c"]
    with open_index(index) as opened:
        assert opened.update(scan_folders([tmp_path / "y"])).runs == 1
        assert [one.name for one in select_runs(opened, Selection())] == ["c"]
        assert opened.update(scan_folders([tmp_path / "x/a", tmp_path / "x/a"])).runs == 1
        # What is gone from a folder that is not named stays until it is.
        shutil.rmtree(tmp_path / "x/b")
        assert opened.update(scan_folders([tmp_path / "y"])).gone == 0
        result = opened.update(scan_folders([tmp_path]))
        assert (result.runs, result.read, result.gone) == (2, 0, 1)


def fill(folder: str) -> None:
    """The work of one process among several."""
    update(Path(folder))


def test_processes_that_update_at_once_agree(tmp_path: Path) -> None:
    for number in range(12):
        write_run(tmp_path / f"r{number}")
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=fill, args=(str(tmp_path),)) for _ in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0, 0]
    digest = compute_digest(tmp_path)
    assert update(tmp_path).read == 0
    assert digest == rebuild(tmp_path)


KILLED = """
import os, sys
from pathlib import Path
from headway.lifecycle.experiments import run_index
from headway.lifecycle.experiments.scan import scan_folders
run_index.CHUNK = 1
folder = Path(sys.argv[1])
index = run_index.open_index(folder / "index.sqlite")
real, done = index._insert, []
def insert(*arguments):
    real(*arguments)
    done.append(1)
    if len(done) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
index._insert = insert
index.update(scan_folders([folder]))
"""


@pytest.mark.parametrize("after", [1, 4])
def test_a_killed_update_loses_nothing(tmp_path: Path, after: int) -> None:
    for number in range(6):
        write_run(tmp_path / f"r{number}")
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path, str(after)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "index.sqlite-wal").exists()
    # The transaction of the last run was not committed.
    assert update(tmp_path).read == 6 - (after - 1)
    assert compute_digest(tmp_path) == rebuild(tmp_path)


def test_an_index_deleted_without_its_log_is_built_from_nothing(tmp_path: Path) -> None:
    """SQLite must not replay the log of the old database into the new one."""
    for number in range(3):
        write_run(tmp_path / f"r{number}")
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path, "3"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "index.sqlite").unlink()
    assert (tmp_path / "index.sqlite-wal").stat().st_size
    assert update(tmp_path).read == 3
    assert compute_digest(tmp_path) == rebuild(tmp_path)


def test_a_network_file_system_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    monkeypatch.setattr(run_index, "find_mount", lambda path: Mount("/", "nfs4", "server:/x", "rw"))
    with pytest.raises(UsageError, match=r"locks and shared memory, .* network file system \(nfs4\).*--index FILE"):
        update(tmp_path)
    assert not (tmp_path / "index.sqlite").exists()
    # The runs may lie there: they are only read.
    monkeypatch.setattr(run_index, "find_mount", lambda path: None)
    assert update(tmp_path).runs == 1


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    path = tmp_path / "index.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE precious (x)")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"this file is not an index of Headway.*--index FILE"):
        update(tmp_path)
    assert path.read_bytes() == before
    path.write_text("notes")
    with pytest.raises(UsageError, match="not an index of Headway"):
        update(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="this index cannot be read"):
        update(tmp_path)
    with pytest.raises(UsageError, match="there is no such folder for an index"):
        open_index(tmp_path / "nowhere/index.sqlite")


def spoil_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()


@pytest.mark.parametrize(
    ("spoil", "is_told"),
    [
        (spoil_pages, True),
        (lambda path: change(path, "PRAGMA user_version = 99"), True),
        (lambda path: change(path, "CREATE TRIGGER t AFTER DELETE ON runs BEGIN DELETE FROM keys; END"), True),
        (lambda path: change(path, "ALTER TABLE runs ADD COLUMN more TEXT"), True),
        (lambda path: path.write_bytes(b""), False),
    ],
    ids=["pages", "version", "trigger", "column", "empty"],
)
def test_an_index_that_cannot_be_used_is_begun_anew(tmp_path: Path, spoil: Any, is_told: bool) -> None:
    write_run(tmp_path / "a")
    update(tmp_path)
    digest, path = compute_digest(tmp_path), tmp_path / "index.sqlite"
    spoil(path)
    with collect_messages() as said:
        assert update(tmp_path).read == 1
    # An empty file is what a process leaves that was killed as it began.
    assert [message.partition(":")[0] for message in said] == [f"{path} is begun anew"] * is_told
    assert compute_digest(tmp_path) == digest
    with closing(sqlite3.connect(path)) as database:
        statements = [row[0] for row in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        assert sorted(statements) == sorted(SCHEMA)


def test_damage_that_shows_late_is_a_sentence(tmp_path: Path) -> None:
    for number in range(20):
        write_run(tmp_path / f"r{number}", losses=[1.0] * 100)
    update(tmp_path)
    path = tmp_path / "index.sqlite"
    content = bytearray(path.read_bytes())
    # The schema is whole, and all pages behind it are not.
    content[4096 * 7 :] = b"\x5a" * (len(content) - 4096 * 7)
    path.write_bytes(content)
    for number in range(20):
        shutil.rmtree(tmp_path / f"r{number}")
    with pytest.raises(HeadwayError, match=r"the index cannot be used .*Delete it: the next update builds it"):
        update(tmp_path)
    path.unlink()
    assert update(tmp_path).runs == 0


def test_a_store_of_mlflow_lies_beside_run_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_mlruns(tmp_path / "mlruns", "0" * 32)
    found = {one.name: one for one in list_runs(tmp_path, columns=("lr", "accuracy"))}
    assert {name: one.kind for name, one in found.items()} == {"a": "run", "bold-cat": "mlflow"}
    assert found["bold-cat"].values["lr"] == (0.01, "1e-2")
