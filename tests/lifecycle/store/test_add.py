"""Additions: from folders, lists and packs; copies, taken names, bad files, no labels, and who set labels."""

from __future__ import annotations

import hashlib
import unicodedata
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.lifecycle.store._pictures import addition, classes, draw, draw_colour, state, write

import headway
from headway.core.errors import DataError, UsageError
from headway.data.store_address import UNLABELLED
from headway.lifecycle.store import compaction
from headway.lifecycle.store.records import KINDS, Change, StaleVersionError
from headway.lifecycle.store.rows import Names
from headway.lifecycle.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.make(tmp_path / "store")
    store.create("pets")
    return store


def test_a_folder_a_list_and_a_pack_give_one_version(store: Store, tmp_path: Path) -> None:
    folder = classes(tmp_path / "images")
    lines = "".join(f"{path.relative_to(folder)},{path.parent.name}\n" for path in sorted(folder.rglob("*.png")))
    (folder / "list.csv").write_text(f"path,label\n{lines}")
    headway.pack(folder, tmp_path / "packed", mode="keep")
    headway.pack(folder, tmp_path / "tar", mode="keep", format="tar")
    versions = set()
    for number, source in enumerate((folder / "list.csv", folder, tmp_path / "packed", tmp_path / "tar")):
        store.create(f"from-{number}")
        versions.add(store.add(f"from-{number}", source).version.version)
    assert len(versions) == 1
    found = state(store, "from-0")
    for name, (label, _, sample) in found.items():
        assert label == name.partition("/")[0]
        assert sample == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert store.read_image("from-1", name) == (folder / name).read_bytes()
    assert store.verify() == []


def test_the_shards_of_a_pack_are_taken_as_they_are(store: Store, tmp_path: Path) -> None:
    headway.pack(classes(tmp_path / "images"), tmp_path / "packed", mode="keep")
    store.add("pets", tmp_path / "packed")
    (shard,) = (store.folder / "objects").rglob("*.rec")
    assert shard.read_bytes() == (tmp_path / "packed/shard-00000.rec").read_bytes()
    # Nothing else was written, and a second data set shares it.
    store.create("others")
    store.add("others", tmp_path / "packed", split="eval")
    assert list((store.folder / "objects").rglob("*.rec")) == [shard]
    assert {split for _, split, _ in state(store, "others").values()} == {"eval"}


def test_a_damaged_pack_is_refused(store: Store, tmp_path: Path) -> None:
    headway.pack(classes(tmp_path / "images"), tmp_path / "packed", mode="keep")
    shard = tmp_path / "packed/shard-00000.rec"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="a record is damaged"):
        store.add("pets", tmp_path / "packed")
    assert store.resolve("pets").number == 0
    assert list((store.folder / "staging").iterdir()) == []


def test_a_source_with_two_sets_keeps_them(store: Store, tmp_path: Path) -> None:
    classes(tmp_path / "images/train", 4)
    classes(tmp_path / "images/val", 2, first=50)
    store.add("pets", tmp_path / "images")
    found = state(store, "pets")
    assert {name.partition("/")[0]: split for name, (_, split, _) in found.items()} == {
        "train": "train",
        "eval": "eval",
    }
    assert len(found) == 12
    # A version is such a source too, of the same or another store.
    headway.pack(f"store:{store.folder}//pets", tmp_path / "again", mode="keep")
    with closing(headway.open(tmp_path / "again/eval")) as packed:
        assert len(packed) == 4
    other = Store.make(tmp_path / "other")
    other.create("pets")
    other.add("pets", f"store:{store.folder}//pets")
    assert {sample for *_, sample in state(other, "pets").values()} == {sample for *_, sample in found.values()}


