"""What `pack` refuses to drop, and what it warns of."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data import opening
from headway.data.formats.listing_columns import check_dropped_columns
from headway.data.opening import open_source
from headway.data.pack import pack
from headway.data.set_warnings import describe_shared_images, list_class_warnings


def write_images(folder: Path, names: list[str], seed: int = 0) -> Path:
    """Different images of 8 x 8, as PNG."""
    chance = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / name)
    return folder


def refusal(path: Path, columns: str | None = None) -> str:
    with pytest.raises(HeadwayError) as caught:
        pack(path, path.parent / "dst", columns=columns)
    assert not (path.parent / "dst").exists()
    return str(caught.value)


# Columns


@pytest.mark.parametrize(
    "name",
    ["boxes", "bbox", "bbox_x", "BoundingBox", "Bounding Box", "mask", "image_mask", "xmin", "x_min", "keypoints"],
)
def test_a_column_of_boxes_or_masks_is_not_dropped(tmp_path: Path, name: str) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    path = tmp_path / "list.csv"
    path.write_text(f"path,label,{name},author\na.png,cat,1,me\nb.png,dog,2,me\n")
    assert refusal(path) == (
        f"{path}: the column {name!r} would be lost: Headway learns classes, labels or numbers of whole images. To "
        f"leave it out, name the columns to use: headway pack {path} DST --columns path,label."
    )
    assert pack(path, tmp_path / "dst", columns="path,label").samples == 2


def test_values_of_several_parts_are_not_dropped_from_json_lines(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    path = tmp_path / "list.jsonl"
    # Only the second line has it.
    rows = [{"path": "a.png", "label": "cat"}, {"path": "b.png", "label": "dog", "spots": [{"x": 1}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert "the column 'spots' would be lost" in refusal(path)
    done = pack(path, tmp_path / "dst", columns="path,label")
    assert done.classes == ("cat", "dog")
    assert not any("columns" in note for note in done.notes)


def test_a_column_that_names_the_set_is_not_dropped(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    path = tmp_path / "list.csv"
    path.write_text("path,label,split\na.png,cat,train\nb.png,dog,test\n")
    assert "the column 'split' would be lost: all rows would become one set. Write one list for each" in refusal(path)


def test_columns_of_other_names(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    path = tmp_path / "list.csv"
    path.write_text("file,species,boxes\na.png,cat,1\nb.png,dog,2\n")
    assert "To use columns of other names: headway pack FILE DST --columns path=file,label=species." in refusal(path)
    done = pack(path, tmp_path / "dst", columns="path=file, label=species")
    assert done.classes == ("cat", "dog")
    rows = [{"file": "a.png", "age": 3.5, "weight": 1}, {"file": "b.png", "age": 2, "weight": 7}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = pack(tmp_path / "list.jsonl", tmp_path / "dst", columns="path=file,value=age", overwrite=True)
    assert sorted(opening.open(tmp_path / "dst").label.tolist()) == [2, 3.5]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("path,labell", "--columns: 'labell' is not the name of a column. Did you mean 'label'?"),
        (
            "path,label=speces",
            ", line 1: there is no column 'speces' (found: 'path', 'species'). Did you mean 'species'?",
        ),
        ("path,path", "--columns: 'path' names a column twice."),
        ("path=species,label=species", "--columns: 'label=species' names a column twice."),
        ("path", "there is no column of labels (found: 'path')"),
        ("", "--columns: '' is not the name of a column."),
    ],
)
def test_wrong_names_of_columns(tmp_path: Path, columns: str, said: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text("path,species\na.png,cat\n")
    assert said in refusal(path, columns)


def test_only_a_list_has_columns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"only a CSV or JSONL file has columns, and this is none\. Leave"):
        pack(write_images(tmp_path / "src", ["cat/a.png", "dog/b.png"]), tmp_path / "dst", columns="path,label")


@given(
    st.lists(st.sampled_from(["year", "camera", "width", "offset", "boxer", "unmasked", "sunset", "id"]), unique=True)
)
def test_other_columns_are_left_out_with_a_note_only(names: list[str]) -> None:
    check_dropped_columns(names, ["path", "label"], set(), "list.csv")


# Layouts


@pytest.mark.parametrize(
    "names",
    [
        ["images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png"],
        ["imgs/1.jpg", "imgs/2.jpg", "masks/1_mask.png", "masks/2_mask.png"],
        ["train_images/1.png", "train_masks/1.png"],
        ["JPEGImages/a/1.jpg", "SegmentationClass/a/1.png", "more/1.png"],
    ],
)
def test_images_and_their_masks_are_not_two_classes(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(DataError, match=r"look like images and their masks, and not like two classes: \d names are in"):
        open_source(write_images(tmp_path, names))


@pytest.mark.parametrize(
    ("images", "others"),
    [
        (["images/train/1.jpg"], ["labels/train/1.txt"]),
        (["train2017/1.jpg"], ["annotations/instances.json"]),
        (["JPEGImages/1.jpg"], ["Annotations/1.xml"]),
    ],
)
def test_annotations_are_not_a_class(tmp_path: Path, images: list[str], others: list[str]) -> None:
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        DataError, match=r"holds no images: it looks like annotations, and not like a class. Headway lear"
    ):
        open_source(write_images(tmp_path, images))


@pytest.mark.parametrize(
    "names",
    [
        ["cat/1.jpg", "dog/1.jpg"],
        ["masks/1.jpg", "hats/1.jpg"],  # a shop
        ["images/1.jpg", "masks/9.jpg"],  # other names
        ["labels/1.jpg", "stickers/1.jpg"],
    ],
)
def test_class_folders_are_classes(tmp_path: Path, names: list[str]) -> None:
    assert len(open_source(write_images(tmp_path, names)).classes) == len(names)


# Names of classes


@pytest.mark.parametrize(
    ("classes", "shown"),
    [
        (["Tabby", "dog", "tabby"], "'Tabby' and 'tabby'."),
        (["cat", "cat "], "'cat' and 'cat '."),
        (["german_shepherd", "German Shepherd"], "'german_shepherd' and 'German Shepherd'."),
        ([unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")], "'caf\u00e9' and 'cafe\\u0301'."),
        (["a", "A", "b", "B", "c", "C", "d", "D"], "'a' and 'A'; 'b' and 'B'; 'c' and 'C'; and 1 more."),
    ],
)
def test_names_that_are_nearly_equal_are_warned_of(classes: list[str], shown: str) -> None:
    for kind in ("class", "multi"):
        (warning,) = list_class_warnings(kind, classes)  # type: ignore[arg-type]
        assert f"count as several classes: {shown} If they are one class, give them one name." in warning
    assert list_class_warnings("value", classes) == []


def test_different_names_and_a_single_class() -> None:
    assert list_class_warnings("class", ["cat", "cats", "dog"]) == []
    (warning,) = list_class_warnings("class", ["photos"])
    assert warning.startswith("All images are of one class (photos)")
    assert list_class_warnings("multi", ["red"]) == []


# Images of both sets


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Six training images and four for evaluation, all different."""
    write_images(tmp_path / "src", [f"train/{c}/{n}.png" for c in ("cat", "dog") for n in range(3)])
    return write_images(tmp_path / "src", [f"val/{c}/{n}.png" for c in ("cat", "dog") for n in range(2)], seed=1)


