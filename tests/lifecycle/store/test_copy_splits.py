"""Near copies in a store: named, in the split of the first one, and no image decoded twice."""

from __future__ import annotations

import io
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests._support import headway as run_headway
from tests.lifecycle.mining._hashes import draw_photograph
from tests.lifecycle.store._pictures import state

from headway.data import opening
from headway.data.store_address import UNLABELLED
from headway.lifecycle.copies import hash_images as hashing
from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.mining.leak import find_leaks
from headway.lifecycle.store import compaction
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.records import Change, Outcome
from headway.lifecycle.store.store import Store

SPLITS = {"train": 0.5, "eval": 0.5}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.make(tmp_path / "store")
    store.create("pets", splits=SPLITS)
    return store


def find_names(split: str, count: int, first: int = 0) -> list[str]:
    """Names whose hash says a split."""
    schema = Schema.build("keep", SPLITS, None)
    names = [f"{number}.jpg" for number in range(first, first + 50 + 20 * count)]
    found = schema.choose_splits(names) == schema.find_split(split)
    return [name for name, is_found in zip(names, found.tolist(), strict=True) if is_found][:count]


def draw(number: int, brightness: float = 1.0) -> bytes:
    """A small photograph; another brightness gives a near copy."""
    out = io.BytesIO()
    draw_photograph(number, (80, 60)).point(lambda value: brightness * value).save(out, "JPEG", quality=90)
    return out.getvalue()


def add(store: Store, files: dict[str, bytes], label: str | None = "cat", split: str = "", **more: bool) -> Outcome:
    """Adds images by name."""
    changes = []
    for number, (name, data) in enumerate(files.items()):
        path = store.folder.parent / f"file-{number}.jpg"
        path.write_bytes(data)
        changes.append(Change(operation="add", name=name, label=label, split=split, file=path))
    return store.apply("pets", changes, **more)  # type: ignore[arg-type]


def list_copies(outcome: Outcome) -> list[tuple[str, str, bool]]:
    return [(one.name, one.first, one.is_apart) for one in outcome.near_copies]


def test_a_near_copy_goes_to_the_split_of_the_first(store: Store) -> None:
    train, other = find_names("train", 2)
    near, near_too, far = find_names("eval", 3)
    add(store, {train: draw(1)})
    outcome = add(store, {near: draw(1, 0.9), near_too: draw(1, 0.95), far: draw(2), other: draw(2, 0.9)})
    assert list_copies(outcome) == [(near, train, False), (near_too, train, False), (other, far, False)]
    assert outcome.to_json()["near_copies"][0] == {"name": near, "first": train, "is_apart": False}
    splits = {name: split for name, (_, split, _) in state(store, "pets").items()}
    assert splits == {train: "train", near: "train", near_too: "train", far: "eval", other: "eval"}
    # Removed and taken back by its bytes alone: it is a near copy all the same.
    sample = state(store, "pets")[near][2]
    store.remove("pets", [near])
    back = store.apply("pets", [Change(operation="add", name=near, sample=sample, label="cat")])
    assert list_copies(back) in ([(near, train, False)], [(near, near_too, False)])
    assert state(store, "pets")[near][1] == "train"
    assert store.verify() == []


def test_a_split_that_is_asked_for_counts_and_others_follow_it(store: Store) -> None:
    train, far = find_names("train", 2)
    (copy,) = find_names("eval", 1)
    add(store, {train: draw(1)})
    outcome = add(store, {copy: draw(1, 0.9)}, split="eval")
    assert list_copies(outcome) == [(copy, train, True)]
    files = {}
    for name, split, brightness in ((far, "", 1.0), ("placed.jpg", "eval", 0.9)):
        path = store.folder.parent / name
        path.write_bytes(draw(2, brightness))
        files[name] = Change(operation="add", name=name, label="cat", split=split, file=path)
    outcome = store.apply("pets", list(files.values()))
    assert list_copies(outcome) == [(far, "placed.jpg", False)]
    assert {name: state(store, "pets")[name][1] for name in files} == {far: "eval", "placed.jpg": "eval"}


def test_a_first_label_takes_a_near_copy_to_the_split_of_the_first(store: Store) -> None:
    """Images of a pool, too, that are near copies of each other; without a label they are only named."""
    (train,) = find_names("train", 1)
    near, first, second = find_names("eval", 3)
    (third,) = find_names("train", 1, first=100)
    add(store, {train: draw(1)})
    pool = {near: draw(1, 0.9), first: draw(2), third: draw(2, 0.9), second: draw(3)}
    assert list_copies(add(store, pool, label=None)) == [(near, train, False), (third, first, False)]
    assert {split for name, (_, split, _) in state(store, "pets").items() if name != train} == {UNLABELLED}
    outcome = store.label("pets", dict.fromkeys([third, near, first, second], "dog"))
    assert list_copies(outcome) == [(near, train, False), (first, third, False)]
    splits = {name: split for name, (_, split, _) in state(store, "pets").items()}
    assert splits == {train: "train", near: "train", third: "train", first: "train", second: "eval"}
    # A sample that has a label already never moves, whatever comes.
    assert list_copies(store.label("pets", {near: "cat"})) == []
    sets = [opening.open(f"store:{store.folder}//pets/{split}") for split in ("train", "eval")]
    assert find_leaks(sets).leaks == ()
    for one in sets:
        one.close()


def blend(share: float) -> bytes:
    """A picture between two others."""
    first, second = (draw_photograph(number, (80, 60)) for number in (20, 21))
    out = io.BytesIO()
    Image.blend(first, second, share).save(out, "PNG")
    return out.getvalue()


