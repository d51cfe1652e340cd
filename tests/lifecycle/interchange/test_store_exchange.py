"""Files of annotations into a data set with versions, and out again, equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import headway, refused
from tests.lifecycle.interchange._annotations import write_json
from tests.lifecycle.store._pictures import draw, state, write

from headway.core.untrusted_json import JsonError
from headway.lifecycle.interchange.annotations import AnnotatedImage, Box
from headway.lifecycle.interchange.convert import read_annotations
from headway.lifecycle.interchange.store_exchange import add_annotations, export_version, is_annotation_file
from headway.lifecycle.interchange.store_facts import build_facts, read_facts
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.store import Store

NAMES = ("a/1.png", "2.png", "3 ü.png", "4.png")
ENDINGS = {"coco": "json", "cvat": "xml", "label-studio": "json", "list": "jsonl"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write(tmp_path / "images", {name: number for number, name in enumerate(NAMES)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def new_store(folder: Path) -> Store:
    made = Store.make(folder)
    made.create("pets", splits={"train": 0.5, "eval": 0.5})
    return made


def address(store: Store, rest: str = "") -> str:
    return f"store:{store.folder}//pets{rest}"


def coco(folder: Path) -> Path:
    """Four images of 2 x 2 pixels: with a label, with boxes, with both, and with nothing."""
    extra: list[dict[str, Any]] = [{"license": 4}, {"split": "val"}, {"split": "train", "labelled_by": "ann"}, {}]
    images = [
        {"id": 10 + number, "file_name": name, "width": 2, "height": 2, **more}
        for number, (name, more) in enumerate(zip(NAMES, extra, strict=True))
    ]
    annotations = [
        {"id": 71, "image_id": 10, "category_id": 5, "score": 0.5},
        {"id": 72, "image_id": 11, "category_id": 6, "bbox": [0, 0.25, 1, 1.5], "iscrowd": 1, "segmentation": [[0, 1]]},
        {"id": 73, "image_id": 12, "category_id": 5, "bbox": [0, 0, 2, 2]},
        {"id": 74, "image_id": 12, "category_id": 6},
    ]
    categories = [{"id": 5, "name": "cat", "supercategory": ""}, {"id": 6, "name": "dog", "supercategory": ""}]
    return write_json(folder / "coco.json", {"images": images, "annotations": annotations, "categories": categories})


def cvat(folder: Path) -> Path:
    inner = [
        '<tag label="cat" source="auto"/>',
        '<box label="dog" occluded="1" xtl="0" ytl="0.5" xbr="1.5" ybr="2"><attribute name="age">3</attribute></box>',
        '<box label="cat" xtl="0" ytl="0" xbr="1" ybr="1"/><tag label="dog"/>',
        "",
    ]
    subsets = ["", ' subset="Validation"', ' subset="Train" labelled_by="ann"', ""]
    images = "".join(
        f'<image id="{30 + number}" name="{name}" width="2" height="2"{subset}>{text}</image>'
        for number, (name, text, subset) in enumerate(zip(NAMES, inner, subsets, strict=True))
    )
    path = folder / "cvat.xml"
    path.write_text(f"<annotations><version>1.1</version>{images}</annotations>", encoding="utf-8")
    return path


def label_studio(folder: Path) -> Path:
    def box(label: str, x: float) -> dict[str, Any]:
        value = {"x": x, "y": 0, "width": 33.3, "height": 100 / 3, "rotation": 5, "rectanglelabels": [label]}
        head = {"id": f"r{x}", "from_name": "tag", "to_name": "img", "type": "rectanglelabels"}
        return {**head, "original_width": 2, "original_height": 2, "value": value}

    def choice(label: str) -> dict[str, Any]:
        return {"from_name": "c", "to_name": "img", "type": "choices", "value": {"choices": [label]}}

    results = [[choice("cat")], [box("dog", 1), box("dog", 2)], [choice("dog"), box("cat", 0)], []]
    tasks = [
        {
            "id": 50 + number,
            "data": {"image": f"/data/local-files/?d={name}", "camera": "left"} | ({"split": "eval"} if number else {}),
            "annotations": [{"id": 900 + number, "result": result, "completed_by": {"email": "ann@example.com"}}],
        }
        for number, (name, result) in enumerate(zip(NAMES, results, strict=True))
    ]
    return write_json(folder / "tasks.json", tasks)


def listed(folder: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"path": NAMES[0], "label": "cat", "score": 0.5},
        {"path": NAMES[1], "boxes": [{"label": "dog", "xywh": [0, 0, 1, 2], "more": {"a": 1}}], "split": "train"},
        {"path": NAMES[2], "label": "dog", "by": "ann", "split": "eval", "width": 2, "height": 2}
        | {"boxes": [{"label": "cat", "corners": [0, 0.5, 1, 2]}, {"label": "cat", "percent": [0, 0, 50, 33.3]}]},
        {"path": NAMES[3]},
    ]
    path = folder / "list.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {"coco": coco, "cvat": cvat, "label-studio": label_studio, "list": listed}


@pytest.mark.parametrize("form", MAKERS)
def test_a_version_that_was_written_gives_the_same_version(
    form: str, store: Store, images: Path, tmp_path: Path
) -> None:
    source = MAKERS[form](images)
    outcome, notes = add_annotations(store, "pets", source, by="eve")
    assert outcome.version.counts["added"] == 4
    assert not outcome.rejected
    assert notes == (("Columns not kept: score.",) if form == "list" else ())
    found = {one.name: one for one in store.list_samples("pets")}
    assert [found[name].label for name in NAMES] == ["cat", None, "dog", None]
    assert [found[name].split for name in NAMES[1::2]] == ["unlabelled"] * 2
    assert [len((found[name].annotations or {}).get("boxes", ())) for name in NAMES] == [
        *((0, 2, 1, 0) if form == "label-studio" else (0, 1, 2, 0) if form == "list" else (0, 1, 1, 0)),
    ]
    setters = {store.list_setters("pets")[found[name].sample] for name in (NAMES[0], NAMES[2])}
    assert setters == ({"ann@example.com"} if form == "label-studio" else {"eve", "ann"})
    # Out, with the images, and into another store: the same version, and who set the labels.
    out = tmp_path / "out"
    out.mkdir()
    written = out / f"file.{ENDINGS[form]}"
    done = export_version(address(store), written, target=form, images=out / "photos")
    assert done.images == 4
    assert {name: (out / "photos" / name).read_bytes() for name in NAMES} == {
        name: draw(number) for number, name in enumerate(NAMES)
    }
    other = new_store(tmp_path / "other")
    again, _ = add_annotations(other, "pets", written, source=form, images=out / "photos", by="somebody else")
    assert again.version.version == outcome.version.version
    assert other.list_setters("pets") == store.list_setters("pets")
    # And by CSV, where names start from the folder of the list too.
    if form == "list":
        export_version(address(store), images / "file.csv")
        third = new_store(tmp_path / "third")
        by_csv, _ = add_annotations(third, "pets", images / "file.csv")
        assert by_csv.version.version == outcome.version.version


@pytest.mark.parametrize("form", [form for form in MAKERS if form != "list"])
def test_each_format_gets_the_boxes_of_the_others(form: str, store: Store, images: Path, tmp_path: Path) -> None:
    add_annotations(store, "pets", MAKERS[form](images))
    plain = read_annotations(MAKERS[form](images), form).to_plain()
    expected = {image.name: (image.labels, image.boxes) for image in plain.images}
    for target, ending in ENDINGS.items():
        out = tmp_path / f"out.{target}.{ending}"
        done = export_version(address(store), out, target=target)
        has_note = any(f"that only {form} has a form for" in note for note in done.notes)
        assert has_note == (target != form)
        found = read_annotations(out, target)
        assert {image.name: (image.labels, image.boxes) for image in found.to_plain().images} == {
            name: (labels, tuple(approximate(box) for box in boxes)) for name, (labels, boxes) in expected.items()
        }
        # What came from one format is not written as a fact of another one.
        if target != form and target != "list":
            assert not any(box.more.get("id") in (72, 73) for image in found.images for box in image.boxes)


def approximate(box: Box) -> Any:
    return ApproximateBox(box)


class ApproximateBox:
    """Equal to a box whose numbers differ by a millionth of a pixel."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Box)
        return other.label == self.box.label and other.numbers == pytest.approx(self.box.numbers, abs=1e-6)

    __hash__ = None  # type: ignore[assignment]


