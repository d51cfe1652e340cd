"""`headway annotations`: from one program into another, and into a list that `headway pack` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tests._support import headway, refused
from tests.lifecycle.interchange._annotations import CVAT, coco_tree, label_studio_tree, write_json

from headway.data import opening
from headway.data.formats.listing import list_file
from headway.lifecycle.interchange.convert import guess_format, read_annotations


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two images, and `labels.jsonl` outside of it that names them."""
    folder = tmp_path / "photos"
    (folder / "a").mkdir(parents=True)
    Image.new("RGB", (20, 10)).save(folder / "a/1.png")
    Image.new("RGB", (30, 40)).save(folder / "2.png")
    rows = [{"path": "photos/a/1.png", "label": "cat", "by": "ann"}, {"path": "photos/2.png", "label": "dog"}]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_list_becomes_the_file_of_each_program_and_a_list_again(photos: Path, tmp_path: Path) -> None:
    names = {"coco": "coco.json", "cvat": "cvat.xml", "label-studio": "tasks.json"}
    for form, name in names.items():
        made = tmp_path / "out" / name
        made.parent.mkdir(exist_ok=True)
        said = headway("annotations", "convert", tmp_path / "labels.jsonl", made, "--to", form, "--images", photos)
        assert f"Wrote {made} ({form}). 2 images: 2 classes, 0 boxes." in said.out
        found = read_annotations(made, form)
        assert [(image.name, image.size, image.by) for image in found.images] == [
            ("a/1.png", (20, 10), "ann"),
            ("2.png", (30, 40), ""),
        ]
        assert all(len(image.sha256) == 64 for image in found.images)
        back = tmp_path / "out" / f"{form}.csv"
        said = headway("annotations", "convert", made, back, "--from", form, "--images", photos, "--json")
        assert said.json()["to"] == "list"
        listed = list_file(back)
        assert listed.names == ("../photos/a/1.png", "../photos/2.png")
        assert [listed.classes[label] for label in listed.labels] == ["cat", "dog"]
        # And that list once more: its names lead out of its folder, and are turned into names inside the images.
        headway("annotations", "convert", back, made, "--to", form, "--images", photos, "--overwrite")
        assert read_annotations(made, form) == found


def test_the_next_step_packs_what_was_labelled(photos: Path, tmp_path: Path) -> None:
    tree = label_studio_tree()
    tree[0]["data"]["image"], tree[1]["data"]["image"] = "a/1.png", "/data/local-files/?d=2.png"
    results = tree[0]["annotations"][1]["result"]
    tree[1]["annotations"] = [{"result": [results[1]]}]
    source, made = write_json(tmp_path / "tasks.json", tree), photos / "labels.csv"
    said = headway("annotations", "convert", source, made)
    command = said.out.splitlines()[-1].removeprefix("Next: headway ").replace("FOLDER", str(tmp_path / "packed"))
    # Boxes would be lost, which the command says by naming the columns.
    assert command.endswith("--columns path,label")
    assert "brushlabels" in said.err
    headway(*command.split())
    packed = opening.open(tmp_path / "packed")
    assert packed.classes == ("Space",)
    assert len(packed) == 2
    packed.close()


def test_what_is_lost_on_the_way_is_said(tmp_path: Path) -> None:
    source = write_json(tmp_path / "coco.json", coco_tree())
    said = headway("annotations", "convert", source, tmp_path / "a.xml")
    assert "Left out facts of 2 boxes that only coco has a form for." in said.err
    assert headway("annotations", "convert", source, tmp_path / "b.jsonl", "--json").json() == {
        "from": "coco",
        "to": "list",
        "images": 2,
        "unlabelled": 1,
        "boxes": 2,
        "classes": 3,
        "notes": [
            "A list has no classes without an image: toothbrush.",
            "1 image without a label: headway pack refuses such a list.",
        ],
        "file": str(tmp_path / "b.jsonl"),
    }
    # A list keeps the boxes whole, so they come back.
    headway("annotations", "convert", tmp_path / "b.jsonl", tmp_path / "c.json", "--to", "coco")
    before, after = read_annotations(source), read_annotations(tmp_path / "c.json")
    assert after.to_plain().images == before.to_plain().images


