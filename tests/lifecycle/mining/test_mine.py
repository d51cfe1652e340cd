"""`headway mine` from a pool to labels that come back, and all that it refuses."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests._browser import BROWSER, open_in_browser
from tests._support import digits_arrays, headway, packed_digits, refused, write_recipe

from headway.data import opening
from headway.lifecycle.store.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on digits; and a pool of other digits whose class is unknown, with copies of known ones."""
    folder = tmp_path_factory.mktemp("mine")
    packed_digits(folder)
    recipe = write_recipe(folder / "recipe.yaml", model={"factory": "net.py:wide"})
    for name, options in {"a": (), "b": ("seed=7",)}.items():
        headway("train", recipe, "--run", folder / name, *options)
    images, labels = digits_arrays()
    for pool in ("pool", "labelled-pool"):
        for number in range(1200, 1320):
            place = folder / pool / ("unknown" if pool == "pool" else str(labels[number]))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((images[number] * 15).astype("uint8")).save(place / f"{number}.png")
    # A training image under another name, and an image of the pool twice.
    names = opening.open(folder / "digits.packed/train")
    shutil.copyfile(folder / "digits" / names.name(0), folder / "pool/unknown/copy.png")
    names.close()
    shutil.copyfile(folder / "pool/unknown/1205.png", folder / "pool/unknown/twin.png")
    return folder


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def mine(folder: Path, out: Path, *options: str | Path) -> Any:
    return headway("mine", folder / "pool", "--runs", folder / "a", "--out", out, *options, "--json").json()


