"""Annotations: the labels and boxes of images, independent of the file format that they came in.

Boxes keep the numbers of their file, since corners, sizes and percentages cannot be turned into each other without
rounding. `Box.to_pixels` and `convert_box` turn them where another format needs it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, final

from headway.core.errors import DataError
from headway.core.text_format import pluralise
from headway.core.untrusted_json import is_number, is_sha256, is_whole_number

BoxForm = Literal["xywh", "corners", "percent"]
"""Meaning of a box's four numbers: left, top, width, height in pixels; left, top, right, bottom in pixels; or left,
top, width, height in percent of the image."""
Size = tuple[int, int]
"""(width, height) in pixels."""

MOST_SIDE = 1 << 24
# Coordinates beyond it do not lie in an image of MOST_SIDE; some lie outside of their image.
_MOST_NUMBER = 1e9
_MOST_TEXT = 4096
# Pixels that were computed from percentages are rounded to this many decimals, so that whole pixels stay whole.
_DECIMALS = 6


@final
@dataclass(frozen=True, kw_only=True)
class Box:
    """A box around a part of an image, with one label.

    Attributes:
        form: what the numbers mean; see `BoxForm`.
        numbers: the four numbers, as they came.
        more: other facts of the box in its file, such as `occluded` or `segmentation`. They are written again in the
            same format, and no other.
    """

    label: str
    form: BoxForm
    numbers: tuple[float, float, float, float]
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_pixels(self, size: Size | None) -> tuple[float, float, float, float]:
        """Returns left, top, width and height in pixels.

        Args:
            size: of the image; only percentages need it.
        """
        left, top, a, b = self.numbers
        if self.form == "xywh":
            return self.numbers
        if self.form == "corners":
            return left, top, _subtract(a, left), _subtract(b, top)
        if size is None:
            raise ValueError("percentages need the size of the image")
        sides = (*size, *size)
        values = [round(number * side / 100, _DECIMALS) for number, side in zip(self.numbers, sides, strict=True)]
        return values[0], values[1], values[2], values[3]


def convert_box(box: Box, form: BoxForm, size: Size | None) -> tuple[float, float, float, float]:
    """Returns the four numbers of a box in another form; those of its own form unchanged.

    Sums and differences are exact in decimals: 0.1 + 0.2 is 0.3, and goes back to 0.1 and 0.2.
    """
    if box.form == form:
        return box.numbers
    left, top, width, height = box.to_pixels(size)
    if form == "xywh":
        return left, top, width, height
    if form == "corners":
        return left, top, _add(left, width), _add(top, height)
    if size is None:
        raise ValueError("percentages need the size of the image")
    return 100 * left / size[0], 100 * top / size[1], 100 * width / size[0], 100 * height / size[1]


def _add(a: float, b: float) -> float:
    return float(Decimal(repr(a)) + Decimal(repr(b)))


def _subtract(a: float, b: float) -> float:
    return float(Decimal(repr(a)) - Decimal(repr(b)))


@final
@dataclass(frozen=True, kw_only=True)
class AnnotatedImage:
    """One image with its labels and boxes.

    Attributes:
        name: path relative to the folder of the images, or an address, as the file has it.
        labels: classes of the whole image; several only where the task has several labels.
        boxes: boxes, in the order of the file.
        size: (width, height) in pixels; None: the file does not say.
        sha256: SHA-256 of the image file; empty: not known.
        split: name of the set that it belongs to; empty: not known.
        by: who set the labels; empty: not known.
        more: other facts of the image in its file, as for a `Box`.
    """

    name: str
    labels: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    size: Size | None = None
    sha256: str = ""
    split: str = ""
    by: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Annotations:
    """Annotated images.

    Attributes:
        images: in the order of the file; each name once.
        classes: names of all classes, also of those without an image.
        source: format that `more` belongs to: `coco`, `cvat`, `label-studio` or `list`; empty: none.
        more: other facts of the file.
        notes: what was left out, as sentences.
    """

    images: tuple[AnnotatedImage, ...]
    classes: tuple[str, ...]
    source: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def to_plain(self) -> Annotations:
        """Returns the part that every format holds: boxes in pixels, and nothing that is specific to a format."""
        images = [
            replace(
                image,
                boxes=tuple(
                    Box(label=box.label, form="xywh", numbers=box.to_pixels(image.size)) for box in image.boxes
                ),
                more={},
            )
            for image in self.images
        ]
        return Annotations(images=tuple(images), classes=self.classes)

    def count(self) -> dict[str, int]:
        """Returns how many images, images without a label, boxes and classes there are."""
        return {
            "images": len(self.images),
            "unlabelled": sum(not image.labels for image in self.images),
            "boxes": sum(len(image.boxes) for image in self.images),
            "classes": len(self.classes),
        }

    def count_classes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns how many labels, and how many boxes, each class has."""
        labels, boxes = (dict.fromkeys(self.classes, 0) for _ in range(2))
        for image in self.images:
            for label in image.labels:
                labels[label] += 1
            for box in image.boxes:
                boxes[box.label] += 1
        return labels, boxes

    def describe(self) -> str:
        """Returns a sentence with the counts."""
        counts = self.count()
        parts = [pluralise(counts["classes"], "class"), pluralise(counts["boxes"], "box")]
        if counts["unlabelled"]:
            parts.append(f"{counts['unlabelled']:,} of the images without a label")
        return f"{pluralise(counts['images'], 'image')}: {', '.join(parts)}"


