"""COCO files of instances: `images`, `annotations` and `categories` as one JSON object.

COCO has boxes, and no labels of whole images. An annotation without `bbox` is read and written as such a label; other
programs ignore it, or refuse it. Images have three entries of our own: `sha256`, `split` and `labelled_by`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.text_format import pluralise
from headway.core.untrusted_json import JsonError, expect_entries, is_object, is_text, is_whole_number
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Box, convert_box
from headway.lifecycle.interchange.reading import (
    ID,
    count_note,
    explain_format,
    get_numbers,
    get_size,
    get_text,
    read_json,
)
from headway.lifecycle.interchange.rendered import LABEL_FACTS, Rendered, expect_size, pop_objects, take_more

SOURCE = "coco"
_IMAGE = ("file_name", "width", "height", "sha256", "split", "labelled_by")
_BOX = ("image_id", "category_id", "bbox")
# Shapes of annotations that have no box, and are not labels of whole images either.
_SHAPES = ("segmentation", "keypoints", "segments_info", "counts")
_Labels = dict[str, dict[str, Any]]
"""Labels of one image, each with the other facts of its annotation, such as its id."""


def read_coco(path: Path) -> Annotations:
    """Reads a COCO file of instances.

    Raises:
        UsageError: the file cannot be read. DataError: it is not such a file; the message names the entry.
    """
    with explain_format(path, "a COCO file"):
        tree = read_json(path)
        a_list = (lambda value: isinstance(value, list), "a list")
        expect_entries(tree, dict.fromkeys(("images", "annotations", "categories"), a_list))
        classes = _read_categories(tree["categories"])
        labels, boxes, left_out = _read_annotations(tree["annotations"], classes)
        images = _read_images(tree["images"], labels, boxes)
    more = {name: value for name, value in tree.items() if name not in ("images", "annotations", "categories")}
    # Numbers and supercategories of the classes: predictions of other programs refer to them.
    more["categories"] = tree["categories"]
    notes = count_note(left_out, "an annotation needs a bbox here, or nothing but its category")
    return Annotations(
        images=tuple(images), classes=tuple(classes.values()), source=SOURCE, more=more, notes=tuple(notes)
    )


def _read_categories(entries: list[Any]) -> dict[Any, str]:
    """Returns the names of the classes by their ids."""
    classes: dict[Any, str] = {}
    for place, entry in enumerate(entries):
        expect_entries(entry, {**ID, "name": (is_text, "a text")}, f"categories[{place}].")
        if entry["id"] in classes:
            raise JsonError(f"it has the id {entry['id']!r:.60} twice in categories")
        classes[entry["id"]] = entry["name"].strip()
    return classes


def _read_annotations(
    entries: list[Any], classes: Mapping[Any, str]
) -> tuple[dict[Any, _Labels], dict[Any, list[Box]], dict[str, int]]:
    """Returns labels and boxes by the ids of their images, and how many shapes were left out."""
    labels: dict[Any, _Labels] = {}
    boxes: dict[Any, list[Box]] = {}
    left_out: Counter[str] = Counter()
    checks = {"image_id": ID["id"], "category_id": ID["id"]}
    for place, entry in enumerate(entries):
        where = f"annotations[{place}]."
        expect_entries(entry, checks, where)
        if entry["category_id"] not in classes:
            raise JsonError(f"it has {entry['category_id']!r:.60} as {where}category_id, which is in no category")
        label = classes[entry["category_id"]]
        if entry.get("bbox"):
            numbers = get_numbers(entry["bbox"], f"{where}bbox")
            more = {name: value for name, value in entry.items() if name not in _BOX}
            # Written for every box, since other programs need them, but not facts if they follow from the box.
            if more.get("iscrowd") == 0:
                del more["iscrowd"]
            if more.get("area") == numbers[2] * numbers[3]:
                del more["area"]
            boxes.setdefault(entry["image_id"], []).append(Box(label=label, form="xywh", numbers=numbers, more=more))
        elif shape := next((name for name in _SHAPES if entry.get(name)), ""):
            left_out[shape] += 1
        else:
            facts = {name: value for name, value in entry.items() if name not in _BOX}
            # Several annotations of one class without a box say the same.
            labels.setdefault(entry["image_id"], {}).setdefault(label, facts)
    return labels, boxes, left_out


def _read_images(entries: list[Any], labels: dict[Any, _Labels], boxes: dict[Any, list[Box]]) -> list[AnnotatedImage]:
    images: dict[Any, AnnotatedImage] = {}
    for place, entry in enumerate(entries):
        where = f"images[{place}]."
        expect_entries(entry, {**ID, "file_name": (is_text, "a text")}, where)
        number = entry["id"]
        if number in images:
            raise JsonError(f"it has the id {number!r:.60} twice in images")
        own = labels.pop(number, {})
        more = {name: value for name, value in entry.items() if name not in _IMAGE}
        images[number] = AnnotatedImage(
            name=entry["file_name"],
            labels=tuple(own),
            boxes=tuple(boxes.pop(number, [])),
            size=get_size(entry, where),
            sha256=get_text(entry, "sha256", where),
            split=get_text(entry, "split", where),
            by=get_text(entry, "labelled_by", where),
            more=more | ({LABEL_FACTS: own} if own else {}),
        )
    if rest := [*labels, *boxes]:
        raise JsonError(f"it has an annotation of the image {rest[0]!r:.60}, which is not in images")
    return list(images.values())


def render_coco(annotations: Annotations) -> Rendered:
    """Returns the text of a COCO file.

    Raises:
        UsageError: the size of an image is not known.
    """
    is_own = annotations.source == SOURCE
    categories = _list_categories(annotations, is_own)
    numbers = {entry["name"].strip(): entry["id"] for entry in categories}
    image_ids = _choose_ids([image.more.get("id") if is_own else None for image in annotations.images])
    images, entries = [], list[dict[str, Any]]()
    for image, number in zip(annotations.images, image_ids, strict=True):
        size = expect_size(image, "COCO")
        ours = {"sha256": image.sha256, "split": image.split, "labelled_by": image.by}
        facts = take_more(image.more, is_own)
        label_facts = pop_objects(facts, LABEL_FACTS)
        images.append(
            facts
            | {"id": number, "file_name": image.name, "width": size[0], "height": size[1]}
            | {name: value for name, value in ours.items() if value}
        )
        for label in image.labels:
            entries.append({**label_facts.get(label, {}), "image_id": number, "category_id": numbers[label]})
        for box in image.boxes:
            left, top, width, height = convert_box(box, "xywh", size)
            derived = {"area": width * height, "iscrowd": 0}
            place = {"image_id": number, "category_id": numbers[box.label], "bbox": [left, top, width, height]}
            entries.append({**derived, **take_more(box.more, is_own), **place})
    # Ids of annotations are those of the file, and free ones for the others.
    ids = _choose_ids([entry.get("id") for entry in entries])
    entries = [{**entry, "id": one} for entry, one in zip(entries, ids, strict=True)]
    head = {name: value for name, value in annotations.more.items() if name != "categories"} if is_own else {}
    tree = {"info": {}, "licenses": [], **head, "images": images, "annotations": entries, "categories": categories}
    notes = []
    if labelled := sum(len(image.labels) for image in annotations.images):
        what = f"Wrote {pluralise(labelled, 'label')} of whole images as annotations without a bbox"
        notes.append(f"{what}: COCO has no form for them, and other programs may refuse them.")
    return Rendered(json.dumps(tree, ensure_ascii=False, allow_nan=False) + "\n", tuple(notes))


def _list_categories(annotations: Annotations, is_own: bool) -> list[dict[str, Any]]:
    """Returns the categories of the file that the classes came from, and new ones with free ids."""
    entries = annotations.more.get("categories", []) if is_own else []
    kept = {entry["name"].strip(): entry for entry in entries if is_object(entry) and is_text(entry.get("name"))}
    ids = _choose_ids([kept[name]["id"] if name in kept else None for name in annotations.classes])
    return [
        {"supercategory": "", **kept.get(name, {}), "id": number, "name": name}
        for name, number in zip(annotations.classes, ids, strict=True)
    ]


def _choose_ids(wanted: Sequence[Any]) -> list[Any]:
    """Returns the wanted ids, and free numbers in place of None and of ids that occur before."""
    wanted = [one if is_whole_number(one, -(1 << 63)) or is_text(one) else None for one in wanted]
    taken = {one for one in wanted if one is not None}
    chosen: list[Any] = []
    used: set[Any] = set()
    number = 1
    for one in wanted:
        if one is None or one in used:
            while number in taken:
                number += 1
            taken.add(number)
            one = number
        used.add(one)
        chosen.append(one)
    return chosen