def test_the_verbs_take_and_write_files(store: Store, images: Path, tmp_path: Path) -> None:
    source = coco(tmp_path)
    said = refused("dataset", "add", address(store), source, status=1)
    assert "there is no image 'a/1.png' here, nor 3 others" in said
    said = headway("dataset", "add", address(store), source, "--images", images, "--prefix", "new/", "--by", "eve")
    assert "4 added" in said.out
    assert sorted(state(store, "pets")) == sorted(f"new/{name}" for name in NAMES)
    assert state(store, "pets")["new/3 ü.png"][:2] == ("dog", "train")
    (shown,) = (
        json.loads(line)
        for line in headway("dataset", "show", address(store), "--samples", "--json").out.splitlines()
        if "2.png" in line
    )
    assert shown["annotations"]["boxes"][0]["xywh"] == [0, 0.25, 1, 1.5]
    out = tmp_path / "out.xml"
    said = headway("annotations", "export", address(store), out, "--images", tmp_path / "photos")
    assert f"Wrote {out} (cvat). 4 images: 2 classes, 2 boxes, 2 of the images without a label." in said.out
    assert "Wrote 4 of the images" in said.out
    assert "Left out facts of 4 images that only coco has a form for." in said.err
    subsets = {element.get("name"): element.get("subset") for element in ElementTree.parse(out).iter("image")}
    assert sorted(map(str, subsets)) == sorted(f"new/{name}" for name in NAMES)
    # `val` means the split for evaluation. That of an image without a label waits until it has one.
    assert subsets["new/2.png"] == "eval"
    store.label("pets", {"new/2.png": "cat"})
    assert state(store, "pets")["new/2.png"][1] == "eval"
    store.label("pets", {"new/2.png": None})
    assert "this file exists" in refused("annotations", "export", address(store), out, status=2)
    # One split alone. Images that are there stay, and another image is not replaced.
    split = address(store, "/unlabelled")
    said = headway("annotations", "export", split, out, "--overwrite", "--images", tmp_path / "photos", "--json")
    assert (said.json()["images"], said.json()["written_images"]) == (2, 0)
    (tmp_path / "photos/new/2.png").write_bytes(b"mine")
    arguments = ("annotations", "export", split, tmp_path / "b.xml", "--images", tmp_path / "photos")
    assert "is another image" in refused(*arguments, status=2)
    assert (tmp_path / "photos/new/2.png").read_bytes() == b"mine"


