"""Files of other programs: what is read of them, what is said to be left out, and what damaged ones are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lifecycle.interchange._annotations import CVAT, coco_tree, label_studio_tree, write_json

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.lifecycle.interchange import cvat, reading
from headway.lifecycle.interchange.annotations import Box
from headway.lifecycle.interchange.convert import read_annotations, write_annotations


def test_coco_is_read(tmp_path: Path) -> None:
    found = read_annotations(write_json(tmp_path / "a.json", coco_tree()))
    assert found.classes == ("person", "bottle", "toothbrush")
    first, second = found.images
    assert (first.name, first.size, first.labels, second.labels) == ("000397133.jpg", (640, 427), (), ("person",))
    bottle, person = first.boxes
    assert bottle == Box(
        label="bottle",
        form="xywh",
        numbers=(217.62, 240.54, 38.99, 57.75),
        more={"id": 82445, "area": 1481.38, "segmentation": [[224.24, 297.18, 228.29, 297.18]]},
    )
    assert person.more == {"id": 7, "iscrowd": 1}
    assert found.notes == ()


def test_coco_keeps_ids_and_facts_of_its_own(tmp_path: Path) -> None:
    found = read_annotations(write_json(tmp_path / "a.json", coco_tree()))
    notes = write_annotations(tmp_path / "b.json", found, "coco")
    assert json.loads((tmp_path / "b.json").read_text()) == coco_tree()
    assert len(notes) == 1
    assert "without a bbox" in notes[0]


def test_coco_leaves_out_shapes_without_a_box(tmp_path: Path) -> None:
    tree = coco_tree()
    del tree["annotations"][0]["bbox"]
    found = read_annotations(write_json(tmp_path / "a.json", tree))
    assert found.images[0].labels == ()
    assert ["segmentation" in note for note in found.notes] == [True]


def with_entry(*path: Any, value: Any) -> dict[str, Any]:
    """COCO with one entry replaced; `...` removes it."""
    tree: Any = coco_tree()
    place = tree
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    found: dict[str, Any] = tree
    return found


COCO_FAULTS = {
    "no images": (with_entry("images", value=...), "lacks images"),
    "images no list": (with_entry("images", value={}), "images, not a list"),
    "no object": (with_entry("images", 0, value=3), "images[0]"),
    "no category": (with_entry("annotations", 0, "category_id", value=...), "annotations[0].category_id"),
    "unknown category": (with_entry("annotations", 0, "category_id", value=5), "in no category"),
    "unknown image": (with_entry("annotations", 2, "image_id", value=5), "not in images"),
    "id twice": (with_entry("images", 1, "id", value=397133), "twice in images"),
    "category twice": (with_entry("categories", 1, "id", value=1), "twice in categories"),
    "class twice": (with_entry("categories", 1, "name", value="person"), "named twice"),
    "name twice": (with_entry("images", 1, "file_name", value="000397133.jpg"), "named twice"),
    "three numbers": (with_entry("annotations", 0, "bbox", value=[1, 2, 3]), "not four numbers"),
    "endless number": (with_entry("annotations", 0, "bbox", value=[10**400, 2, 3, 4]), "not four numbers"),
    "text in a box": (with_entry("annotations", 0, "bbox", value=[1, 2, 3, "4"]), "not four numbers"),
    "negative width": (with_entry("annotations", 0, "bbox", value=[1, 2, -3, 4]), "negative width"),
    "out of all bounds": (with_entry("annotations", 0, "bbox", value=[1e99, 2, 3, 4]), "four finite numbers"),
    "no size": (with_entry("images", 0, "width", value=-1), "images[0].width"),
    "half a size": (with_entry("images", 0, "width", value=None), "images[0].width"),
    "traversal": (with_entry("images", 0, "file_name", value="a/../../etc/passwd"), "leads out of its folder"),
    "backslashes": (with_entry("images", 0, "file_name", value="..\\x.jpg"), "leads out of its folder"),
    "control character": (with_entry("images", 0, "file_name", value="a\nb.jpg"), "control character"),
    "empty name": (with_entry("images", 0, "file_name", value=" "), "is empty"),
    "empty class": (with_entry("categories", 0, "name", value=""), "is empty"),
    "number as class": (with_entry("categories", 0, "name", value=3), "categories[0].name"),
    "wrong digest": (with_entry("images", 0, "sha256", value="abc"), "64 hexadecimal digits"),
    "digest no text": (with_entry("images", 0, "sha256", value=3), "images[0].sha256"),
}


@pytest.mark.parametrize("fault", COCO_FAULTS)
def test_a_faulty_coco_file_is_refused_with_the_place(fault: str, tmp_path: Path) -> None:
    tree, said = COCO_FAULTS[fault]
    with pytest.raises(DataError) as refused:
        read_annotations(write_json(tmp_path / "a.json", tree), "coco")
    assert said in str(refused.value)
    assert "a.json" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "not a list|lacks|list"),
        ('{"images": [], "images": []}', "twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"images": [], "annotations": [], "categories": [], "info": ' + "[" * 40 + "]" * 40 + "}", "levels deep"),
        ('{"images": [], "annotations": [], "categories": [], "info": {"x": NaN}}', "nan"),
        ('{"images": [], "annotations": [], "categories": [], "info": {"x": 1e999}}', "inf"),
    ],
)
def test_json_that_is_no_coco_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said):
        read_annotations(tmp_path / "a.json", "coco")


def test_cvat_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(CVAT)
    found = read_annotations(tmp_path / "a.xml")
    assert found.classes == ("car", "person")
    first, second = found.images
    assert (first.name, first.size, first.split, first.labels) == ("a/1.jpg", (640, 480), "train", ("person",))
    (box,) = first.boxes
    assert (box.form, box.numbers) == ("corners", (10.5, 20, 110.25, 220))
    assert box.more == {"source": "auto", "occluded": "1", "attributes": {"parked": "true"}}
    assert (second.name, second.boxes) == ("a/2 & 3.jpg", ())
    assert (first.more, second.more) == ({"id": "7", "label_facts": {"person": {"source": "auto"}}}, {"id": "9"})
    assert ["polygon" in note for note in found.notes] == [True]
    write_annotations(tmp_path / "b.xml", found)
    assert read_annotations(tmp_path / "b.xml") == found
    written = (tmp_path / "b.xml").read_text()
    for text in ('<image id="7" ', '<image id="9" ', '<tag source="auto" label="person"/>'):
        assert text in written


ENTITY = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x {}>]><annotations><version>&x;</version></annotations>'
LAUGHS = "".join(f'<!ENTITY x{n} "{f"&x{n - 1};" * 10}">' for n in range(1, 10))
CVAT_FAULTS = {
    "entity": (ENTITY.format('"1.1"'), "document type"),
    "external entity": (ENTITY.format('SYSTEM "file:///etc/passwd"'), "document type"),
    "parameter entity": ('<!DOCTYPE a [<!ENTITY % x SYSTEM "http://127.0.0.1:1/x">%x;]><annotations/>', "document"),
    "external document type": ('<!DOCTYPE annotations SYSTEM "http://127.0.0.1:1/x"><annotations/>', "document type"),
    "billion laughs": (f'<!DOCTYPE a [<!ENTITY x0 "ha">{LAUGHS}]><annotations>&x9;</annotations>', "document type"),
    "unknown entity": ("<annotations>&x;</annotations>", "not XML"),
    "depth": ("<annotations>" * 50_000, "16 levels"),
    "truncated": (CVAT[:700], "not XML"),
    "empty": ("", "not XML"),
    "zip": ("PK\x03\x04", "unpack an archive"),
    "root": ("<html></html>", "its root is 'html'"),
    "version": (CVAT.replace("1.1", "1.0"), "its version is '1.0'"),
    "video": ("<annotations><version>1.1</version><track/></annotations>", "CVAT for video"),
    "no name": (CVAT.replace('name="a/1.jpg" ', ""), "lacks 'name'"),
    "no width": (CVAT.replace('width="640" ', ""), "lacks 'width'"),
    "width 0": (CVAT.replace('width="640"', 'width="0"'), "'0' as width"),
    "width no number": (CVAT.replace('width="640"', 'width="6_4"'), "as width"),
    "no label": (CVAT.replace('<box label="car" ', "<box "), "lacks 'label'"),
    "no corner": (CVAT.replace('xtl="10.50" ', ""), "lacks 'xtl'"),
    "nan": (CVAT.replace('xtl="10.50"', 'xtl="nan"'), "'nan' as xtl"),
    "underscore": (CVAT.replace('xtl="10.50"', 'xtl="1_0"'), "'1_0' as xtl"),
    "corners": (CVAT.replace('xtl="10.50"', 'xtl="500"'), "negative width"),
    "traversal": (CVAT.replace("a/1.jpg", "../1.jpg"), "leads out of its folder"),
    "newline": (CVAT.replace("a/1.jpg", "a&#10;1.jpg"), "control character"),
}


@pytest.mark.parametrize("fault", CVAT_FAULTS)
def test_a_faulty_or_hostile_cvat_file_is_refused(fault: str, tmp_path: Path) -> None:
    text, said = CVAT_FAULTS[fault]
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(DataError) as refused:
        read_annotations(tmp_path / "a.xml")
    assert said in str(refused.value)


def test_xml_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.xml").write_text(CVAT)
    monkeypatch.setattr(cvat, "MOST_TEXT", 10)
    with pytest.raises(DataError, match="more than 10 characters"):
        read_annotations(tmp_path / "a.xml")
    (tmp_path / "a.xml").write_text("<annotations><version>" + "1" * 20 + "</version></annotations>")
    with pytest.raises(DataError, match="a text of more than 10"):
        read_annotations(tmp_path / "a.xml")
    monkeypatch.setattr(cvat, "MOST_BYTES", 30)
    with pytest.raises(DataError, match="more than the 30 bytes"):
        read_annotations(tmp_path / "a.xml")


def test_json_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", coco_tree())
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="more than the 100"):
        read_annotations(tmp_path / "a.json")


def test_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(CVAT.replace("utf-8", "utf-16").encode("utf-16"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_annotations(tmp_path / "a.xml")
    (tmp_path / "a.xml").write_bytes(CVAT.replace("a/1.jpg", "\xe4.jpg").encode("latin-1"))
    with pytest.raises(DataError, match="not XML"):
        read_annotations(tmp_path / "a.xml")
    (tmp_path / "a.json").write_bytes(json.dumps(coco_tree()).encode("utf-16"))
    with pytest.raises(HeadwayError, match="not UTF-8"):
        read_annotations(tmp_path / "a.json", "coco")


def test_label_studio_is_read(tmp_path: Path) -> None:
    found = read_annotations(write_json(tmp_path / "a.json", label_studio_tree()))
    first, second = found.images
    assert found.classes == ("Moonwalker", "Planet", "Space")
    assert (first.name, first.labels, first.size, first.by) == (
        "https://example.com/1.jpg",
        ("Space",),
        (600, 403),
        "ann@example.com",
    )
    numbers = (50.8, 5.869797225186766, 12.4, 10.458911419423693)
    assert [(box.label, box.form, box.numbers) for box in first.boxes] == [
        ("Moonwalker", "percent", numbers),
        ("Planet", "percent", numbers),
    ]
    assert first.boxes[0].more == {"id": "t5sp3TyXPo", "from_name": "tag", "to_name": "img", "rotation": 30}
    assert first.more == {
        "id": 1,
        "project": 83,
        "data": {"camera": "left"},
        "annotation": {"id": 1002, "completed_by": {"id": 10, "email": "ann@example.com"}},
        "choices": {"from_name": "choice", "to_name": "img"},
    }
    assert (second.name, second.labels, second.boxes) == ("photos/a b.jpg", (), ())
    assert ["brushlabels" in note for note in found.notes] == [True]
    write_annotations(tmp_path / "b.json", found, "label-studio")
    assert read_annotations(tmp_path / "b.json") == found
    # The names of the fields are those of the project, so that it can take the file.
    results = json.loads((tmp_path / "b.json").read_text())[0]["annotations"][0]["result"]
    assert {(one["type"], one["from_name"], one["to_name"]) for one in results} == {
        ("choices", "choice", "img"),
        ("rectanglelabels", "tag", "img"),
    }


def test_a_task_that_was_found_empty_stays_annotated(tmp_path: Path) -> None:
    tree = [{"data": {"image": "a.jpg"}, "annotations": [{"result": [], "completed_by": 4}]}]
    tree.append({"data": {"image": "b.jpg"}, "annotations": []})
    write_annotations(tmp_path / "b.json", read_annotations(write_json(tmp_path / "a.json", tree)), "label-studio")
    written = json.loads((tmp_path / "b.json").read_text())
    assert [task["annotations"] for task in written] == [[{"completed_by": 4, "result": []}], []]


def test_of_several_annotators_the_ground_truth_counts_then_the_newest(tmp_path: Path) -> None:
    def annotate(choice: str, **more: Any) -> dict[str, Any]:
        result = {"type": "choices", "from_name": "c", "to_name": "i", "value": {"choices": [choice]}}
        return {"result": [result], **more}

    old, new = annotate("old", updated_at="2026-01-01T00:00:00Z"), annotate("new", updated_at="2026-02-01T00:00:00Z")
    truth, gone = annotate("truth", ground_truth=True), annotate("gone", was_cancelled=True)
    for entries, right in (([new, old], "new"), ([truth, old], "truth"), ([old, gone], "old"), ([gone], None)):
        path = write_json(tmp_path / "a.json", [{"data": {"image": "a.jpg"}, "annotations": entries}])
        found = read_annotations(path)
        assert found.images[0].labels == ((right,) if right else ())
        assert bool(found.notes) == (len(entries) > 1 and gone not in entries)


def test_two_fields_of_choices_are_told_apart_by_name(tmp_path: Path) -> None:
    tree = label_studio_tree()
    other = {"type": "choices", "from_name": "light", "to_name": "img", "value": {"choices": ["dim"]}}
    tree[1]["annotations"] = [{"result": [other]}]
    path = write_json(tmp_path / "a.json", tree)
    with pytest.raises(DataError, match="'choice' and 'light': name one with --field"):
        read_annotations(path)
    found = read_annotations(path, field="light")
    assert [image.labels for image in found.images] == [(), ("dim",)]
    assert "Left out the choices of 'choice': only those of 'light' are read." in found.notes
    assert [image.labels for image in read_annotations(path, field="choice").images] == [("Space",), ()]
    with pytest.raises(DataError, match="no field of choices 'x'; it has 'choice', 'light'"):
        read_annotations(path, field="x")
    with pytest.raises(UsageError, match="only files of Label Studio"):
        read_annotations(write_json(tmp_path / "b.json", coco_tree()), field="x")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "not a list of tasks"),
        ([3], "not an object"),
        ([{}], "[0].data"),
        ([{"data": {}}], "[0].data.image"),
        ([{"data": {"image": "a"}, "annotations": {}}], "[0].annotations"),
        ([{"data": {"image": "a"}, "annotations": [{}]}], "annotations[0].result"),
        ([{"data": {"image": "a"}, "annotations": [{"result": [{}]}]}], "result[0].type"),
        ([{"data": {"image": "a"}, "annotations": [{"result": [{"type": "choices"}]}]}], "result[0].value"),
        ([{"data": {"image": "a"}, "annotations": [{"result": [{"type": "choices", "value": {}}]}]}], "choices"),
        (
            [
                {
                    "data": {"image": "a"},
                    "annotations": [
                        {"result": [{"type": "rectanglelabels", "value": {"rectanglelabels": ["a"], "x": "1"}}]}
                    ],
                }
            ],
            "value.x",
        ),
        (
            [
                {
                    "data": {"image": "a"},
                    "annotations": [
                        {"result": [{"type": "rectanglelabels", "value": {"rectanglelabels": ["a"], "x": 10**400}}]}
                    ],
                }
            ],
            "value.x",
        ),
    ],
)
def test_a_faulty_file_of_label_studio_is_refused_with_the_place(tree: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read_annotations(write_json(tmp_path / "a.json", tree), "label-studio")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "label\ncat\n", "lacks path"),
        ("a.csv", "path,label\na.jpg\n", "line 2: the line has 1 fields"),
        ("a.csv", "path,path\na.jpg,b.jpg\n", "column 'path' occurs twice"),
        ("a.csv", 'path,label\n"a.jpg,cat\n', "not valid CSV"),
        ("a.csv", "path,label,labels\na.jpg,cat,dog\n", "both 'label' and 'labels'"),
        ("a.csv", "path,label,boxes\na.jpg,cat,[\n", "'boxes' is damaged"),
        ("a.csv", "path,label,width\na.jpg,cat,12\n", "height"),
        ("a.csv", "path,label,width,height\na.jpg,cat,1e3,12\n", "width"),
        ("a.csv", "path,label\na.jpg,cat\na.jpg,dog\n", "named twice"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", "{\n", "line 1: this is not a line of JSON"),
        ("a.jsonl", '{"path": "a.jpg"}\n{"path": 3}\n', "line 2"),
        ("a.jsonl", '{"path": "a.jpg", "labels": "cat"}\n', "labels, not a list"),
        ("a.jsonl", '{"path": "a.jpg", "label": true}\n', "not a class name"),
        ("a.jsonl", '{"path": "a.jpg", "boxes": {"label": "a"}}\n', "boxes, not a list"),
        ("a.jsonl", '{"path": "a.jpg", "boxes": [{"label": "a"}]}\n', "boxes[0]"),
        ("a.jsonl", '{"path": "a.jpg", "boxes": [{"label": "a", "xywh": [1, 2, 3]}]}\n', "boxes[0].xywh"),
        ("a.jsonl", '{"path": "a.jpg", "boxes": [{"label": "a", "xywh": [0,0,1,1], "more": 3}]}\n', "boxes[0].more"),
        ("a.jsonl", '{"path": "a.jpg", "note": NaN}\n', "nan"),
    ],
)
def test_a_faulty_list_is_refused_with_the_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as refused:
        read_annotations(tmp_path / name)
    assert said in str(refused.value)


def test_a_list_keeps_columns_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,label,camera\na.jpg,cat,left\nb.jpg,,right\n")
    found = read_annotations(tmp_path / "a.csv")
    assert [image.labels for image in found.images] == [("cat",), ()]
    notes = write_annotations(tmp_path / "b.csv", found)
    assert (tmp_path / "b.csv").read_text() == "path,label,camera\na.jpg,cat,left\nb.jpg,,right\n"
    assert notes == ("1 image without a label: headway pack refuses such a list.",)


def test_numbers_are_class_names_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"path": "a.jpg", "label": 7}\n\n{"path": "b.jpg", "labels": [8, "x"]}\n')
    found = read_annotations(tmp_path / "a.jsonl")
    assert [image.labels for image in found.images] == [("7",), ("8", "x")]