def test_a_chain_of_near_copies_is_in_one_split(store: Store) -> None:
    """Each frame of a pan is like the next one, and the first is unlike the last."""
    shares = np.linspace(0, 0.6, 13).tolist()
    names = [name for pair in zip(find_names("train", 7), find_names("eval", 7), strict=True) for name in pair]
    outcome = add(store, {name: blend(share) for name, share in zip(names, shares, strict=False)})
    assert {split for _, split, _ in state(store, "pets").values()} == {"train"}
    assert len(outcome.near_copies) == 12
    far = store.folder.parent / "far"
    far.mkdir()
    ends = Store.make(far / "store")
    ends.create("pets", splits=SPLITS)
    assert list_copies(add(ends, {names[0]: blend(0), names[1]: blend(0.6)})) == [], "the ends alone are not alike"
    # Frames that come later follow those between them.
    late = find_names("eval", 1, first=300)
    add(store, {late[0]: blend(0.64)})
    assert state(store, "pets")[late[0]][1] == "train"


def test_near_copies_can_be_ignored(store: Store) -> None:
    (train,) = find_names("train", 1)
    (near,) = find_names("eval", 1)
    add(store, {train: draw(1)}, ignore_near_copies=True)
    assert list_copies(add(store, {near: draw(1, 0.9)}, ignore_near_copies=True)) == []
    assert state(store, "pets")[near][1] == "eval"
    assert list((store.folder / "objects").rglob("*.hashes")) == []


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that are decoded, as they come."""
    counts: list[int] = []
    before = hashing._decode

    def decode(dataset: object, samples: np.ndarray, *more: object) -> None:
        counts.append(len(samples))
        before(dataset, samples, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(hashing, "_decode", decode)
    return counts


def test_no_image_is_decoded_twice(store: Store, decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, {f"{number}.jpg": draw(number) for number in range(4)})
    add(store, {"late.jpg": draw(10)}, ignore_near_copies=True)
    assert decoded == [4]
    # Those that were left out are decoded with the next addition.
    add(store, {"5.jpg": draw(5), "6.jpg": draw(2, 0.9)})
    assert decoded == [4, 1, 2]
    # Also after small shards were joined, and the old ones are gone.
    monkeypatch.setattr(compaction, "MOST_SMALL_SHARDS", 1)
    add(store, {"7.jpg": draw(7)})
    store.collect_garbage(keep=1, grace_s=0)
    assert len(list((store.folder / "objects").rglob("*.rec"))) == 1
    (kept,) = (store.folder / "objects").rglob("*.hashes")
    assert decoded == [4, 1, 2, 1]
    with closing(opening.open(f"store:{store.folder}//pets/train")) as dataset:
        hashes = hash_images(dataset)
    assert decoded == [4, 1, 2, 1]
    assert hashes.is_good.all()
    assert (hashes.thumbnails.reshape(len(hashes), -1).std(axis=1) > 2).all()
    # A file that is damaged, or gone, is made again.
    for spoil in (lambda: kept.write_bytes(b"no hashes"), kept.unlink):
        spoil()
        decoded.clear()
        with closing(opening.open(f"store:{store.folder}//pets/train")) as dataset:
            again = hash_images(dataset)
        assert decoded == [len(again)]
        assert (again.thumbnails == hashes.thumbnails).all()


def test_additions_at_once_decode_what_has_no_hashes_once(store: Store, decoded: list[int]) -> None:
    add(store, {f"{number}.jpg": draw(number) for number in range(3)}, ignore_near_copies=True)
    start = threading.Barrier(2)

    def add_one(number: int) -> None:
        path = store.folder.parent / f"{number}.jpg"
        path.write_bytes(draw(number))
        start.wait()
        store.apply("pets", [Change(operation="add", name=path.name, label="cat", file=path)])

    threads = [threading.Thread(target=add_one, args=(number,)) for number in (10, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(decoded) == [1, 1, 3]


def test_an_image_that_cannot_be_decoded_is_left_out_and_not_compared(store: Store, decoded: list[int]) -> None:
    """The header of an image may be sound, and its pixels cut off."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50, 3), np.uint8)).save(out, "PNG")
    outcome = add(store, {"whole.png": out.getvalue()})
    cut = add(store, {"cut.png": out.getvalue()[:2000]}, label=None)
    assert list_copies(outcome) == list_copies(cut) == []
    assert [one.name for one in cut.rejected] == ["cut.png"]
    add(store, {"next.jpg": draw(1)})
    assert decoded == [1, 1]


def test_the_command_line_names_near_copies(tmp_path: Path) -> None:
    train, second = find_names("train", 2)
    (near,) = find_names("eval", 1)
    for folder, files in (("one", {train: draw(1)}), ("two", {near: draw(1, 0.9), second: draw(2)})):
        for name, data in files.items():
            path = tmp_path / folder / "cat" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    options = ("--store", tmp_path / "store")
    run_headway("dataset", "create", "pets", *options, "--splits", "train=0.5,eval=0.5")
    run_headway("dataset", "add", "pets", tmp_path / "one", "--split", "train", *options)
    said = run_headway("dataset", "add", "pets", tmp_path / "two", "--split", "eval", *options)
    assert "2 added. Near copies of other images: 1." in said.out
    assert f"cat/{near} is a near copy of cat/{train}, which is in another split" in said.err
    said = run_headway("dataset", "add", "pets", tmp_path / "two", "--prefix", "x", "--ignore-near-copies", *options)
    assert "Left out 2 that are there already" in said.out