def test_what_does_not_fit_is_refused_before_anything_is_added(store: Store, images: Path, tmp_path: Path) -> None:
    before = store.resolve("pets").version
    rows = {
        "two.jsonl": ('{"path": "2.png", "labels": ["cat", "dog"]}\n', 2, "has 2 labels, and a store keeps one class"),
        "number.csv": ("path,value\n2.png,1.5\n", 2, "its labels are numbers"),
        "digest.jsonl": (
            json.dumps({"path": "2.png", "label": "cat", "sha256": "0" * 64}) + "\n",
            1,
            "another SHA-256 than its annotations say",
        ),
        "outside.csv": ("path,label\n../x.png,cat\n", 1, "there is no image '../x.png' here"),
        "absolute.json": (
            json.dumps(
                {
                    "images": [{"id": 1, "file_name": str(images / "2.png"), "width": 2, "height": 2}],
                    "annotations": [],
                    "categories": [],
                }
            ),
            1,
            "has an absolute name",
        ),
        "url.json": ('[{"data": {"image": "https://example.com/1.jpg"}}]', 1, "there is no image 'https:"),
    }
    for name, (text, status, said) in rows.items():
        (images / name).write_text(text)
        assert said in refused("dataset", "add", address(store), images / name, status=status), name
    for options, said in (
        (("--unlabelled",), "--unlabelled takes a folder"),
        (("--field", "x"), "only files of Label Studio"),
        (("--from", "cocoo"), "Did you mean 'coco'?"),
    ):
        assert said in refused("dataset", "add", address(store), images / "two.jsonl", *options, status=2)
    said = refused("dataset", "add", address(store), images, "--images", images, status=2)
    assert "--images belongs to files of annotations" in said
    assert store.resolve("pets").version == before