def test_from_a_pool_to_labels_and_back(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "picks"
    said = mine(folder, out, "--count", "30")
    assert said == json.loads((out / "mine.json").read_text()) | {"folder": str(out)}
    rows = read(out / "picks.csv")
    assert len(rows) == len(said["picks"]) == 30
    assert [row["arm"] for row in rows] == ["random"] * 6 + ["margin"] * 24
    scores = [float(row["score"]) for row in rows[6:]]
    assert scores == sorted(scores, reverse=True)
    assert [row["score"] for row in rows[:6]] == [""] * 6
    names = {row["name"] for row in rows}
    assert "unknown/copy.png" not in names
    assert not {"unknown/1205.png", "unknown/twin.png"} <= names
    assert said["near_copies"]["because_of"]["labelled"] >= 1
    assert said["near_copies"]["because_of"]["pool"] >= 1
    for row in rows:
        record = (out / row["path"]).read_bytes()
        assert record == (folder / "pool" / row["name"]).read_bytes()
        assert hashlib.sha256(record).hexdigest() == row["sha256"]
        assert row["label"] == "unknown"
    assert said["review"] is None, "nobody knows the labels of this pool"
    page = (out / "mine.html").read_text()
    assert "Near copies" in page
    assert "What each arm gave" not in page
    # People set the labels; a third of them is not what was proposed.
    waiting = headway("mine", out, "--review").out.splitlines()
    none = ["0", "0", "-", "-"]
    assert [line.split() for line in waiting[1:3]] == [["random", "6", *none], ["margin", "24", *none]]
    assert any("No pick has a label yet. Set the column label in" in line for line in waiting)
    for number, row in enumerate(rows):
        row["label"] = "0" if number % 3 == 0 and row["proposed"] != "0" else row["proposed"]
    write(out / "picks.csv", rows)
    reviewed = headway("mine", out, "--review")
    arms = json.loads((out / "review.json").read_text())["arms"]
    assert [(arm["name"], arm["picks"], arm["labelled"]) for arm in arms] == [("random", 6, 6), ("margin", 24, 24)]
    for arm, part in zip(arms, (rows[:6], rows[6:]), strict=True):
        assert arm["wrong"] == sum(row["label"] != row["proposed"] for row in part)
        assert 0 <= arm["low"] <= arm["share"] <= arm["high"] <= 1
    assert "Accuracy of the network on the images to choose from, by the random arm:" in reviewed.out
    assert "margin less random:" in reviewed.out
    # The list packs as it stands, and with the proposals as labels.
    assert headway("pack", out / "picks.csv", tmp_path / "packed", "--json").json()["samples"] == 30
    headway("pack", out / "picks.csv", tmp_path / "proposed", "--columns", "path,label=proposed")
    assert set(opening.open(tmp_path / "proposed").classes) == {row["proposed"] for row in rows}


def test_a_pool_of_a_store_has_no_labels(folder: Path, tmp_path: Path) -> None:
    """Mined picks become training images; by the hash of their names a fifth would be evaluation images."""
    store = ("--store", tmp_path / "store")
    headway("dataset", "create", "digits", *store)
    headway("dataset", "add", "digits", folder / "pool", "--unlabelled", *store)
    address = f"store:{tmp_path / 'store'}//digits@v1/unlabelled"
    said = headway("mine", address, "--runs", folder / "a", "--out", tmp_path / "picks", "--count", "40", "--json")
    assert said.json()["review"] is None
    rows = read(tmp_path / "picks/picks.csv")
    assert [row["label"] for row in rows] == [""] * 40
    assert [row["split"] for row in rows] == [""] * 8 + ["train"] * 32
    assert [pick["sha256"] for pick in said.json()["picks"]] == [row["sha256"] for row in rows]
    # One is skipped, and stays without a label.
    for row in rows[:-1]:
        row["label"] = row["proposed"]
    write(tmp_path / "picks/picks.csv", rows)
    said = headway("dataset", "label", "digits", "--list", tmp_path / "picks/picks.csv", *store, "--json")
    assert said.json()["relabelled"] == 39
    split = {one.name: one.split for one in Store(tmp_path / "store").list_samples("digits")}
    assert {split[row["name"]] for row in rows[8:-1]} == {"train"}
    assert {split[row["name"]] for row in rows[:8]} <= {"train", "eval"}
    assert split[rows[-1]["name"]] == "unlabelled"


def test_images_of_every_known_set_are_out(folder: Path, tmp_path: Path) -> None:
    """The evaluation split of a version that is named without a split, and the training sets of all runs."""
    store = ("--store", tmp_path / "store")
    headway("dataset", "create", "kept", *store)
    headway("dataset", "add", "kept", folder / "labelled-pool", *store)
    address = f"store:{tmp_path / 'store'}//kept@v1"
    held = {one.name for one in Store(tmp_path / "store").list_samples("kept@v1/eval")}
    assert 3 <= len(held) <= 60
    options = ("--held-out", address, "--count", "500")
    said = headway(
        "mine", folder / "labelled-pool", "--runs", folder / "a", *options, "--out", tmp_path / "a", "--json"
    )
    assert held.isdisjoint(pick["name"] for pick in said.json()["picks"])
    assert said.json()["sets"]["held-out"]["folder"].endswith("/eval")
    # A run that was trained on images of this pool, beside one that was not.
    recipe = write_recipe(folder / "other.yaml", model={"factory": "net.py:wide"}, data={"train": f"{address}/train"})
    headway("train", recipe, "--run", tmp_path / "other")
    options = ("--runs", tmp_path / "other", "--keep-copies", "--count", "500", "--out", tmp_path / "b")
    said = headway("mine", folder / "labelled-pool", "--runs", folder / "a", *options, "--json")
    picked = {pick["name"] for pick in said.json()["picks"]}
    assert picked == held, "all others are training images of the second run"
    assert set(said.json()["sets"]) == {"labelled", "labelled 2", "held-out"}
    assert said.json()["equal_copies"] == 120 - len(held)


@pytest.mark.parametrize("strategy", ["entropy", "bald", "k-center", "badge", "random"])
@pytest.mark.thin(1)
def test_every_strategy_from_two_networks(folder: Path, tmp_path: Path, strategy: str) -> None:
    options = ("--runs", folder / "b", "--strategy", strategy, "--count", "10", "--seed", "3")
    first = mine(folder, tmp_path / "one", *options)
    again = mine(folder, tmp_path / "two", *options)
    assert first["picks"] == again["picks"]
    arms = [pick["arm"] for pick in first["picks"]]
    assert arms.count("random") == (10 if strategy == "random" else 2)
    assert len(first["runs"]) == 2
    assert all(len(one["sha256"]) == 64 for one in first["runs"])


def test_a_pool_with_labels_is_judged_at_once(folder: Path, tmp_path: Path) -> None:
    """The pages and the answer say how often the network was wrong in each arm."""
    options = ("--runs", folder / "a", "--count", "40", "--weight", "3=2", "--quota", "8=0.5")
    said = headway("mine", folder / "labelled-pool", *options, "--out", tmp_path / "out", "--json").json()
    arms = said["review"]["arms"]
    assert [arm["labelled"] for arm in arms] == [8, 32]
    predicted = [pick["proposed"] for pick in said["picks"] if pick["arm"] == "margin"]
    assert predicted.count("8") >= min(16, 5)
    assert (said["weights"], said["quotas"]) == ({"3": 2.0}, {"8": 0.5})
    assert "What each arm gave" in (tmp_path / "out/mine.html").read_text()


@pytest.mark.check
def test_raw_pixels_and_images_kept_near_each_other(folder: Path, tmp_path: Path) -> None:
    """A pool of raw pixels gives PNG files; with --keep-copies only a copy of what the runs trained on is out."""
    headway("pack", folder / "pool", tmp_path / "raw", "--mode", "raw")
    options = ("--runs", folder / "a", "--count", "121", "--keep-copies", "--out", tmp_path / "out", "--json")
    said = headway("mine", tmp_path / "raw", *options).json()
    assert said["near_copies"] is None
    assert said["candidates"] == 121
    picks = read(tmp_path / "out/picks.csv")
    assert all(row["path"].endswith(".png") for row in picks)
    names = {row["name"] for row in picks}
    assert "unknown/copy.png" not in names
    assert {"unknown/1205.png", "unknown/twin.png"} <= names
    assert headway("pack", tmp_path / "out/picks.csv", tmp_path / "packed", "--json").json()["samples"] == 121


@pytest.mark.browser
@pytest.mark.check
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_draws_the_page(folder: Path, tmp_path: Path) -> None:
    """Charts of classes and scores, and pictures of picks and copies, without an error on the console."""
    mine(folder, tmp_path / "out", "--count", "30")
    document, console = open_in_browser(tmp_path / "out/mine.html")
    assert console == []
    assert document.count("<svg") >= 2
    for title in ("Picks: margin", "Picks: random", "Near copies"):
        assert title in document


def test_names_from_outside_stay_inside(folder: Path, tmp_path: Path) -> None:
    """An image's name may hold anything that a file name may."""
    pool = tmp_path / "pool" / "unknown"
    pool.mkdir(parents=True)
    for number, name in enumerate(["<img src=x>.png", "..png.png", "a b;c.png", "--out.png", "ä" * 60 + ".png"]):
        shutil.copyfile(folder / f"pool/unknown/{1210 + number}.png", pool / name)
    options = ("--runs", folder / "a", "--count", "5", "--out", tmp_path / "out")
    headway("mine", tmp_path / "pool", *options)
    paths = [row["path"] for row in read(tmp_path / "out/picks.csv")]
    assert sorted(paths) == sorted(f"images/{path.name}" for path in (tmp_path / "out/images").iterdir())
    assert "<img src=x>" not in (tmp_path / "out/mine.html").read_text()


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    pool, run = folder / "pool", ("--runs", folder / "a")
    out = ("--out", tmp_path / "out")
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((pool, *out), "mining needs a trained network"),
        ((tmp_path / "none", *run, *out), "none"),
        ((pool, *run, "--strategy", "magic", *out), "there is no strategy 'magic'"),
        ((pool, *run, "--strategy", "bald", *out), "compares the answers of several networks"),
        ((pool, *run, "--random-share", "0", *out), "a random share of 0"),
        ((pool, *run, "--weight", "cat", *out), "not of the form NAME=NUMBER"),
        ((pool, *run, "--quota", "12=0.5", *out), "'12' is not a class"),
        ((pool, *run, "--keep-copies", "--held-out", pool, *out), "every image of the pool is a copy of a known one"),
        ((pool, *run, "--strategy", "random", "--random-share", "0.3", *out), "random as a whole"),
        ((pool, *run, "--quota", "3=0.2", "--quota", "3=0.1", *out), "'3' is named twice"),
        ((pool, pool, *run, *out), "one is examined at a time"),
        ((pool, *run, "--recipe", folder / "recipe.yaml", *out), "it is for --label-errors"),
        ((pool, *run, "--labelled", pool, *out), "every image of the pool is a copy of a known one"),
        ((pool, *run, "--out", folder / "pool"), "not empty"),
        ((tmp_path, "--review"), "cannot be read"),
    ]
    for arguments, words in cases:
        assert words in refused("mine", *arguments, status=2), arguments
        assert not (tmp_path / "out").exists()


