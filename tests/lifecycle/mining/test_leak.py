"""Leaks between sets: each image once, with its copy in the first set, as a list, a page and an exit status."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from tests._support import headway, refused
from tests.lifecycle.mining._hashes import draw_photograph


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of eight photographs, and an evaluation set of four with an equal file and a darker one."""
    root = tmp_path_factory.mktemp("leaks")
    for name, numbers in (("train", range(8)), ("eval", range(20, 24)), ("other", range(30, 33))):
        folder = root / name / "unknown"
        folder.mkdir(parents=True)
        for number in numbers:
            draw_photograph(number).save(folder / f"{number}.jpg", quality=95)
    shutil.copyfile(root / "train/unknown/3.jpg", root / "eval/unknown/20.jpg")
    draw_photograph(5).point(lambda value: 0.9 * value).save(root / "eval/unknown/21.jpg", quality=60)
    for name in ("train", "eval", "other"):
        headway("pack", root / name, root / f"{name}.packed", "--mode", "keep")
    return root


def test_an_equal_file_and_a_near_copy_are_found(sets: Path, tmp_path: Path) -> None:
    out = tmp_path / "leaks"
    names = [sets / f"{name}.packed" for name in ("train", "eval", "other")]
    said = headway("mine", *names, "--leaks", "--out", out, "--json", status=1).json()
    assert [(one["images"], one["with_copies_elsewhere"]) for one in said["sets"]] == [(8, 2), (4, 2), (3, 0)]
    with (out / "leaks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["first_name"], row["second_name"], row["kind"]) for row in rows] == [
        ("unknown/3.jpg", "unknown/20.jpg", "equal bytes"),
        ("unknown/5.jpg", "unknown/21.jpg", "near copy"),
    ]
    assert "pair 2, near copy" in (out / "leaks.html").read_text()
    text = headway("mine", names[1], names[0], "--leaks", status=1).out
    assert text.splitlines()[0].endswith("eval.packed: 2 of 4 images (50.00%) have a copy in another set.")
    assert "Page" not in text
    assert "cannot" not in headway("mine", names[0], names[2], "--leaks").err


def test_copies_within_a_set_are_no_leak(sets: Path, tmp_path: Path) -> None:
    """A thousand copies of one image make one pair each, not each with each."""
    folder = tmp_path / "many" / "unknown"
    folder.mkdir(parents=True)
    for number in range(40):
        shutil.copyfile(sets / "train/unknown/3.jpg", folder / f"{number}.jpg")
    said = headway("mine", tmp_path / "many", sets / "other.packed", "--leaks", "--json").json()
    assert said["leaks"] == []
    said = headway("mine", sets / "train.packed", tmp_path / "many", "--leaks", "--json", status=1).json()
    assert len(said["leaks"]) == 40
    assert [one["with_copies_elsewhere"] for one in said["sets"]] == [1, 40]


def test_what_cannot_be(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    train = sets / "train.packed"
    assert "two sets or more" in refused("mine", train, "--leaks", status=2)
    assert "not empty" in refused("mine", train, train, "--leaks", "--out", tmp_path / "full", status=2)
    assert "--leaks does not take it" in refused("mine", train, train, "--leaks", "--count", "3", status=2)
    assert "cannot be combined" in refused("mine", train, "--leaks", "--review", status=2)