def test_a_split_that_the_data_set_lacks_is_told(store: Store, images: Path) -> None:
    (images / "a.csv").write_text("path,label,split\n2.png,cat,holdout\n4.png,dog,TRAIN\n")
    _, notes = add_annotations(store, "pets", images / "a.csv")
    assert ["has no split 'holdout', but eval, train" in note for note in notes] == [True]
    assert state(store, "pets")["4.png"][:2] == ("dog", "train")
    (images / "b.csv").write_text("path,label,split\na/1.png,cat,holdout\n")
    assert add_annotations(store, "pets", images / "b.csv", split="eval")[1] == ()
    assert state(store, "pets")["a/1.png"][1] == "eval"


def test_what_is_a_file_of_annotations(images: Path) -> None:
    for path in (coco(images), cvat(images), label_studio(images), listed(images)):
        assert is_annotation_file(str(path))
    # A list of JSON lines, which `headway pack` reads under this name too.
    (images / "lines.json").write_text('{"path": "2.png", "label": "cat"}\n')
    for source in (images / "lines.json", images, images / "none.csv", "store:pets@v1", "https://example.com/a.json"):
        assert not is_annotation_file(str(source))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["label", "xywh", "id", "data", "annotation", "a<b"]) | st.text(), inner)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["boxes", "size", "by", "more", "x"]), JSON, max_size=3),
    st.none() | st.dictionaries(st.sampled_from(["id", "data", "annotation", "choices", "label_facts", "a<b"]), JSON),
    st.sampled_from(["coco", "cvat", "label-studio", "list", "other"]),
)
def test_facts_from_anybody_are_read_or_refused(tree: dict[str, Any], more: dict[str, Any] | None, form: str) -> None:
    """The service lets clients put any JSON object beside a label."""
    if more is not None:
        tree = {
            **tree,
            "more": more,
            "format": form,
            "boxes": [{"label": "a", "xywh": [0, 0, 1, 1], "more": more}],
        }
    try:
        facts = read_facts(tree)
    except JsonError:
        return
    image = AnnotatedImage(name="a.png", boxes=facts.boxes, size=facts.size, by=facts.by, more=facts.more)
    assert read_facts(build_facts(image, facts.source) or None).boxes == facts.boxes


def test_annotations_that_no_file_has_a_form_for_are_told(store: Store, images: Path, tmp_path: Path) -> None:
    """Whatever a client has put there, the version is written, and the file is one of its format."""
    add_annotations(store, "pets", listed(images))
    hostile = {"id": [1], "data": 3, "annotation": 4, "choices": [], "label_facts": {"cat": 7}, 'a="1"><b': "x"}
    box = {"label": "cat", "xywh": [0, 0, 1, 1], "more": hostile}
    changes: list[dict[str, Any]] = [{"note": "x"}, {"boxes": "all of it"}]
    for form, ending in ENDINGS.items():
        changes[1:] = [{"boxes": "all of it"}, {"boxes": [box], "format": form, "more": hostile}]
        store.apply(
            "pets",
            [
                Change(operation="label", name=name, label="cat", annotations=facts)
                for name, facts in zip(NAMES, changes, strict=False)
            ],
        )
        out = tmp_path / f"{form}.{ending}"
        done = export_version(address(store), out, target=form)
        assert ["of 2 images that are not those of a file" in note for note in done.notes].count(True) == 1
        found = {image.name: image for image in read_annotations(out, form).images}
        assert [len(found[name].boxes) for name in NAMES] == [0, 0, 1, 0]
        assert found[NAMES[2]].labels == ("cat",)
