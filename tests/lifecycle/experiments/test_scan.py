"""Which folders are runs, and where an index lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.core.errors import UsageError
from headway.lifecycle.experiments import scan
from headway.lifecycle.experiments.record import RunReadError
from headway.lifecycle.experiments.scan import find_index, scan_folders
from headway.storage.addresses import get_cache_folder

from ._runs import write_ensemble, write_mlflow_database, write_mlruns, write_run


def find(*folders: Path) -> list[Path]:
    return sorted(path for store in scan_folders(folders).stores for path in store.list_runs())


def test_runs_are_found_at_any_depth(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "sweep/trials/0", "sweep/trials/1", "team/ann/b")]
    runs.append(write_ensemble(tmp_path / "e"))
    # A sweep's winner has a recipe with its provenance, and is no run; neither are files below a run.
    (tmp_path / "sweep/winner").mkdir()
    for name in ("recipe.yaml", "provenance.json"):
        (tmp_path / "sweep/winner" / name).write_text("{}")
    write_run(tmp_path / "a/checkpoints/inner")
    write_run(tmp_path / ".trash/hidden")
    assert find(tmp_path) == sorted(runs)
    assert find(tmp_path / "sweep", tmp_path / "a") == [runs[0], *runs[1:3]]
    # The same folder twice, and one inside another.
    assert find(tmp_path, tmp_path, tmp_path / "sweep") == sorted(runs)


def test_links_to_runs_are_followed_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/a")
    elsewhere = write_run(tmp_path / "disk/b")
    (tmp_path / "runs/b").symlink_to(elsewhere)
    (tmp_path / "runs/latest").symlink_to(run)
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    assert find(tmp_path / "runs") == [run, tmp_path / "runs/b"]


def test_a_folder_that_is_no_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no such folder of runs"):
        scan_folders([tmp_path / "nowhere"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"runs: there is no such folder of runs. Name one: headway runs FOLDER."):
        scan_folders([])
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="this file is not a database of MLflow's runs"):
        scan_folders([tmp_path / "file"])
    assert find(tmp_path) == []
    monkeypatch.setattr(scan, "MOST_FOLDERS", 3)
    for name in "abcd":
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="more than 3 folders below it"):
        scan_folders([tmp_path])


def test_where_the_index_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "runs/a")
    database = write_mlflow_database(tmp_path / "mlflow.db", [])
    assert find_index([tmp_path / "runs"]) == tmp_path / "runs/index.sqlite"
    # A run's folder is not written to.
    assert find_index([run, tmp_path]) == tmp_path / "runs/index.sqlite"
    # Nothing is written into stores of MLflow, nor beside them.
    write_mlruns(tmp_path / "mlruns", "c" * 32)
    stores = [database, tmp_path / "mlruns", tmp_path / "mlruns/1", tmp_path / "mlruns/1" / ("c" * 32)]
    places = {find_index([store]) for store in stores}
    assert len(places) == len(stores)
    assert {place.parent for place in places} == {get_cache_folder() / "indexes"}
    assert find_index([database, tmp_path / "runs"]) == tmp_path / "runs/index.sqlite"
    monkeypatch.chdir(tmp_path)
    assert find_index([]) == tmp_path / "runs/index.sqlite"


def test_chosen_runs_are_read_from_their_stores(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    write_mlruns(tmp_path / "mlruns", "c" * 32)
    found = scan_folders([tmp_path])
    wanted = [tmp_path / "a", tmp_path / "mlruns/1" / ("c" * 32)]
    assert [path for path, _ in found.read_runs(wanted)] == wanted
    os.remove(tmp_path / "a/provenance.json")
    with pytest.raises(RunReadError, match=r"the run has no provenance.json"):
        list(found.read_runs(wanted))