@pytest.mark.check
def test_a_training_set_that_is_gone_is_to_be_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "run")
    shutil.copyfile(folder / "net.py", tmp_path / "net.py")
    about = json.loads((tmp_path / "run/provenance.json").read_text())
    (tmp_path / "run/provenance.json").write_text(json.dumps(about | {"base": str(tmp_path)}))
    options = ("--runs", tmp_path / "run", "--count", "5", "--out", tmp_path / "out")
    said = refused("mine", folder / "pool", *options, status=2)
    assert "the labelled set of the run cannot be opened" in said
    assert "--labelled SET" in said
    packed = folder / "digits.packed"
    said = refused("mine", folder / "pool", *options, "--labelled", packed / "train", status=2)
    assert "the held-out set of the run cannot be opened" in said
    headway("mine", folder / "pool", *options, "--labelled", packed / "train", "--held-out", packed / "eval")
    # Without a look at near copies they are missed, and that is said.
    said = headway("mine", folder / "pool", *options[:4], "--keep-copies", "--out", tmp_path / "other").err
    assert said.count("so its images may be chosen") == 2
    k_center = ("--strategy", "k-center", "--keep-copies", "--out", tmp_path / "third")
    assert "--labelled SET" in refused("mine", folder / "pool", *options[:4], *k_center, status=2)