def test_show_counts_by_class(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(CVAT)
    said = headway("annotations", "show", tmp_path / "a.xml")
    assert "2 images: 2 classes, 1 box, 1 of the images without a label." in said.out
    assert "  car: 0 labels, 1 boxes" in said.out
    found = headway("annotations", "show", tmp_path / "a.xml", "--json").json()
    assert (found["labels"], found["boxes_by_class"]) == ({"car": 0, "person": 1}, {"car": 1, "person": 0})
    assert len(found["notes"]) == 1


def test_formats_are_guessed_by_ending_and_first_character(tmp_path: Path) -> None:
    names = {"a.csv": "list", "b.JSONL": "list", "c.xml": "cvat"}
    assert {name: guess_format(tmp_path / name) for name in names} == names
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf \n[]")
    (tmp_path / "e.json").write_text(" {}")
    assert [guess_format(tmp_path / name) for name in ("d.json", "e.json")] == ["label-studio", "coco"]


def test_the_size_of_an_image_is_asked_for_where_a_format_needs_it(photos: Path, tmp_path: Path) -> None:
    for name, form in (("a.json", "coco"), ("a.xml", "cvat")):
        assert "--images FOLDER" in refused(
            "annotations", "convert", tmp_path / "labels.jsonl", tmp_path / name, "--to", form, status=2
        )
    # Tasks without boxes need none.
    headway("annotations", "convert", tmp_path / "labels.jsonl", tmp_path / "a.json", "--to", "label-studio")


@pytest.mark.parametrize("name", ["/etc/passwd", "C:\\\\secret\\\\1.jpg"])
def test_an_absolute_name_of_another_program_is_no_file_to_read(tmp_path: Path, name: str) -> None:
    image = f'{{"id": 1, "file_name": "{name}", "width": 4, "height": 4}}'
    (tmp_path / "a.json").write_text(f'{{"images": [{image}], "annotations": [], "categories": []}}')
    for options in ((tmp_path / "labels.csv",), (tmp_path / "b.xml", "--images", tmp_path)):
        said = refused("annotations", "convert", tmp_path / "a.json", *options, status=1)
        assert "has an absolute name" in said
    headway("annotations", "convert", tmp_path / "a.json", tmp_path / "c.json", "--to", "label-studio")


def test_images_that_are_missing_outside_or_damaged_are_refused(photos: Path, tmp_path: Path) -> None:
    labels, made = tmp_path / "labels.jsonl", tmp_path / "a.xml"
    said = refused("annotations", "convert", labels, made, "--images", tmp_path / "photos/a", status=1)
    assert "there is no image '../2.png' here" in said
    (photos / "2.png").write_bytes(b"no image")
    assert "2.png: this is not an image" in refused(
        "annotations", "convert", labels, made, "--images", photos, status=1
    )
    assert not made.exists()


def test_other_sizes_than_the_file_says_are_told(photos: Path, tmp_path: Path) -> None:
    rows = '{"path": "photos/a/1.png", "label": "cat", "width": 10, "height": 20, "sha256": "' + "0" * 64 + '"}\n'
    (tmp_path / "labels.jsonl").write_text(rows)
    said = headway("annotations", "convert", tmp_path / "labels.jsonl", tmp_path / "a.xml", "--images", photos)
    assert "1 image of another size" in said.err
    assert "1 image of another SHA-256" in said.err
    assert read_annotations(tmp_path / "a.xml").images[0].size == (10, 20)


def test_wrong_usage_is_refused_before_anything_is_written(photos: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.jsonl"
    for arguments, said in (
        ((tmp_path / "none.json", tmp_path / "a.csv"), "no such file"),
        ((labels, tmp_path / "a.json"), "--to: coco, cvat"),
        ((labels, tmp_path / "a.txt"), "--to"),
        ((labels, tmp_path / "a.json", "--to", "cocoo"), "Did you mean 'coco'?"),
        ((labels, tmp_path / "a.json", "--to", "list"), ".csv or .jsonl"),
        ((labels, tmp_path / "a.csv", "--to", "coco"), ".json"),
        ((labels, labels), "this file exists"),
        ((labels, tmp_path / "none/a.csv"), "nothing can be written there"),
        ((tmp_path / "photos/2.png", tmp_path / "a.csv"), "--from"),
        ((labels, tmp_path / "a.csv", "--from", "lists"), "Did you mean 'list'?"),
    ):
        assert said in refused("annotations", "convert", *arguments, status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.jsonl", "photos"]


def test_text_of_others_cannot_command_the_terminal(tmp_path: Path) -> None:
    tree = coco_tree()
    tree["images"][0]["file_name"] = "\x1b[2J.jpg"
    said = refused("annotations", "show", write_json(tmp_path / "a.json", tree), status=1)
    assert "\x1b" not in said