@pytest.mark.parametrize("mode", ["seekable", "raw"])
def test_images_of_both_sets_are_counted_and_named(split: Path, mode: str) -> None:
    assert pack(split, split.parent / "dst", mode=mode).warnings == ()
    shutil.copy(split / "train/cat/1.png", split / "val/cat/1.png")
    (warning,) = pack(split, split.parent / "dst", mode=mode, overwrite=True).warnings
    assert warning.startswith(
        "1 of 4 evaluation images is in the training set too ('cat/1.png'), so the accuracy comes"
    )
    for name in ("cat/0.png", "dog/0.png", "dog/1.png"):
        shutil.copy(split / "train" / name, split / "val" / name)
    (warning,) = pack(split, split.parent / "dst", mode=mode, overwrite=True).warnings
    assert warning.startswith("4 of 4 evaluation images are in the training set too ('")
    assert warning.count(".png") == 3
    # The folders themselves, scanned.
    train, evaluation = (opening.open(split / part) for part in ("train", "val"))
    assert describe_shared_images(train, evaluation).startswith("4 of 4 evaluation images are in")


def test_an_equal_checksum_alone_is_no_copy(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(split, split.parent / "dst", mode="raw")
    train, evaluation = (opening.open(split.parent / "dst" / part) for part in ("train", "eval"))
    # As in sets of millions of images, by chance.
    monkeypatch.setattr(evaluation, "crc32c", train.crc32c[: len(evaluation)])
    assert describe_shared_images(train, evaluation) == ""


def test_the_training_set_as_evaluation_set(split: Path) -> None:
    pack(split / "train", split.parent / "dst")
    shutil.copytree(split.parent / "dst", split.parent / "copy")
    warning = describe_shared_images(opening.open(split.parent / "dst"), opening.open(split.parent / "copy"))
    assert warning.startswith(f"The evaluation set is the training set ({split.parent / 'dst'}), so its accuracy says")


def test_a_missing_evaluation_set_is_warned_of_unless_it_comes_apart(split: Path) -> None:
    (split / "train").rename(split / "flowers")
    (warning,) = pack(split / "flowers", split.parent / "dst").warnings
    assert warning.startswith("There is no evaluation set")
    assert "--split 0.1" in warning
    for part in ("train", "val"):
        shutil.copytree(split / "flowers", split.parent / "apart" / part)
        assert pack(split.parent / "apart" / part, split.parent / "packed" / part).warnings == ()
    assert pack(split / "flowers", split.parent / "dst", split=0.4, overwrite=True).warnings == ()