def test_a_copy_stays_where_the_first_one_is(store: Store, tmp_path: Path) -> None:
    names = [f"cat/{number}.png" for number in range(30)]
    store.add("pets", write(tmp_path / "one", {names[0]: 1, "dog/x.png": 99}))
    before = state(store, "pets")
    # The same bytes under many names, some of which would lie in the other split.
    copies = write(
        tmp_path / "two", dict.fromkeys([name.replace("/", "/copy-") for name in names], 1) | {"dog/y.png": 98}
    )
    outcome = store.add("pets", copies)
    assert {first for _, first in outcome.duplicates} == {names[0]}
    assert len(outcome.duplicates) == 30
    assert {name: state(store, "pets")[name] for name in before} == before
    # With another label it is no copy to be left out in silence.
    wrong = store.add("pets", write(tmp_path / "three", {"dog/z.png": 1, "dog/w.png": 97}))
    assert [(one.name, "has the label 'cat'" in one.reason) for one in wrong.rejected] == [("dog/z.png", True)]
    assert wrong.version.counts["added"] == 1


def test_a_taken_name_is_refused_and_a_prefix_helps(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "one", 2))
    other = classes(tmp_path / "two", 2, first=50)
    outcome = store.add("pets", other)
    assert len(outcome.rejected) == 4
    assert "another image has this name" in outcome.rejected[0].reason
    assert not outcome.is_new
    assert store.add("pets", other, prefix="monday/").version.counts["added"] == 4
    assert "monday/cat/0.png" in state(store, "pets")


def test_bad_images_are_named_and_the_others_are_added(store: Store, tmp_path: Path) -> None:
    folder = classes(tmp_path / "images", 2)
    (folder / "cat/bad.png").write_bytes(draw(5)[:40])
    (folder / "dog/none.png").write_bytes(b"no image")
    outcome = store.add("pets", folder)
    assert {one.name for one in outcome.rejected} == {"cat/bad.png", "dog/none.png"}
    assert outcome.version.counts["added"] == 4
    (tmp_path / "all/cat").mkdir(parents=True)
    (tmp_path / "all/cat/x.png").write_bytes(b"no image")
    nothing = store.add("pets", tmp_path / "all")
    assert not nothing.is_new
    assert len(nothing.rejected) == 1


def test_images_without_labels_get_them_later(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "pool", {f"{number}.png": number for number in range(12)})
    store.add("pets", folder, unlabelled=True)
    assert {split for _, split, _ in state(store, "pets").values()} == {UNLABELLED}
    with closing(headway.open(f"store:{store.folder}//pets/unlabelled")) as pool:
        assert pool.label.tolist() == [-1] * 12
        names = [pool.name(row) for row in range(6)]
    outcome = store.label("pets", dict.fromkeys(names, "cat"), by="anna")
    assert dict(outcome.version.counts) == dict.fromkeys(KINDS, 0) | {"relabelled": 6, "moved": 6}
    with closing(headway.open(f"store:{store.folder}//pets")) as train:
        assert set(train.label.tolist()) == {0}
    # Their names decide, as if they had come with labels.
    direct = [addition(tmp_path, name, int(name[:-4]), "cat") for name in names]
    store.create("direct")
    store.apply("direct", direct)
    labelled = {name: one for name, one in state(store, "pets").items() if one[0]}
    assert labelled == state(store, "direct")
    store.label("pets", {names[0]: None})
    assert state(store, "pets")[names[0]][:2] == (None, UNLABELLED)


