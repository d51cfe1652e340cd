"""Annotations of samples: kept as they came, part of what a version is, and nothing where there are none."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests._support import headway as run_headway
from tests._support import refused
from tests.lifecycle.store._pictures import addition, classes

import headway
from headway.core.errors import DataError, UsageError
from headway.core.untrusted_json import DEPTH
from headway.lifecycle.store.annotations import MAX_BYTES
from headway.lifecycle.store.records import Change, MergeConflictError, Sample
from headway.lifecycle.store.store import Store

BOXES: dict[str, Any] = {"boxes": [{"label": "ear", "xywh": [0, 1.5, 2, 1]}, {"label": "Ohr ü", "form": None}]}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.make(tmp_path / "store")
    store.create("pets")
    store.add("pets", classes(tmp_path / "images", 3))
    return store


def find(store: Store, name: str, address: str = "pets") -> Sample:
    return next(one for one in store.list_samples(address) if one.name == name)


def annotate(name: str, annotations: dict[str, Any] | None, label: str = "cat") -> Change:
    return Change(operation="label", name=name, label=label, annotations=annotations)


def test_annotations_come_back_as_they_came(store: Store, tmp_path: Path) -> None:
    first = store.resolve("pets")
    outcome = store.apply("pets", [annotate("cat/0.png", BOXES)])
    assert {kind: count for kind, count in outcome.version.counts.items() if count} == {"annotated": 1}
    assert find(store, "cat/0.png").annotations == BOXES
    assert find(store, "cat/1.png").annotations is None
    assert find(store, "cat/0.png", "pets@v1").annotations is None
    # A label alone leaves them, and an empty object takes them away.
    store.label("pets", {"cat/0.png": "dog"})
    assert find(store, "cat/0.png").annotations == BOXES
    store.label("pets", {"cat/0.png": None})
    assert find(store, "cat/0.png").annotations == BOXES
    back = store.apply("pets", [annotate("cat/0.png", {})])
    assert find(store, "cat/0.png").annotations is None
    # Nothing is left behind: the content is that of the beginning.
    assert back.version.version == first.version
    added = store.apply("pets", [addition(tmp_path, "new.png", 77, annotations=BOXES), addition(tmp_path, "n.png", 78)])
    assert added.version.counts["added"] == 2
    assert find(store, "new.png").annotations == BOXES
    assert store.summarise("pets").annotated == 1
    assert store.verify() == []


def test_equal_annotations_have_equal_versions_and_a_difference_can_be_undone(store: Store) -> None:
    store.create("other", start="pets")
    keys = {"b": 1, "a": [BOXES]}
    one = store.apply("pets", [annotate("cat/0.png", keys)])
    other = store.apply("other", [annotate("cat/0.png", dict(sorted(keys.items())))])
    assert one.version.version == other.version.version
    difference = store.diff("pets@v1", "pets")
    assert difference.counts == dict(one.version.counts)
    assert [after.annotations for _, after in difference.annotated] == [keys]
    undone = store.apply("pets", difference.invert().to_changes())
    assert undone.version.version == store.resolve("pets@v1").version
    assert store.apply("pets", difference.to_changes()).version.version == one.version.version
    # Removed and added again: the difference has all of it.
    gone = store.remove("pets", ["cat/0.png"])
    back = store.apply("pets", store.diff(f"pets@v{gone.version.number}", "pets@v2").to_changes())
    assert back.version.version == one.version.version


def test_a_version_with_annotations_opens_as_any_other(store: Store) -> None:
    before = store.resolve("pets")
    everything = [
        Change(operation="label", sample=one.sample, label=one.label, annotations=BOXES)
        for one in store.list_samples("pets")
    ]
    store.apply("pets", everything)
    addresses = (f"store:{store.folder}//pets", f"store:{store.folder}//pets@{before.version}")
    with closing(headway.open(addresses[0])) as now, closing(headway.open(addresses[1])) as old:
        assert now.label.tolist() == old.label.tolist()
        assert now.description.fingerprint != old.description.fingerprint
        assert bytes(now.read([0])[0]) == bytes(old.read([0])[0])
    assert run_headway("verify", f"store:{store.folder}//pets").status == 0


def test_merging_takes_the_annotations_of_one_side_and_lists_conflicts(store: Store) -> None:
    store.create("anna", start="pets")
    store.apply("anna", [annotate("cat/0.png", BOXES)])
    store.label("pets", {"cat/0.png": "cow"})
    store.merge("pets", "anna")
    merged = find(store, "cat/0.png")
    assert (merged.label, merged.annotations) == ("cow", BOXES)
    store.apply("anna", [annotate("cat/1.png", {"boxes": [1]})])
    store.apply("pets", [annotate("cat/1.png", {"boxes": [2]})])
    with pytest.raises(MergeConflictError) as caught:
        store.merge("pets", "anna")
    assert [one.ours.name for one in caught.value.conflicts if one.ours] == ["cat/1.png"]
    store.merge("pets", "anna", prefer="theirs")
    assert find(store, "cat/1.png").annotations == {"boxes": [1]}


def test_a_copy_with_other_annotations_is_named(store: Store, tmp_path: Path) -> None:
    copy = addition(tmp_path, "copy.png", 0, annotations=BOXES)
    outcome = store.apply("pets", [copy])
    assert "other annotations" in outcome.rejected[0].reason
    store.apply("pets", [annotate("cat/0.png", BOXES)])
    assert len(store.apply("pets", [copy]).duplicates) == 1
    assert len(store.apply("pets", [addition(tmp_path, "copy.png", 0)]).duplicates) == 1


@pytest.mark.parametrize("wrong", ["nan", "set", "twice", "long", "deep"])
def test_what_cannot_be_kept_is_refused(store: Store, wrong: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(DEPTH + 1):
        deep = {"a": deep}
    values: dict[str, dict[Any, Any]] = {
        "nan": {"a": math.nan},
        "set": {"a": {1, 2}},
        "twice": {1: 2, "1": 3},
        "long": {"a": "b" * MAX_BYTES},
        "deep": deep,
    }
    with pytest.raises(UsageError, match="annotations"):
        store.apply("pets", [annotate("cat/0.png", values[wrong])])
    with pytest.raises(UsageError, match="move"):
        Change(operation="move", name="cat/0.png", split="eval", annotations=BOXES)


def test_damaged_annotations_are_noticed(store: Store) -> None:
    outcome = store.apply("pets", [annotate(one.name, BOXES, str(one.label)) for one in store.list_samples("pets")])
    path = store.folder / "versions" / outcome.version.version / "train/columns.safetensors"
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data.replace(b'"boxes"', b'"boxes '))
    assert any("fingerprint" in one.reason for one in store.verify())
    with pytest.raises(DataError, match="damaged"):
        list(Store(store.folder).list_samples("pets"))
    columns = load_file(path)
    del columns["annotations_offset"]
    save_file(columns, path)
    with pytest.raises(DataError):
        Store(store.folder).read_rows("pets")


def test_lists_and_the_command_line(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_STORE", str(store.folder))
    lines = [
        {"name": "cat/0.png", "label": "cat", "annotations": BOXES},
        {"name": "cat/1.png", "label": "dog", "annotations": None},
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = json.dumps({"boxes": [3]}).replace('"', '""')
    (tmp_path / "labels.csv").write_text(f'name,label,annotations\ncat/2.png,cat,"{text}"\n')
    done = run_headway("dataset", "label", "pets", "--list", tmp_path / "labels.jsonl", "--json").json()
    assert (done["annotated"], done["relabelled"]) == (1, 1)
    run_headway("dataset", "label", "pets", "--list", tmp_path / "labels.csv")
    assert find(store, "cat/0.png").annotations == BOXES
    assert find(store, "cat/2.png").annotations == {"boxes": [3]}
    assert "with annotations: 2" in run_headway("dataset", "show", "pets").out
    shown = run_headway("dataset", "show", "pets", "--samples").out.splitlines()
    assert sum("boxes" in line for line in shown) == 2
    assert "other annotations" in run_headway("dataset", "diff", "pets@v1", "pets").out
    (tmp_path / "labels.csv").write_text("name,label,annotations\ncat/2.png,cat,no json\n")
    assert "line 2" in refused("dataset", "label", "pets", "--list", tmp_path / "labels.csv", status=1)
