"""The verbs `headway dataset ...`: a walk through all of them, and what each refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests._support import headway, refused
from tests.lifecycle.store._pictures import classes, write

from headway.lifecycle.store.label_list import read_labels


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_STORE", str(tmp_path / "store"))
    return classes(tmp_path / "images", 4)


def test_a_walk_through_all_verbs(images: Path, tmp_path: Path) -> None:
    made = headway("dataset", "create", "pets", "--splits", "train=0.5,eval=0.5", "--license", "CC0", "--by", "anna")
    assert "Created store:pets@v0" in made.out
    assert "store:pets@v1" in headway("dataset", "add", "pets", images, "-m", "first pictures").out
    assert "Left out 8 that are there already" in headway("dataset", "add", "pets", images).out
    packing = refused("pack", "store:pets@v1", tmp_path / "packed", "--split", "0.1", status=2)
    assert "or pack store:pets@v1/train alone" in packing
    (tmp_path / "labels.csv").write_text("name,label,by\ncat/1.png,dog,ben\ncat/2.png,,\n")
    done = headway("dataset", "label", "pets", "cat/0.png=dog", "--list", tmp_path / "labels.csv", "--json").json()
    assert (done["number"], done["relabelled"], done["moved"]) == (2, 3, 1)
    assert "3 relabelled" in headway("dataset", "diff", "pets@v1", "pets").out
    assert "store:pets@gold now" in headway("dataset", "tag", "pets@v1", "gold").out
    headway("dataset", "create", "fork", "--from", "pets@gold")
    headway("dataset", "label", "fork", "cat/0.png=cow")
    assert "has 'cow' in" in refused("dataset", "merge", "pets", "fork", status=1)
    assert "store:pets@v3" in headway("dataset", "merge", "pets", "fork", "--prefer", "theirs").out
    (tmp_path / "gone.jsonl").write_text('{"path": "dog/0.png", "score": 0.5}\n')
    headway("dataset", "remove", "pets", "dog/1.png", "--list", tmp_path / "gone.jsonl")
    log = headway("dataset", "log", "pets").out.splitlines()
    assert [line.split()[0] for line in log] == ["v4", "v3", "v2", "v1", "v0"]
    assert "v1 [gold]" in log[3]
    assert "first pictures" in log[3]
    assert set(headway("dataset", "log").out.split()) >= {"store:pets@v4", "store:fork@v1"}
    shown = headway("dataset", "show", "pets").out
    assert "6 samples" in shown
    assert "license: CC0" in shown
    assert "unlabelled: 1" in shown
    samples = headway("dataset", "show", "pets", "--samples").out.splitlines()
    assert len(samples) == 6
    assert "ben: 1" in headway("dataset", "show", "pets@v2", "--setters").out
    assert "Every shard and version is intact" in headway("dataset", "verify").out
    assert headway("dataset", "gc", "--keep", "1", "--grace-hours", "0", "--dry-run").out.startswith("Would remove")
    assert "Removed" in headway("dataset", "gc", "--keep", "1", "--grace-hours", "0").out
    for shard in (tmp_path / "store/objects").rglob("*.rec"):
        shard.chmod(0o600)
        shard.write_bytes(shard.read_bytes()[:-30])
    headway("dataset", "verify", status=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("picks.csv", "name,label,proposed,arm\ncat/0.png,,dog,margin\ncat/1.png,dog,dog,random\n"),
        (
            "picks.jsonl",
            '{"name": "cat/0.png", "label": "", "proposed": "dog", "arm": "margin"}\n'
            '{"name": "cat/1.png", "label": "dog", "proposed": "dog", "arm": null}\n',
        ),
    ],
)
def test_a_list_of_picks_takes_no_label_away(tmp_path: Path, name: str, text: str) -> None:
    """Somebody may have labelled an image elsewhere since it was picked. Other lists with an empty label take it."""
    (tmp_path / name).write_text(text)
    (change,) = read_labels(tmp_path / name)
    assert (change.name, change.label) == ("cat/1.png", "dog")
    (tmp_path / "labels.csv").write_text("name,label,arm\ncat/0.png,,margin\n")
    (change,) = read_labels(tmp_path / "labels.csv")
    assert (change.name, change.label) == ("cat/0.png", None)


def test_a_new_class_is_named(images: Path) -> None:
    """A slip in a label makes a class. The first labels of a data set are all new, so none is named."""
    headway("dataset", "create", "pets")
    assert "new class" not in headway("dataset", "add", "pets", images).err
    said = headway("dataset", "label", "pets", "cat/1.png=catt", "dog/1.png=bird").err
    assert "'catt' is a new class of pets. Did you mean 'cat'?" in said
    assert "'bird' is a new class of pets.\n" in said
    assert "new class" not in headway("dataset", "label", "pets", "cat/1.png=cat").err
    missing = refused("dataset", "label", "pets", "cat/0.png=dog", "w=dog", "x=dog", "y=dog", "z=dog", status=2)
    assert "no sample 'w', 'x', 'y', and 1 more" in missing


def test_an_address_names_the_store(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_STORE")
    headway("dataset", "create", "pets", "--store", tmp_path / "other")
    headway("dataset", "add", f"store:{tmp_path}/other//pets", images)
    assert "8 samples" in headway("dataset", "show", f"store:{tmp_path}/other//pets@v1").out
    message = refused("dataset", "show", f"store:{tmp_path}/other//pets", "--store", tmp_path, status=2)
    assert "both name a store" in message
    assert "no store is named" in refused("dataset", "log", status=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["create", "pets"], "already"),
        (["create", "a/b"], "cannot be the name of a data set"),
        (["create", "new", "--splits", "train"], "no splits"),
        (["create", "new", "--splits", "train=x"], "no splits"),
        (["create", "new", "--splits", "train=0.5,train=0.5"], "no splits"),
        (["add", "pet", "."], "Did you mean 'pets'?"),
        (["add", "pets", "absent"], "absent"),
        (["add", "pets", "images", "--expect", "v0"], "not 281586c095e0"),
        (["label", "pets"], "no label is given"),
        (["label", "pets", "cat"], "no label"),
        (["label", "pets", "x=cat"], "no sample 'x'"),
        (["label", "pets", "--list", "absent.csv"], "cannot be read"),
        (["remove", "pets"], "no sample is named"),
        (["show", "pets@v9"], "no version or tag 'v9'"),
        (["show", "pets", "--samples", "--setters"], "cannot be combined"),
        (["diff", "pets", "pets@v9"], "no version or tag"),
        (["merge", "pets", "pets@v0", "--prefer", "mine"], "is no side"),
        (["tag", "pets", "v7"], "cannot be a tag"),
        (["gc", "--keep", "0"], "Keep at least 1"),
    ],
)
def test_what_cannot_be_done_is_said(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    headway("dataset", "create", "pets")
    headway("dataset", "add", "pets", write(tmp_path / "first", {"cow/1.png": 77}))
    assert sentence in refused("dataset", *arguments, status=1 if "--expect" in arguments else 2)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "name\ncat/0.png\n", "there is no label"),
        ("a.csv", "name;label\ncat/0.png;cat\n", "Separate the columns with commas"),
        ("a.csv", "file,label\ncat/0.png,cat\n", "no sample is named"),
        ("a.csv", "name,label\ncat/0.png,cat,dog\n", "the line has 3 fields and the header 2"),
        ("a.csv", "name,label\ncat/0.png\n", "the line has 1 fields and the header 2"),
        ("a.csv", 'name,label\n"cat/0.png,cat\n', "not valid CSV"),
        ("a.jsonl", "[]\n", "this is not a JSON object"),
        ("a.jsonl", '{"name": 3, "label": "cat"}\n', "names and labels are texts"),
        ("a.jsonl", '{"name": "a"}\n', "there is no label"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(
    images: Path, tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    headway("dataset", "create", "pets")
    (tmp_path / name).write_text(text)
    message = refused("dataset", "label", "pets", "--list", tmp_path / name, status=1)
    assert sentence in message
    assert f"{name}, line" in message
