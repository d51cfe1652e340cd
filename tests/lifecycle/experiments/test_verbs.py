"""`headway index` and `headway runs` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests._support import headway, refused

from ._runs import write_mlflow_database, write_mlruns, write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two runs in `runs`."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", lr=0.1)
    write_run(tmp_path / "runs/b", lr=0.01, summary={"finished": True, "accuracy": 0.95, "seconds": 3.0})
    return tmp_path


def test_index_says_what_it_found(folder: Path) -> None:
    path = folder / "runs/index.sqlite"
    assert headway("index").out == f"{path} has 2 runs: 2 new or changed, 0 gone.\n"
    assert headway("index", "runs", "--json").json() == {
        "index": str(path), "runs": 2, "read": 0, "gone": 0, "damaged": []
    }  # fmt: skip
    (folder / "runs/b/summary.json").write_text("{\x1b[31m")
    said = headway("index").out
    assert f"Left out {folder}/runs/b: summary.json is damaged" in said
    assert "\x1b" not in said
    path.unlink()
    assert headway("index", "--index", "elsewhere.sqlite", "--json").json()["read"] == 2
    assert not path.exists()


def test_runs_lists_filters_and_sorts(folder: Path) -> None:
    head, first, second = headway("runs").out.splitlines()
    assert head.split() == ["run", "state", "started", "accuracy", "seconds"]
    assert [first.split()[0], second.split()[0]] == ["a", "b"]
    chosen = headway("runs", "runs", "--where", "optimizer.lr<0.1", "--columns", "optimizer.lr,batch", "--json").json()
    (run,) = chosen["runs"]
    assert run == {
        "run": str(folder / "runs/b"),
        "kind": "run",
        "name": "b",
        "state": "finished",
        "started": 1795852857.0,
        "values": {"optimizer.lr": 0.01, "batch": 32.0},
    }
    assert (chosen["damaged"], chosen["page"], chosen["mlflow"]) == ([], None, None)
    best = headway("runs", "--sort", "accuracy", "--descending", "--limit", "1", "--json").json()
    assert [one["name"] for one in best["runs"]] == ["b"]
    assert headway("runs", "--where", "name=x").out == "No run fulfils these conditions.\n"
    keys = {one["key"]: one for one in headway("runs", "--keys", "--json").json()}
    assert keys["recipe.optimizer.lr"] == {"key": "recipe.optimizer.lr", "runs": 2, "different": 2}
    assert "metric.train/loss" in headway("runs", "--keys").out


def test_runs_writes_a_page_and_files_for_mlflow(folder: Path) -> None:
    said = headway("runs", "--page", "page.html", "--curves", "train/loss", "--mlflow", "out", "--experiment", "digits")
    assert "Wrote page.html." in said.err
    assert "Wrote 2 runs to out." in said.err
    assert "train/loss" in (folder / "page.html").read_text()
    assert json.loads((folder / "out/experiment.json").read_text())["mlflow"]["experiment"]["name"] == "digits"
    # What was written can be listed, beside the stores of MLflow.
    write_mlruns(folder / "mlruns", "a" * 32)
    database = write_mlflow_database(folder / "mlflow.db", ["b" * 32])
    listed = headway("runs", "runs", "out", "mlruns", database, "--json").json()["runs"]
    assert sorted((one["kind"], one["name"]) for one in listed) == [
        ("mlflow", "a"), ("mlflow", "b"), ("mlflow", "bold-cat"), ("mlflow", "bold-cat"), ("run", "a"), ("run", "b")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "lr"], "'lr' is not a condition"),
        (["--where", "optimizer.rl=1"], "no run has the key 'optimizer.rl'. Did you mean 'optimizer.lr'?"),
        (["--curves", "train/loss"], "--curves belongs to --page. Add --page, or leave it out."),
        (["--experiment", "x"], "--experiment belongs to --mlflow"),
        (["--descending"], "--descending belongs to --sort"),
        (["--keys", "--limit", "3"], "--limit would do nothing beside --keys"),
        (["--page", "nowhere/page.html"], "nothing can be written there"),
        (["--mlflow", "runs"], "this folder is not empty. Name another one with --mlflow."),
        (["nowhere"], "nowhere: there is no such folder of runs"),
        (["--index", "runs/a/recipe.yaml"], "this file is not an index of Headway"),
    ],
)
def test_wrong_use_is_a_sentence(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused("runs", *arguments, status=2)


def test_an_index_is_not_written_where_nothing_may_be(folder: Path) -> None:
    assert "there is no such folder for an index" in refused("index", "--index", "nowhere/index.sqlite", status=2)
    assert "this file is not a database of MLflow's runs" in refused("runs", "runs/a/recipe.yaml", status=2)