def collect_classes(images: Iterable[AnnotatedImage]) -> tuple[str, ...]:
    """Returns the classes that occur in labels and boxes, sorted by name."""
    found = {label for image in images for label in image.labels}
    return tuple(sorted(found | {box.label for image in images for box in image.boxes}))


def check_annotations(annotations: Annotations, where: str, *, is_list: bool = False) -> None:
    """Checks annotations before they are used or written.

    Args:
        is_list: names may lead out of the folder of the file, as in the lists that `headway pack` reads.

    Raises:
        DataError: an image is named twice, a name leads out of its folder, or a text, a size or a box cannot be used.
    """
    fix = "Correct the file, or write it again with the program that it comes from."
    for label in annotations.classes:
        if fault := find_text_fault(label):
            raise DataError(f"the class {label[:60]!r} {fault}", where=where, fix=fix)
    known = set(annotations.classes)
    if len(known) != len(annotations.classes):
        raise DataError("a class is named twice", where=where, fix=fix)
    seen: set[str] = set()
    for image in annotations.images:
        if fault := _find_image_fault(image, known):
            raise DataError(f"the image {image.name[:200]!r} {fault}", where=where, fix=fix)
        # A list that is packed later would otherwise read files from anywhere on the machine.
        if not is_list and ".." in image.name.replace("\\", "/").split("/"):
            what = f"the image {image.name[:200]!r} has a name that leads out of its folder"
            raise DataError(what, where=where, fix="Name the folder of the images, if it is a list: --images FOLDER.")
        if image.name in seen:
            raise DataError(f"the image {image.name[:200]!r} is named twice", where=where, fix="Name each image once.")
        seen.add(image.name)


def _find_image_fault(image: AnnotatedImage, classes: set[str]) -> str:
    if fault := find_text_fault(image.name):
        return f"has a name that {fault}"
    for what, text in (("split", image.split), ("annotator", image.by)):
        if text and (fault := find_text_fault(text)):
            return f"has the {what} {text[:60]!r}, which {fault}"
    if image.sha256 and not is_sha256(image.sha256):
        return f"has the sha256 {image.sha256[:80]!r}, which is not 64 hexadecimal digits"
    if image.size is not None and not all(is_whole_number(side, 1, MOST_SIDE) for side in image.size):
        return f"has the size {image.size!r:.80}, which is not two whole numbers from 1"
    if len(set(image.labels)) != len(image.labels):
        return "has one label twice"
    for label in (*image.labels, *(box.label for box in image.boxes)):
        if label not in classes:
            return f"has the label {label[:60]!r}, which is not one of the classes"
    return next((fault for box in image.boxes if (fault := find_box_fault(box))), "")


def find_box_fault(box: Box) -> str:
    """Returns what is wrong with the numbers of a box, as the end of a sentence; empty: nothing."""
    if len(box.numbers) != 4 or not all(is_number(number, -_MOST_NUMBER, _MOST_NUMBER) for number in box.numbers):
        return f"has a box with {box.numbers!r:.100}, which are not four finite numbers"
    left, top, a, b = box.numbers
    if (box.form == "corners" and (a < left or b < top)) or (box.form != "corners" and (a < 0 or b < 0)):
        return f"has a box of negative width or height: {box.numbers!r:.100}"
    return ""


def find_text_fault(text: str) -> str:
    """Returns what is wrong with a name or label; empty if every format can hold it."""
    if not text or text != text.strip():
        return "is empty, or begins or ends with a space"
    if len(text) > _MOST_TEXT:
        return f"has {len(text):,} characters, more than {_MOST_TEXT:,}"
    # XML has no form for these, and a terminal must not obey them.
    if any(unicodedata.category(one) in ("Cc", "Cs") or one in "\ufffe\uffff" for one in text):
        return "holds a control character"
    return ""
