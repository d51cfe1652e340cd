"""`headway mine --label-errors`: by runs that have not seen the set, and by folds that train such networks."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import digits, headway, packed_digits, refused, write_recipe

from headway.core.errors import UsageError
from headway.data import opening
from headway.lifecycle.mining.folds import divide_folds, write_subset

WRONG = [("3", "8", "062.png"), ("1", "4", "065.png"), ("0", "6", "067.png")]
"""Images that are moved to the folder of another class: from, to, and name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, some of them in the folder of another class; and a run on other digits."""
    folder = tmp_path_factory.mktemp("labels")
    packed_digits(folder, per_class=60, mode="seekable")
    quick = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
    recipe = write_recipe(folder / "recipe.yaml", model={"factory": "net.py:wide"}, optimizer=quick, epochs=6)
    headway("train", recipe, "--run", folder / "run")
    for path in sorted(digits(folder / "wrong", per_class=72).glob("*/0[0-5]*.png")):
        path.unlink()
    for source, target, name in WRONG:
        (folder / "wrong" / source / name).rename(folder / "wrong" / target / f"moved-{name}")
    headway("pack", folder / "wrong", folder / "wrong.packed", "--mode", "keep")
    return folder


def test_moved_images_are_at_the_head_of_the_queue(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "queue"
    options = ("--label-errors", "--runs", folder / "run", "--count", "12", "--out", out, "--json")
    said = headway("mine", folder / "wrong.packed", *options).json()
    with (out / "suspects.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(said["listed"]) == 12
    moved = [row for row in rows if "moved" in row["name"]]
    assert len(moved) == 3
    assert {(row["label"], row["suggested"]) for row in moved} == {(target, source) for source, target, _ in WRONG}
    scores = [float(row["score"]) for row in rows if row["suspect"] == "yes"]
    assert scores == sorted(scores)
    assert said == json.loads((out / "label-errors.json").read_text()) | {"folder": str(out)}
    assert "Doubtful labels" in (out / "label-errors.html").read_text()
    # The set itself is as it was, and the list packs.
    assert headway("verify", folder / "wrong.packed", "--json").json()["damaged"] == []
    assert headway("pack", out / "suspects.csv", tmp_path / "packed", "--json").json()["samples"] == 12


@pytest.mark.check
def test_folds_train_networks_that_have_not_seen_the_labels(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "queue"
    options = ("--label-errors", "--recipe", folder / "recipe.yaml", "--folds", "3", "--out", out)
    said = headway("mine", folder / "wrong.packed", *options)
    assert "No label was changed." in said.out
    found = json.loads((out / "label-errors.json").read_text())
    assert found["images"] == 120
    seen: list[str] = []
    for fold in (1, 2, 3):
        with (
            closing(opening.open(out / f"folds/{fold}/train")) as train,
            closing(opening.open(out / f"folds/{fold}/held-out")) as held,
        ):
            assert (len(train), len(held)) == (80, 40)
            names = {one.name(place) for one in (train, held) for place in range(len(one))}
            assert len(names) == 120
            seen += [held.name(place) for place in range(40)]
    assert len(set(seen)) == 120
    suspects = [row["name"] for row in found["listed"]]
    assert sum("moved" in name for name in suspects) >= 2
    # Killed after a fold: the finished one stays, the other ones are trained, and the answer is the same.
    wanted = (out / "suspects.csv").read_bytes()
    for name in ("label-errors.json", "label-errors.html", "suspects.csv"):
        (out / name).unlink()
    shutil.rmtree(out / "folds/2/run")
    kept = (out / "folds/1/run/weights.safetensors").stat().st_mtime_ns
    refusal = refused("mine", folder / "wrong.packed", *options, "--seed", "4", status=2)
    assert "not empty" in refusal
    headway("mine", folder / "wrong.packed", *options)
    assert (out / "suspects.csv").read_bytes() == wanted
    assert (out / "folds/1/run/weights.safetensors").stat().st_mtime_ns == kept
    # The same again is refused: the folder is complete.
    assert "not empty" in refused("mine", folder / "wrong.packed", *options, status=2)


@pytest.mark.check
def test_copies_of_an_image_are_in_one_fold(folder: Path, tmp_path: Path) -> None:
    """Else the network that judges an image has learned its wrong label from the copy."""
    shutil.copytree(folder / "wrong", tmp_path / "twice")
    copied = sorted((tmp_path / "twice").glob("*/06[0-3].png"))
    for path in copied:
        shutil.copyfile(path, path.with_name(f"copy-{path.name}"))
    headway("pack", tmp_path / "twice", tmp_path / "packed", "--mode", "keep")
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1)
    options = ("--label-errors", "--recipe", recipe, "--folds", "2", "--out", tmp_path / "out")
    headway("mine", tmp_path / "packed", *options)
    with (
        closing(opening.open(tmp_path / "out/folds/1/train")) as one,
        closing(opening.open(tmp_path / "out/folds/1/held-out")) as other,
    ):
        digests = [{hashlib.sha256(record).digest() for record in part.read(range(len(part)))} for part in (one, other)]
        assert digests[0].isdisjoint(digests[1])
        assert len(one) + len(other) == 120 + len(copied)


def test_images_that_a_run_has_seen_are_left_out(folder: Path, tmp_path: Path) -> None:
    """The names and labels do not matter, nor does the pack: a corrected set is another one, of the same images."""
    shutil.copytree(folder / "digits", tmp_path / "again")
    names = opening.open(folder / "digits.packed/train")
    moved = names.name(0)
    names.close()
    other = str((int(moved.split("/")[0]) + 1) % 10)
    (tmp_path / "again" / moved).rename(tmp_path / "again" / other / "corrected.png")
    headway("pack", tmp_path / "again", tmp_path / "packed", "--format", "tar")
    options = ("--label-errors", "--runs", folder / "run", "--out")
    said = headway("mine", tmp_path / "packed", *options, tmp_path / "out")
    assert "450 of 600 images are left out" in said.err
    assert "150 of 600 images are in the evaluation set" in said.err
    assert json.loads((tmp_path / "out/label-errors.json").read_text())["images"] == 150
    headway("pack", folder / "digits.packed/train", tmp_path / "train", "--format", "tar")
    assert "this run was trained on these images" in refused(
        "mine", tmp_path / "train", *options, tmp_path / "no", status=2
    )
    # A run that started from the weights of such a run knows them too.
    shutil.copytree(folder / "digits.packed/eval", tmp_path / "rest")
    changes = {"data": {"train": str(tmp_path / "rest"), "eval": None}, "model": {"factory": "net.py:wide"}}
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1, **changes)
    weights = folder / "run/weights.safetensors"
    headway("train", recipe, "--run", tmp_path / "tuned", f"model.weights={weights}")
    options = ("--label-errors", "--runs", tmp_path / "tuned", "--out")
    assert "this run was trained on these images" in refused(
        "mine", tmp_path / "packed", *options, tmp_path / "no", status=2
    )
    # A set that is gone cannot be compared, and that is said.
    shutil.rmtree(tmp_path / "rest")
    said = headway("mine", tmp_path / "packed", *options, tmp_path / "gone")
    assert "not known whether the networks have seen these images" in said.err
    assert json.loads((tmp_path / "gone/label-errors.json").read_text())["images"] == 150
    recipe = write_recipe(tmp_path / "tuned.yaml", model={"weights": str(weights)})
    options = ("--label-errors", "--recipe", recipe, "--out", tmp_path / "no")
    assert "Leave model.weights out" in refused("mine", tmp_path / "train", *options, status=2)


def test_folds_of_a_version_with_annotations(tmp_path: Path) -> None:
    digits(tmp_path / "digits", per_class=3)
    store = ("--store", tmp_path / "store")
    headway("dataset", "create", "digits", "--splits", "train=1", *store)
    headway("dataset", "add", "digits", tmp_path / "digits", *store)
    (tmp_path / "list.jsonl").write_text('{"name": "0/000.png", "label": "0", "annotations": {"boxes": [1, 2]}}\n')
    headway("dataset", "label", "digits", "--list", tmp_path / "list.jsonl", *store)
    with closing(opening.open(f"store:{tmp_path / 'store'}//digits")) as version:
        write_subset(version.folder, np.arange(5), tmp_path / "subset")
        with closing(opening.open(tmp_path / "subset")) as part:
            assert [part.name(place) for place in range(5)] == [version.name(place) for place in range(5)]


@given(st.lists(st.integers(0, 4), min_size=10, max_size=80), st.integers(2, 6), st.integers(0, 100))
def test_each_class_is_spread_over_the_folds(labels: list[int], folds: int, seed: int) -> None:
    array = np.array([label for label in labels if labels.count(label) > 1], np.int64)
    found = divide_folds(array, folds, seed)
    assert (found == divide_folds(array, folds, seed)).all()
    sizes = np.bincount(found, minlength=folds)
    assert sizes.max() - sizes.min() <= 1
    for label in set(array.tolist()):
        counts = np.bincount(found[array == label], minlength=folds)
        assert counts.max() - counts.min() <= 1


def test_folds_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="1 folds"):
        divide_folds(np.zeros(4, np.int64), 1, 0)
    with pytest.raises(UsageError, match="class number 1 has a single image"):
        divide_folds(np.array([0, 0, 1]), 2, 0)
    with pytest.raises(UsageError, match="class number 1 has a single image"):
        divide_folds(np.array([0, 0, 1, 1]), 2, 0, np.array([0, 1, 2, 2]))
    with pytest.raises(UsageError, match="5 folds of 4 images"):
        divide_folds(np.zeros(4, np.int64), 5, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=30, max_size=80), st.integers(2, 4))
def test_images_of_one_group_are_in_one_fold(rows: list[tuple[int, int]], folds: int) -> None:
    labels, groups = np.array(rows).T
    # Two images of each class that stand alone, so that every class is in two folds.
    labels, groups = np.r_[labels, np.repeat(np.arange(4), 2)], np.r_[groups, np.arange(20, 28)]
    found = divide_folds(labels, folds, 0, groups)
    assert set(found.tolist()) == set(range(folds))
    for group in set(groups.tolist()):
        assert len(set(found[groups == group].tolist())) == 1
    alone = divide_folds(labels, folds, 0)
    assert (alone == divide_folds(labels, folds, 0, np.arange(len(labels)))).all()


@pytest.mark.parametrize("form", ["recordio", "tar", "lmdb", "raw"])
@pytest.mark.thin(2)
def test_a_subset_has_the_bytes_of_its_rows(tmp_path: Path, form: str) -> None:
    digits(tmp_path / "digits", per_class=4)
    mode = "raw" if form == "raw" else "keep"
    headway("pack", tmp_path / "digits", tmp_path / "pack", "--mode", mode, "--format", form)
    rows = np.array([7, 3, 30, 31])
    write_subset(tmp_path / "pack", rows, tmp_path / "subset")
    with (
        closing(opening.open(tmp_path / "pack")) as whole,
        closing(opening.open(tmp_path / "subset")) as part,
    ):
        assert [bytes(one) for one in part.read(range(4))] == [bytes(one) for one in whole.read(rows)]
        assert [part.name(place) for place in range(4)] == [whole.name(row) for row in rows.tolist()]
        assert part.label.tolist() == whole.label[rows].tolist()
        assert part.classes == whole.classes
        assert part.fingerprint != whole.fingerprint
    shutil.rmtree(tmp_path / "pack")


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    wrong, run = folder / "wrong.packed", folder / "run"
    out = ("--label-errors", "--out", tmp_path / "out")
    both = ("--runs", run, "--recipe", folder / "recipe.yaml")
    assert "have not seen the labels" in refused("mine", wrong, *out, status=2)
    assert "have not seen the labels" in refused("mine", wrong, *both, *out, status=2)
    own = folder / "digits.packed/train"
    assert "this run was trained on these images" in refused("mine", own, "--runs", run, *out, status=2)
    assert "Add --recipe" in refused("mine", wrong, "--runs", run, "--folds", "3", *out, status=2)
    assert "Add --recipe" in refused("mine", wrong, "--runs", run, "--seed", "3", *out, status=2)
    assert "does not take it" in refused("mine", wrong, "--runs", run, "--strategy", "margin", *out, status=2)
    loose = ("--recipe", folder / "recipe.yaml")
    assert "packed folder on this machine" in refused("mine", folder / "wrong", *loose, *out, status=2)
