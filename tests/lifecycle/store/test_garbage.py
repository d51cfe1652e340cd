"""Garbage: what a name leads to stays, what is young stays, and everything else goes."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.lifecycle.store._pictures import addition, classes, draw, state

import headway
from headway.core.errors import DataError, UsageError
from headway.core.recipe import build_recipe
from headway.data import store_pins
from headway.lifecycle.store import garbage
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.shard_objects import stage
from headway.lifecycle.store.store import Store
from headway.setup.recipe import TrainRecipe
from headway.setup.versions import pin_versions


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.make(tmp_path / "store")
    store.create("pets")
    return store


def files(store: Store) -> set[Path]:
    return {path for name in ("objects", "versions") for path in (store.folder / name).rglob("*") if path.is_file()}


def age(store: Store, seconds: float) -> None:
    """Makes everything look older."""
    when = time.time() - seconds
    for path in store.folder.rglob("*"):
        if path.name != "store.db":
            os.utime(path, (when, when))


def test_everything_with_a_name_stays(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"))
    store.remove("pets", [f"cat/{number}.png" for number in range(6)])
    before = files(store)
    age(store, 1e6)
    result = store.collect_garbage()
    assert (result.versions, result.shards, result.bytes) == ((), 0, 0)
    assert files(store) == before


def test_old_versions_go_when_asked_for_and_tagged_ones_stay(store: Store, tmp_path: Path) -> None:
    for number in range(5):
        store.apply("pets", [addition(tmp_path, f"{number}.png", number)])
    store.remove("pets", ["1.png"])
    store.tag("pets@v1", "gold")
    kept = {store.resolve(f"pets@{version}").version for version in ("v1", "v5", "v6")}
    age(store, 1e6)
    would = store.collect_garbage(keep=2, dry_run=True)
    done = store.collect_garbage(keep=2)
    assert would == done
    assert {path.name for path in (store.folder / "versions").iterdir()} == kept
    # v5 still has the image that v6 has removed.
    assert done.shards == 0
    last = store.collect_garbage(keep=1)
    # The shard of 1.png goes with the last version that has it.
    assert (last.versions, last.shards) == ((store.resolve("pets@v5").version,), 1)
    assert len(state(store, "pets@gold")) == 1
    assert store.verify() == []
    with pytest.raises(DataError, match="collected as garbage"):
        store.diff("pets@v2", "pets")
    # The bytes are gone, so they must come again.
    again = Change(operation="add", name="x", label="cat", sample=hashlib.sha256(draw(1)).hexdigest())
    with pytest.raises(UsageError, match="no bytes with the ID"):
        store.apply("pets", [again])


def test_a_run_keeps_its_versions_as_long_as_its_folder_is_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [store.apply("pets", [addition(tmp_path, f"{n}.png", n)]).version.version for n in range(4)]
    (tmp_path / "run").mkdir()
    store_pins.write_pin(store.folder, tmp_path / "run", [versions[0], versions[1], versions[3]])
    # A run of another machine cannot be seen from here.
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    store_pins.write_pin(store.folder, tmp_path / "far", [versions[2]])
    monkeypatch.undo()
    (store.folder / "pins/bad.json").write_text('{"run": "/", "host": "x", "versions": ["../.."]}')
    age(store, 1e6)
    result = store.collect_garbage(keep=1)
    assert (result.pinned, len(result.versions)) == (3, 1)
    assert result.describe(dry_run=False).endswith("Kept 3 older versions that runs need.")
    assert len(list((store.folder / "pins").iterdir())) == 2
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert store.collect_garbage(keep=1).pinned == 3
    shutil.rmtree(tmp_path / "renamed")
    assert set(store.collect_garbage(keep=1).versions) == {versions[0], versions[1]}
    age(store, store_pins.UNSEEN_S)
    assert store.collect_garbage(keep=1).versions == (versions[2],)
    assert list((store.folder / "pins").iterdir()) == []


def test_a_run_folder_that_cannot_be_seen_may_be_there(store: Store, tmp_path: Path) -> None:
    version = store.apply("pets", [addition(tmp_path, "a.png", 1)]).version.version
    store.remove("pets", ["a.png"])
    (tmp_path / "disk/runs/run").mkdir(parents=True)
    store_pins.write_pin(store.folder, tmp_path / "disk/runs/run", [version])
    # The disk is not mounted, or does not answer.
    (tmp_path / "disk/runs").rename(tmp_path / "away")
    age(store, 1e6)
    assert store.collect_garbage(keep=1).pinned == 1
    (tmp_path / "disk/runs").symlink_to("runs")
    age(store, store_pins.UNSEEN_S)
    assert store.collect_garbage(keep=1).pinned == 1
    # The pin of another user.
    (store.folder / "pins/other.json").mkdir()
    with pytest.raises(DataError, match="Until then nothing is removed"):
        store.collect_garbage(keep=1)
    (store.folder / "pins/other.json").rmdir()
    (tmp_path / "disk/runs").unlink()
    assert version in store.collect_garbage(keep=1).versions


def test_a_run_that_begins_keeps_its_version_until_it_pins_it(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1, split="train")])
    store.remove("pets", ["a.png"])
    age(store, 1e6)
    tree = {"data": {"train": f"store:{store.folder}//pets@v1"}, "model": {"factory": "headway.model:small_net"}}
    more = {"optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1, "batch": 1}
    pin_versions(build_recipe(tree | more, (), TrainRecipe))
    store.collect_garbage(keep=1)
    assert list(state(store, "pets@v1")) == ["a.png"]


def test_what_is_young_stays_and_leftovers_go(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    store.remove("pets", ["a.png"])
    dead = store.folder / "staging/abc"
    dead.mkdir(parents=True)
    with stage(store.folder) as alive:
        assert store.collect_garbage(keep=1).versions == ()
        age(store, 3600)
        assert store.collect_garbage(keep=1).versions == ()
        result = store.collect_garbage(keep=1, grace_s=60)
        assert len(result.versions) == 1
        assert (result.shards, result.staging) == (1, 1)
        assert alive.is_dir()
    assert not alive.exists()
    assert not dead.exists()
    with pytest.raises(UsageError, match="Keep at least 1"):
        store.collect_garbage(keep=0)


def test_a_version_that_cannot_be_read_stops_it(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1, split="train")])
    before = files(store)
    columns = store.folder / "versions" / store.resolve("pets").version / "train/columns.safetensors"
    data = columns.read_bytes()
    columns.unlink()
    age(store, 1e6)
    with pytest.raises(DataError, match="Until then nothing is removed"):
        store.collect_garbage(keep=1)
    columns.write_bytes(data)
    assert files(store) == before


def test_a_run_goes_on_with_a_version_that_is_collected(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"), split="train")
    with closing(headway.open(f"store:{store.folder}//pets")) as dataset:
        before = [bytes(record) for record in dataset.read(range(12))]
        store.remove("pets", [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(6)])
        age(store, 1e6)
        # The newest version is empty, and so is the one that the data set began with.
        assert len(store.collect_garbage(keep=1).versions) == 1
        assert [bytes(record) for record in dataset.read(range(12))] == before


def test_data_sets_that_began_with_an_old_version_can_still_be_merged(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"), by="robot")
    store.create("anna", start="pets")
    for number in range(3):
        store.label("pets", {f"cat/{number}.png": "cow"}, by="ben")
        store.label("anna", {f"dog/{number}.png": "fox"}, by="anna")
    age(store, 1e6)
    # Neither v1 of pets, with which anna began, nor what lies between is among the newest.
    assert len(store.collect_garbage(keep=1).versions) == 5
    assert store.merge("pets", "anna").version.counts["relabelled"] == 3
    labels = [label for label, *_ in state(store, "pets").values()]
    assert (labels.count("cow"), labels.count("fox")) == (3, 3)
    # Who set labels before the versions that are left is not known any more.
    assert store.count_setters("pets")["unknown"] > 0
    assert sum(store.count_setters("pets").values()) == 12
    # And again, from the version that was merged.
    age(store, 1e6)
    store.collect_garbage(keep=1)
    store.label("anna", {"dog/3.png": "fox"})
    assert store.merge("pets", "anna").version.counts["relabelled"] == 1


def test_changes_go_on_while_columns_are_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("pets", classes(tmp_path / "images"), split="train")
    store.remove("pets", ["cat/0.png"])
    age(store, 1e6)
    read, made = garbage._list_shards, []

    def commit(folder: Path) -> set[str]:
        if not made:
            made.append(store.apply("pets", [addition(tmp_path, "new.png", 99)]).version)
            # The old version has a name again.
            made.append(store.tag("pets@v1", "gold"))
        return read(folder)

    monkeypatch.setattr(garbage, "_list_shards", commit)
    result = store.collect_garbage(keep=1)
    assert store.resolve("pets@v2").version in result.versions
    assert len(state(store, "pets@gold")) == 12
    assert "new.png" in state(store, "pets")
    assert store.verify() == []


def test_nothing_begins_with_a_version_that_is_gone(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"))
    store.label("pets", {"cat/0.png": "dog"})
    age(store, 1e6)
    store.collect_garbage(keep=1)
    with pytest.raises(DataError, match="collected as garbage"):
        store.create("anna", start="pets@v1")
    assert list(store.list_datasets()) == ["pets"]