def test_who_set_the_labels(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images", 4), by="robot")
    store.label("pets", {"cat/0.png": "dog", "cat/1.png": "dog"}, by="anna")
    changes = [Change(operation="label", name=f"dog/{number}.png", label="cat", by=by)
               for number, by in ((0, "ben"), (1, ""), (2, "cleo"))]  # fmt: skip
    store.apply("pets", changes, by="anna")
    assert store.count_setters("pets@v1") == {"robot": 8}
    assert store.count_setters("pets") == {"robot": 3, "anna": 3, "ben": 1, "cleo": 1}
    # In a merge the labels stay with those who set them.
    store.create("fork", start="pets@v1")
    store.label("fork", {"cat/3.png": "dog"}, by="dora")
    store.merge("pets", "fork", by="merger")
    assert store.count_setters("pets") == {"robot": 2, "anna": 3, "ben": 1, "cleo": 1, "dora": 1}


def test_labels_copy_no_image(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"))
    before = {path: path.stat().st_mtime_ns for path in (store.folder / "objects").rglob("*") if path.is_file()}
    version = store.label("pets", {"cat/0.png": "dog"}).version
    store.apply("pets", [Change(operation="move", name="cat/1.png", split="eval")])
    after = {path: path.stat().st_mtime_ns for path in (store.folder / "objects").rglob("*") if path.is_file()}
    assert after == before
    assert {path.name for path in (store.folder / "versions" / version.version).rglob("*") if path.is_file()} == {
        "columns.safetensors",
        "manifest.json",
    }
    assert state(store, "pets")["cat/1.png"][1] == "eval"


def test_gray_images_stay_gray_until_a_colour_one_comes(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"), split="train")

    def channels(version: str) -> int:
        with closing(headway.open(f"store:{store.folder}//pets@{version}")) as train:
            return train.description.channels

    (tmp_path / "colour.png").write_bytes(draw_colour(7))
    colour = Change(operation="add", name="c.png", label="cat", file=tmp_path / "colour.png", split="train")
    store.apply("pets", [colour, addition(tmp_path, "g.png", 70, split="train")])
    store.remove("pets", ["c.png"])
    assert [channels(f"v{number}") for number in (1, 2, 3)] == [1, 3, 1]


def test_fixed_classes_refuse_others_before_anything_is_read(store: Store, tmp_path: Path) -> None:
    store.create("fixed", classes=["dog", "cat", "bird"])
    assert store.add("fixed", classes(tmp_path / "images")).version.counts["added"] == 12
    with closing(headway.open(f"store:{store.folder}//fixed")) as train:
        assert train.classes == ("bird", "cat", "dog")
    for use in (
        lambda: store.label("fixed", {"cat/0.png": "cow"}),
        lambda: store.apply("fixed", [Change(operation="add", name="n", label="cow", file=Path("absent"))]),
        lambda: store.add("fixed", write(tmp_path / "cows", {"cow/1.png": 300})),
    ):
        with pytest.raises(UsageError, match="'cow' is not one of the classes"):
            use()
    assert store.resolve("fixed").number == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"operation": "label", "name": "cat/99.png", "label": "cat"}, "no sample 'cat/99.png'"),
        ({"operation": "remove", "sample": "0" * 64}, "no sample '0000"),
        ({"operation": "move", "name": "cat/0.png", "split": "evil"}, "no split 'evil'"),
        ({"operation": "move", "name": "cat/0.png", "split": UNLABELLED}, "has a label, so it cannot be in"),
        ({"operation": "label", "name": "cat/0.png", "label": " "}, "not the name of a class"),
        ({"operation": "add", "name": "../x", "label": "cat", "sample": "0" * 64}, "cannot be the name of a sample"),
        ({"operation": "add", "name": "/x", "label": "cat", "sample": "0" * 64}, "cannot be the name of a sample"),
        ({"operation": "add", "name": "a\nb", "label": "cat", "sample": "0" * 64}, "cannot be the name of a sample"),
        ({"operation": "add", "name": "x", "label": "cat", "sample": "0" * 64}, "no bytes with the ID 0000"),
        ({"operation": "add", "name": "x", "label": "cat", "file": Path("/absent")}, "there is no such file"),
        ({"operation": "add", "name": "x", "label": "cat"}, "needs a name, and a file or an ID"),
        ({"operation": "move", "name": "x"}, "needs a split"),
        ({"operation": "label", "label": "x"}, "names no sample"),
        ({"operation": "label", "sample": "xyz"}, "not the ID of a sample"),
        ({"operation": "turn", "name": "x"}, "is no change"),
    ],
)
def test_impossible_changes_change_nothing(
    store: Store, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    store.apply("pets", [addition(tmp_path, "cat/0.png", 0)])
    with pytest.raises(UsageError, match=sentence):
        store.apply("pets", [Change(operation="label", name="cat/0.png", label="new"), Change(**change)])  # type: ignore[arg-type]
    assert store.resolve("pets").number == 1


def test_an_unexpected_newest_version_is_refused(store: Store, tmp_path: Path) -> None:
    first = store.apply("pets", [addition(tmp_path, "a.png", 0)]).version
    second = store.apply("pets", [addition(tmp_path, "b.png", 1)], expected=first.version).version
    with pytest.raises(StaleVersionError) as caught:
        store.label("pets", {"a.png": "dog"}, expected=first.version)
    assert caught.value.head == second.version


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"mode": "raw"}, "keeps image files"),
        ({"mode": "best"}, "not a mode"),
        ({"splits": {"train": 0.5}}, "do not add up to 1"),
        ({"splits": {"train": 1.5, "eval": -0.5}}, "do not add up to 1"),
        ({"splits": {}}, "there is no split"),
        ({"splits": {"a/b": 1.0}}, "cannot be the name of a split"),
        ({"splits": {"unlabelled": 1.0}}, "split of samples without a label"),
        ({"classes": []}, "no class is named"),
        ({"classes": ["a", "a "]}, "named twice"),
        ({"start": "pets", "classes": ["a"]}, "has its mode, splits and classes"),
        ({"start": "nobody"}, "no data set 'nobody'"),
    ],
)
def test_impossible_facts_create_nothing(store: Store, facts: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        store.create("new", **facts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has a data set 'pets' already"):
        store.create("pets")
    assert list(store.list_datasets()) == ["pets"]


def test_numbers_as_labels_are_refused(store: Store, tmp_path: Path) -> None:
    folder = classes(tmp_path / "images", 1)
    (folder / "list.csv").write_text("path,value\ncat/0.png,1.5\n")
    with pytest.raises(UsageError, match="keeps classes"):
        store.add("pets", folder / "list.csv")


def test_modes_that_encode_give_what_a_pack_gives(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "cat").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(3):
        pixels = generator.integers(0, 255, (40, 60, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"cat/{number}.jpg", quality=90)
    mode = "resize=16,quality=80"
    store.create("small", mode=mode)
    store.add("small", folder)
    headway.pack(folder, tmp_path / "packed", mode=mode)
    with closing(headway.open(tmp_path / "packed")) as packed:
        wanted = {hashlib.sha256(record).hexdigest() for record in packed.read(range(3))}
    assert {sample for *_, sample in state(store, "small").values()} == wanted
    # A pack of that mode has the bytes already.
    assert len(store.add("small", tmp_path / "packed").duplicates) == 3


def test_many_small_additions_make_few_shards(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST_SMALL_SHARDS", 3)
    for number in range(9):
        store.apply("pets", [addition(tmp_path, f"{number}.png", number, split="train")])
    assert store.summarise("pets").shards <= 4
    store.create("once")
    store.apply("once", [addition(tmp_path, f"{number}.png", number, split="train") for number in range(9)])
    assert store.resolve("once").version == store.resolve("pets").version
    with closing(headway.open(f"store:{store.folder}//pets")) as train:
        for record, sample in zip(train.read(range(9)), train.columns["sample_id"], strict=True):
            assert hashlib.sha256(record).digest() == sample.tobytes()
    assert store.verify() == []


def test_a_label_that_comes_again_leaves_the_sample_in_its_split(store: Store, tmp_path: Path) -> None:
    before = store.add("pets", classes(tmp_path / "images"), split="eval").version
    names = [f"cat/{number}.png" for number in range(6)]
    store.label("pets", dict.fromkeys(names))
    assert {state(store, "pets")[name][:2] for name in names} == {(None, UNLABELLED)}
    assert store.label("pets", dict.fromkeys(names, "cat")).version.version == before.version
    # The same by the inverse of the difference, and over a merge.
    without = store.label("pets", {names[0]: None}).version
    back = store.diff("pets@v1", f"pets@v{without.number}").invert()
    assert store.apply("pets", back.to_changes()).version.version == before.version
    store.create("other", start="pets")
    store.label("other", {names[1]: None})
    store.merge("pets", "other")
    assert store.label("pets", {names[1]: "cat"}).version.version == before.version
    # Somebody may say where it goes, and that its name says it.
    store.label("pets", {names[2]: None})
    store.apply("pets", [Change(operation="move", name=names[2], split="train")])
    store.label("pets", {names[2]: "cat"})
    assert state(store, "pets")[names[2]][1] == "train"
    schema = store.read_rows("pets").schema
    store.apply("pets", [Change(operation="label", name=name, label=None, split=UNLABELLED) for name in names])
    assert store.read_rows("pets").planned is None
    store.label("pets", dict.fromkeys(names, "cat"))
    said = schema.choose_splits(names).tolist()
    assert [state(store, "pets")[name][1] for name in names] == [schema.splits[number] for number in said]


def test_images_without_labels_may_have_a_split_to_go_to(store: Store, tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", {f"{number}.png": number for number in range(8)})
    store.add("pets", pool, unlabelled=True, split="eval")
    planned = {one.planned_split for one in store.list_samples("pets")}
    # Where the name says it anyway, nothing is kept.
    assert planned == {"eval", ""}
    store.create("copy")
    store.add("copy", f"store:{store.folder}//pets")
    assert store.resolve("copy").version == store.resolve("pets").version
    store.label("pets", {f"{number}.png": "cat" for number in range(8)})
    assert {split for _, split, _ in state(store, "pets").values()} == {"eval"}
    assert store.verify() == []


def test_all_splits_of_a_version_are_added(store: Store, tmp_path: Path) -> None:
    shares = {"train": 0.4, "test": 0.3, "eval": 0.3}
    store.create("old", splits=shares)
    store.add("old", classes(tmp_path / "images", 8))
    store.add("old", write(tmp_path / "pool", {"x.png": 90, "y.png": 91}), unlabelled=True)
    boxes = {"boxes": [1]}
    store.apply("old", [Change(operation="label", name="cat/0.png", label="cat", annotations=boxes)])
    store.apply("old", [Change(operation="move", name="cat/0.png", split="test")])
    store.create("new", splits=shares)
    outcome = store.add("new", f"store:{store.folder}//old")
    assert outcome.version.counts["added"] == 18
    assert state(store, "new") == state(store, "old")
    assert outcome.version.version == store.resolve("old").version
    # A data set that lacks one of the splits has to be told.
    store.create("two")
    with pytest.raises(UsageError, match="set 'test'"):
        store.add("two", f"store:{store.folder}//old")
    store.add("two", f"store:{store.folder}//old", split="train")
    assert {split for _, split, _ in state(store, "two").values()} == {"train", UNLABELLED}
    store.create("one")
    assert store.add("one", f"store:{store.folder}//old/test").version.counts["added"] > 0


def test_a_set_of_the_source_is_never_spread_over_other_splits(store: Store, tmp_path: Path) -> None:
    for number, name in enumerate(("train", "val")):
        classes(tmp_path / "images" / name, 2, first=10 * number)
    store.create("odd", splits={"train": 0.9, "test": 0.1})
    with pytest.raises(UsageError, match="set 'eval'"):
        store.add("odd", tmp_path / "images")
    store.add("odd", tmp_path / "images/val", split="test")
    (tmp_path / "images/val").rename(tmp_path / "images/test")
    (tmp_path / "images/other/cat").mkdir(parents=True)
    store.create("even", splits={"train": 0.9, "test": 0.1})
    outcome = store.add("even", tmp_path / "images")
    assert {name.split("/")[0] + split for name, (_, split, _) in state(store, "even").items()} == {
        "traintrain",
        "evaltest",
    }
    assert any("other" in note for note in outcome.notes)


def test_who_set_the_labels_by_names_in_any_form(store: Store, tmp_path: Path) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "ä.png"), unicodedata.normalize("NFD", "ä.png")
    store.apply("pets", [addition(tmp_path, decomposed, 1), addition(tmp_path, "b.png", 2, by="ada")], by="robot")
    store.apply("pets", [Change(operation="label", name=decomposed, label="dog", by="ben")], by="me")
    assert store.count_setters("pets") == {"ben": 1, "ada": 1}
    twice = [Change(operation="label", name=composed, label=label, by=by) for label, by in (("x", "ben"), ("y", ""))]
    store.apply("pets", twice, by="me")
    assert store.count_setters("pets") == {"me": 1, "ada": 1}


@given(st.lists(st.text(max_size=4), max_size=8), st.text(max_size=4))
def test_texts_are_found(texts: list[str], other: str) -> None:
    texts = list(dict.fromkeys(text.encode(errors="replace").decode() for text in texts))
    names = Names.build(texts)
    for row, text in enumerate(texts):
        assert names.find(text) == row
    other = other.encode(errors="replace").decode()
    assert names.find(other) == (texts.index(other) if other in texts else -1)
