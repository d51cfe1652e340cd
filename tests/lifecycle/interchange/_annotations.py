"""Annotations for tests: any that the formats can hold, and a small file of each format by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Box

FORMATS = {"coco": "a.json", "cvat": "a.xml", "label-studio": "a.json", "list": "a.jsonl"}
"""A name of a file for each format."""

LETTERS = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
TEXTS = st.text(LETTERS, min_size=1, max_size=10).map(str.strip).filter(bool)
PATHS = TEXTS.filter(lambda text: ".." not in text)
SIDES = st.integers(1, 20_000)
ANY_NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
ANY_LENGTHS = st.floats(0, 1e6, allow_nan=False)
# Three decimals, as people and programs draw boxes: these survive every format.
ROUND_NUMBERS = st.integers(-1_000_000, 20_000_000).map(lambda number: number / 1000)
ROUND_LENGTHS = st.integers(0, 20_000_000).map(lambda number: number / 1000)


def boxes(classes: list[str], *, is_round: bool) -> st.SearchStrategy[Box]:
    places, lengths = (ROUND_NUMBERS, ROUND_LENGTHS) if is_round else (ANY_NUMBERS, ANY_LENGTHS)
    numbers = st.tuples(places, places, lengths, lengths)
    plain = st.builds(Box, label=st.sampled_from(classes), form=st.just("xywh"), numbers=numbers)
    if is_round:
        return plain
    corners = numbers.map(lambda one: (one[0], one[1], one[0] + one[2], one[1] + one[3]))
    return (
        plain
        | st.builds(Box, label=st.sampled_from(classes), form=st.sampled_from(["corners"]), numbers=corners)
        | st.builds(Box, label=st.sampled_from(classes), form=st.just("percent"), numbers=numbers)
    )


@st.composite
def annotations(draw: st.DrawFn, *, is_round: bool = False) -> Annotations:
    """Annotations of up to five images, whose sizes are known."""
    classes = draw(st.lists(TEXTS, min_size=1, max_size=4, unique=True))
    names = draw(st.lists(PATHS, max_size=5, unique=True))
    images = [
        AnnotatedImage(
            name=name,
            labels=tuple(draw(st.lists(st.sampled_from(classes), max_size=3, unique=True))),
            boxes=tuple(draw(st.lists(boxes(classes, is_round=is_round), max_size=3))),
            size=(draw(SIDES), draw(SIDES)),
            sha256=draw(st.sampled_from(["", "0f" * 32])),
            split=draw(st.just("") | TEXTS),
            by=draw(st.just("") | TEXTS),
        )
        for name in names
    ]
    return Annotations(images=tuple(images), classes=tuple(classes))


def write_json(path: Path, tree: Any) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def coco_tree() -> dict[str, Any]:
    """A file of COCO as other programs write it: ids with gaps, a segmentation, a licence."""
    return {
        "info": {"year": 2017},
        "licenses": [{"id": 4, "name": "CC BY"}],
        "images": [
            {"id": 397133, "file_name": "000397133.jpg", "width": 640, "height": 427, "license": 4},
            {"id": 37777, "file_name": "000037777.jpg", "width": 352, "height": 230},
        ],
        "annotations": [
            {
                "id": 82445,
                "image_id": 397133,
                "category_id": 44,
                "bbox": [217.62, 240.54, 38.99, 57.75],
                "area": 1481.38,
                "iscrowd": 0,
                "segmentation": [[224.24, 297.18, 228.29, 297.18]],
            },
            {"id": 7, "image_id": 397133, "category_id": 1, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 1},
            {"id": 8, "image_id": 37777, "category_id": 1},
        ],
        "categories": [
            {"id": 1, "name": "person", "supercategory": "person"},
            {"id": 44, "name": "bottle", "supercategory": "kitchen"},
            {"id": 90, "name": "toothbrush", "supercategory": "indoor"},
        ],
    }


CVAT = """<?xml version="1.0" encoding="utf-8"?>
<annotations>
  <version>1.1</version>
  <meta>
    <task>
      <name>street</name>
      <labels>
        <label><name>car</name><attributes><attribute><name>parked</name></attribute></attributes></label>
        <label><name>person</name><attributes/></label>
      </labels>
    </task>
    <dumped>2026-01-02 03:04:05.6+00:00</dumped>
  </meta>
  <image id="7" name="a/1.jpg" width="640" height="480" subset="train">
    <box label="car" source="auto" occluded="1" xtl="10.50" ytl="20.00" xbr="110.25" ybr="220.00" z_order="0">
      <attribute name="parked">true</attribute>
    </box>
    <polygon label="car" points="1,2;3,4;5,6" z_order="0"></polygon>
    <tag label="person" source="auto"></tag>
  </image>
  <image id="9" name="a/2 &amp; 3.jpg" width="320" height="240">
  </image>
</annotations>
"""


def label_studio_tree() -> list[dict[str, Any]]:
    """Tasks as Label Studio exports them."""
    box = {
        "id": "t5sp3TyXPo",
        "from_name": "tag",
        "to_name": "img",
        "type": "rectanglelabels",
        "original_width": 600,
        "original_height": 403,
        "image_rotation": 0,
        "value": {
            "x": 50.8,
            "y": 5.869797225186766,
            "width": 12.4,
            "height": 10.458911419423693,
            "rotation": 30,
            "rectanglelabels": ["Moonwalker", "Planet"],
        },
    }
    choice = {"from_name": "choice", "to_name": "img", "type": "choices", "value": {"choices": ["Space"]}}
    brush = {"from_name": "b", "to_name": "img", "type": "brushlabels", "value": {}}
    return [
        {
            "id": 1,
            "project": 83,
            "data": {"image": "https://example.com/1.jpg", "camera": "left"},
            "annotations": [
                {"id": 1001, "result": [], "was_cancelled": True, "completed_by": 9},
                {"id": 1002, "result": [box, choice, brush], "completed_by": {"id": 10, "email": "ann@example.com"}},
            ],
            "predictions": [{"result": [choice]}],
        },
        {"id": 2, "data": {"image": "/data/local-files/?d=photos/a%20b.jpg"}, "annotations": []},
    ]
