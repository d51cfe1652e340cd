"""Facts of an image in a file of annotations, as the JSON object that a store keeps beside its label.

    {"boxes": [{"label": "car", "xywh": [1, 2, 3, 4], "more": {...}}], "size": [640, 480], "by": "ann",
     "format": "coco", "more": {...}}

Boxes have the form of the column `boxes` of a list, and `size` is that of the image that they were drawn on. `more` are
facts that one format alone has, which `format` names. `by` is who annotated an image without a label: a store knows it
of labels alone. Each entry is there only if it is needed.

A store takes any JSON object from its clients, so what is read here may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from headway.core.untrusted_json import JsonError, is_object
from headway.lifecycle.interchange import lists
from headway.lifecycle.interchange.annotations import AnnotatedImage, Box, Size, find_box_fault, find_text_fault
from headway.lifecycle.interchange.convert import FORMATS
from headway.lifecycle.interchange.reading import expect_finite, get_size, get_text

_KNOWN = {"boxes", "size", "by", "format", "more"}


@final
@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """Facts of an image beside its label.

    Attributes:
        source: format that `more`, and that of the boxes, belong to; empty: there are none.
        The others: see `AnnotatedImage`.
    """

    boxes: tuple[Box, ...] = ()
    size: Size | None = None
    by: str = ""
    source: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def build_facts(image: AnnotatedImage, source: str) -> dict[str, Any]:
    """Returns the JSON object of an image; empty if its label, split and annotator are all that is known.

    Args:
        source: format of the file that it comes from.
    """
    tree: dict[str, Any] = {}
    if image.boxes:
        tree["boxes"] = [lists.render_box(box) for box in image.boxes]
        if image.size is not None:
            tree["size"] = list(image.size)
    if image.by and not image.labels:
        tree["by"] = image.by
    # Columns of the user's own list are about the list, such as scores, and not about the image.
    more = {} if source == lists.SOURCE else dict(image.more)
    if more:
        tree["more"] = more
    if more or any(box.more for box in image.boxes):
        tree["format"] = source
    return tree


def read_facts(tree: Mapping[str, Any] | None) -> StoreFacts:
    """Reads what `build_facts` wrote. Raises JsonError if it is something else."""
    if tree is None:
        return StoreFacts()
    whole = dict(tree)
    expect_finite(whole)
    if unknown := sorted(set(whole) - _KNOWN):
        raise JsonError(f"it has {unknown[0]!r:.60}, which no file of annotations has a form for")
    boxes, size, more = whole.get("boxes", []), whole.get("size"), whole.get("more", {})
    if not isinstance(boxes, list):
        raise JsonError("it has no list as boxes")
    if size is not None and (not isinstance(size, list) or len(size) != 2):
        raise JsonError("it has no list of two numbers as size")
    if not is_object(more):
        raise JsonError("it has no object as more")
    facts = StoreFacts(
        boxes=tuple(lists.read_box(box, f"boxes[{place}]") for place, box in enumerate(boxes)),
        size=None if size is None else get_size({"width": size[0], "height": size[1]}, "size."),
        by=get_text(whole, "by", ""),
        source=get_text(whole, "format", ""),
        more=more,
    )
    _check_facts(facts)
    return facts


def _check_facts(facts: StoreFacts) -> None:
    """Raises JsonError for what would make the file of the whole version one that cannot be written."""
    for text in {facts.by, *(box.label for box in facts.boxes)} - {""}:
        if fault := find_text_fault(text):
            raise JsonError(f"it has the text {text!r:.60}, which {fault}")
    if any(not box.label for box in facts.boxes):
        raise JsonError("it has a box without a label")
    if fault := next((fault for box in facts.boxes if (fault := find_box_fault(box))), ""):
        raise JsonError(f"it {fault}")
    has_more = bool(facts.more) or any(box.more for box in facts.boxes)
    if (has_more or facts.source) and facts.source not in FORMATS:
        raise JsonError(f"it has facts of the format {facts.source!r:.60}, which is not one of {', '.join(FORMATS)}")
