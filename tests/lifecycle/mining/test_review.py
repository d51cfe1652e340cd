"""Review of picks whose labels have come back: what counts as labelled and wrong, gains, and what is written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests._support import headway, refused

from headway.core.statistics import compute_share_difference
from headway.lifecycle.mining.review import review_rows
from headway.lifecycle.store.store import Store

CLASSES = ("cat", "dog")


def build_rows(labels: str, arm: str = "random", proposed: str = "cat") -> list[dict[str, Any]]:
    """Rows of an arm, a letter each: c(at), d(og), t(ruck), u(nknown) or - for an empty label."""
    names = {"c": "cat", "d": "dog", "t": "truck", "u": "unknown", "-": ""}
    return [
        {"name": f"{arm}/{number}", "label": names[letter], "proposed": proposed, "arm": arm}
        for number, letter in enumerate(labels)
    ]


def write_folder(folder: Path, rows: list[dict[str, Any]], *, before: str = "unknown", pool: str = "pool") -> Path:
    """A folder as `headway mine` writes it, whose list has come back."""
    (folder / "images").mkdir(parents=True)
    listed = []
    for number, row in enumerate(rows):
        path = f"images/{number}.png"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / path)
        listed.append({"path": path, "label": row["label"], "name": row["name"], "sha256": f"{number:064x}", **row})
    with (folder / "picks.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(listed[0]) if listed else ["path", "label", "name", "proposed", "arm"])
        table.writeheader()
        table.writerows(listed)
    picks = [{"name": row["name"], "label": before} for row in rows]
    (folder / "mine.json").write_text(json.dumps({"pool": pool, "classes": CLASSES, "picks": picks}))
    return folder


def test_a_label_of_a_new_class_is_a_mistake_of_the_network() -> None:
    """Else its accuracy would be that over the classes it knows."""
    rows = build_rows("cccccttttt")
    review = review_rows(rows, CLASSES, dict.fromkeys((row["name"] for row in rows), "unknown"))
    assert (review.arms[0].labelled, review.arms[0].wrong) == (10, 5)
    assert review.outside == {"truck": 5}
    assert review.accuracy is not None
    assert review.accuracy[0] == 0.5
    assert "5 labels outside of the classes of the network" in review.describe()


def test_an_accuracy_needs_the_whole_random_arm() -> None:
    """People skip the images that are hard."""
    rows = build_rows("cccccccccu") + build_rows("dd", "margin")
    before = dict.fromkeys((row["name"] for row in rows), "unknown")
    review = review_rows(rows, CLASSES, before)
    assert review.accuracy is None
    assert "Accuracy" not in review.describe()
    assert "1 random pick without a label yet" in review.describe()
    assert [arm.labelled for arm in review.arms] == [9, 2]
    # A label that the pool had already is no new one, unless it is one of the classes.
    assert review_rows(build_rows("uu"), CLASSES).outside == {"unknown": 2}
    assert review_rows(build_rows("cc"), CLASSES, {"random/0": "cat", "random/1": "cat"}).is_complete


@given(st.text("cdtu-", max_size=20), st.text("cdtu-", max_size=20))
def test_counts_and_gains_by_definition(random: str, mined: str) -> None:
    rows = build_rows(mined, "margin") + build_rows(random)
    review = review_rows(rows, CLASSES, dict.fromkeys((row["name"] for row in rows), "unknown"))
    found = {arm.name: arm for arm in review.arms}
    for name, letters in (("random", random), ("margin", mined)):
        if not letters:
            assert name not in found
            continue
        labelled = [letter for letter in letters if letter in "cdt"]
        arm = found[name]
        assert (arm.picks, arm.labelled, arm.wrong) == (
            len(letters),
            len(labelled),
            len(labelled) - labelled.count("c"),
        )
        assert 0 <= arm.low <= arm.share <= arm.high <= 1
    gains = review.list_gains()
    if all(name in found and found[name].labelled for name in ("random", "margin")):
        (gain,) = gains
        mine, base = found["margin"], found["random"]
        expected = compute_share_difference((mine.wrong, mine.labelled), (base.wrong, base.labelled))
        assert (gain.difference, gain.low, gain.high) == expected
    else:
        assert gains == []
    assert (review.accuracy is None) == (not random or found["random"].labelled < len(random))


def test_what_a_review_writes(tmp_path: Path) -> None:
    """Only rows with a new label go on: skipped ones would be a class `unknown`."""
    rows = build_rows("cdtu") + build_rows("dd-u", "margin")
    folder = write_folder(tmp_path / "picks", rows)
    said = headway("mine", folder, "--review")
    assert "Page:" in said.out
    assert f"5 labels in {folder / 'labelled.csv'}. Next: headway pack" in said.out
    with (folder / "labelled.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["label"] for row in written] == ["cat", "dog", "truck", "dog", "dog"]
    assert set(written[0]) == {"path", "label", "name", "sha256"}
    assert headway("pack", folder / "labelled.csv", tmp_path / "packed", "--json").json()["samples"] == 5
    result = json.loads((folder / "review.json").read_text())
    assert result["gains"][0]["name"] == "margin"
    assert result["accuracy"] is None
    page = (folder / "review.html").read_text()
    assert "What each arm gave" in page
    assert "truck, not cat" in page
    assert page.count("data:image/png") == 4
    # The list stays as people have left it, so that they can go on.
    assert "unknown" in (folder / "picks.csv").read_text()


def test_labels_that_came_through_the_store_count(tmp_path: Path) -> None:
    store = ("--store", tmp_path / "store")
    (tmp_path / "pool").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8), (0, number * 60, 0)).save(tmp_path / f"pool/{number}.png")
    headway("dataset", "create", "cars", *store)
    headway("dataset", "add", "cars", tmp_path / "pool", "--unlabelled", *store)
    rows: list[dict[str, Any]] = [
        {"name": one.name, "label": "", "proposed": "cat", "arm": "random", "sha256": one.sample, "split": ""}
        for one in Store(tmp_path / "store").list_samples("cars")
    ]
    rows[3]["label"] = "cat"
    rows[3]["split"] = "train"
    folder = write_folder(tmp_path / "picks", rows, before="", pool=f"store:{tmp_path / 'store'}//cars@v1/unlabelled")
    headway("dataset", "label", "cars", f"{rows[0]['name']}=dog", f"{rows[1]['name']}=cat", *store)
    said = headway("mine", folder, "--review")
    assert [line.split()[:4] for line in said.out.splitlines()[1:2]] == [["random", "4", "3", "1"]]
    assert f"1 label in {folder / 'labelled.csv'}. Next: headway dataset label cars --list" in said.out
    headway("dataset", "label", "cars", "--list", folder / "labelled.csv", *store)
    found = {one.name: one.split for one in Store(tmp_path / "store").list_samples("cars")}
    assert found[rows[3]["name"]] == "train"
    assert found[rows[2]["name"]] == "unlabelled"
    # A store that was moved away is named, and the list counts alone.
    (tmp_path / "store").rename(tmp_path / "moved")
    said = headway("mine", folder, "--review")
    assert "Labels of the store cannot be read" in said.err
    assert [line.split()[:3] for line in said.out.splitlines()[1:2]] == [["random", "4", "1"]]


def test_a_list_without_rows_and_a_damaged_image(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "empty", [])
    assert headway("mine", folder, "--review", "--json").json()["arms"] == []
    folder = write_folder(tmp_path / "picks", build_rows("dd"))
    (folder / "images/0.png").write_bytes(b"not an image")
    (folder / "images/1.png").unlink()
    (folder / "images/1.png").symlink_to(tmp_path / "secret.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    headway("mine", folder, "--review")
    page = (folder / "review.html").read_text()
    assert "What each arm gave" in page
    assert "data:image" not in page, "a link of a stranger's folder leads to a private image"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label,name,proposed\na,b,n,c\n", "column 'arm' is missing"),
        ("path,label,name,proposed,arm\na,b,n,,random\n", "column 'proposed' is missing or empty"),
        ("path,labels,name,proposed,arm\na,b;c,n,c,random\n", "several labels"),
        ('path,label,name,proposed,arm\n"a', "not valid CSV"),
    ],
)
def test_a_list_that_was_spoilt(tmp_path: Path, text: str, words: str) -> None:
    folder = write_folder(tmp_path / "picks", build_rows("c"))
    (folder / "picks.csv").write_text(text)
    assert words in refused("mine", folder, "--review", status=1)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"classes": 3}', '{"pool": "a", "classes": [1], "picks": []}',
     '{"pool": "a", "classes": [], "picks": [{"name": "n"}]}'],
)  # fmt: skip
def test_a_result_that_was_spoilt(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "picks", build_rows("c"))
    (folder / "mine.json").write_text(text)
    assert "damaged" in refused("mine", folder, "--review", status=1)
