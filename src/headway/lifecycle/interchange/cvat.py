"""CVAT for images 1.1: one XML file with a `<tag>` for each label and a `<box>` for each box of an image.

The file may come from anybody. The parser refuses a document type declaration, so there are no entities to expand and
no external ones to fetch; size, depth and length of a text are limited.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, open_regular
from headway.core.untrusted_json import JsonError, is_object, is_text
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Box, collect_classes, convert_box
from headway.lifecycle.interchange.reading import MOST_BYTES, count_note, explain_format, raise_missing
from headway.lifecycle.interchange.rendered import LABEL_FACTS, Rendered, expect_size, pop_objects, take_more

SOURCE = "cvat"
MOST_DEPTH = 16
MOST_TEXT = 1 << 20
_CHUNK_BYTES = 1 << 20
_IMAGE = ("name", "width", "height", "subset", "sha256", "labelled_by")
_CORNERS = ("xtl", "ytl", "xbr", "ybr")
# Attributes of every box; they are facts only if they differ from these.
_USUAL = {"occluded": "0", "source": "manual", "z_order": "0"}
# Elements whose text is needed.
_TEXTS = ("version", "name", "attribute")
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_ATTRIBUTE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SIDE: Final = re.compile(r"[1-9]\d{0,8}", re.ASCII)


def read_cvat(path: Path) -> Annotations:
    """Reads a file of CVAT for images 1.1.

    Raises:
        UsageError: the file cannot be read.
        DataError: it is not such a file, declares a document type, or is too large or too deep.
    """
    reader = _Reader()
    with explain_format(path, "a file of CVAT for images 1.1"):
        try:
            _parse(path, reader)
        except FileNotFoundError:
            raise_missing(path)
        except OSError as error:
            raise UsageError(f"it cannot be read ({describe_os_error(error)})", where=str(path)) from None
        except expat.ExpatError as error:
            # CVAT exports a zip archive with this file in it.
            raise JsonError(f"it is not XML ({error}); unpack an archive first, and name annotations.xml") from None
        if reader.root != "annotations":
            raise JsonError(f"its root is {reader.root[:60]!r}, not 'annotations'")
        if reader.version != "1.1":
            raise JsonError(f"its version is {reader.version[:60]!r}, not '1.1'")
    images = tuple(reader.images)
    # Classes of the task come first, in its order, and then those that it does not name.
    classes = dict.fromkeys((*reader.classes, *collect_classes(images)))
    notes = count_note(reader.left_out, "only tags and boxes of images are read")
    return Annotations(images=images, classes=tuple(classes), source=SOURCE, notes=tuple(notes))


def _parse(path: Path, reader: _Reader) -> None:
    # The encoding is stated, so that the file's declaration does not count.
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.add_text
    total = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            if (total := total + len(chunk)) > MOST_BYTES:
                raise JsonError(f"it has more than the {MOST_BYTES:,} bytes that are read")
            # Expat follows the byte order mark of UTF-16 all the same.
            if b"\0" in chunk:
                raise JsonError("it is not UTF-8 text")
            parser.Parse(chunk, False)
    parser.Parse(b"", True)


def _refuse_doctype(*_: Any) -> None:
    # Entities are declared there: ten lines of them can stand for gigabytes, or for files of this machine.
    raise JsonError("it declares a document type, which CVAT never does")


@final
class _Reader:
    """Collects the images of a file as expat calls it, element by element."""

    def __init__(self) -> None:
        self.root = ""
        self.version = ""
        self.classes: list[str] = []
        self.images: list[AnnotatedImage] = []
        self.left_out: Counter[str] = Counter()
        self._path: list[str] = []
        self._text: list[str] = []
        self._length = 0
        # State of the open image, and of the open box or attribute.
        self._image: dict[str, str] = {}
        self._labels: dict[str, dict[str, str]] = {}
        self._boxes: list[Box] = []
        self._box: dict[str, str] = {}
        self._attributes: dict[str, str] = {}
        self._attribute = ""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Opens an element."""
        if len(self._path) >= MOST_DEPTH:
            raise JsonError(f"it is nested more than {MOST_DEPTH} levels deep")
        if not self._path:
            self.root = tag
        self._path.append(tag)
        self._text, self._length = [], 0
        if any(len(value) > MOST_TEXT for value in attributes.values()):
            raise JsonError(f"<{tag[:60]}> has an attribute of more than {MOST_TEXT:,} characters")
        match self._path:
            case [_, "track"]:
                raise JsonError("it is of CVAT for video: export the task as CVAT for images 1.1")
            case [_, "image"]:
                self._image, self._labels, self._boxes = attributes, {}, []
            case [_, "image", "tag"]:
                label = self._get(attributes, "label").strip()
                facts = {name: one for name, one in attributes.items() if name != "label" and _USUAL.get(name) != one}
                self._labels.setdefault(label, facts)
            case [_, "image", "box"]:
                self._box, self._attributes = attributes, {}
            case [_, "image", "box", "attribute"]:
                self._attribute = self._get(attributes, "name")
            case [_, "image", "tag", "attribute"]:
                self.left_out["attribute of a tag"] += 1
            case [_, "image", shape]:
                self.left_out[shape] += 1

    def end(self, tag: str) -> None:
        """Closes an element."""
        text = "".join(self._text)
        match self._path:
            case [_, "version"]:
                self.version = text.strip()
            case [_, "meta", *_, "labels", "label", "name"]:
                self.classes.append(text.strip())
            case [_, "image", "box", "attribute"]:
                self._attributes[self._attribute] = text
            case [_, "image", "box"]:
                self._boxes.append(self._build_box())
            case [_, "image"]:
                self.images.append(self._build_image())
        self._path.pop()
        self._text, self._length = [], 0

    def add_text(self, text: str) -> None:
        """Adds a piece of an element's text."""
        if self._path[-1] in _TEXTS:
            self._text.append(text)
            if (length := self._length + len(text)) > MOST_TEXT:
                raise JsonError(f"<{self._path[-1]}> has a text of more than {MOST_TEXT:,} characters")
            self._length = length

    def _get(self, attributes: dict[str, str], name: str) -> str:
        if name not in attributes:
            raise JsonError(f"a <{self._path[-1]}> of image number {len(self.images) + 1:,} lacks {name!r}")
        return attributes[name]

    def _build_box(self) -> Box:
        numbers = []
        for name in _CORNERS:
            text = self._get(self._box, name)
            # `float` would read 1_0, nan and inf.
            if not _NUMBER.fullmatch(text):
                raise JsonError(f"a <box> of image number {len(self.images) + 1:,} has {text[:60]!r} as {name}")
            numbers.append(float(text))
        used = {*_CORNERS, "label"}
        more: dict[str, Any] = {
            name: value for name, value in self._box.items() if name not in used and _USUAL.get(name) != value
        }
        if self._attributes:
            more["attributes"] = self._attributes
        label = self._get(self._box, "label").strip()
        return Box(label=label, form="corners", numbers=(numbers[0], numbers[1], numbers[2], numbers[3]), more=more)

    def _build_image(self) -> AnnotatedImage:
        size = []
        for name in ("width", "height"):
            text = self._get(self._image, name)
            if not _SIDE.fullmatch(text):
                raise JsonError(f"image number {len(self.images) + 1:,} has {text[:60]!r} as {name}")
            size.append(int(text))
        more: dict[str, Any] = {name: value for name, value in self._image.items() if name not in _IMAGE}
        if label_facts := {label: facts for label, facts in self._labels.items() if facts}:
            more[LABEL_FACTS] = label_facts
        return AnnotatedImage(
            name=self._get(self._image, "name"),
            labels=tuple(self._labels),
            boxes=tuple(self._boxes),
            size=(size[0], size[1]),
            sha256=self._image.get("sha256", ""),
            split=self._image.get("subset", ""),
            by=self._image.get("labelled_by", ""),
            more=more,
        )


def render_cvat(annotations: Annotations) -> Rendered:
    """Returns the text of a file of CVAT for images 1.1.

    Raises:
        UsageError: the size of an image is not known.
    """
    is_own = annotations.source == SOURCE
    lines = ['<?xml version="1.0" encoding="utf-8"?>', "<annotations>", "<version>1.1</version>"]
    lines += ["<meta><task>", f"<size>{len(annotations.images)}</size>", "<mode>annotation</mode>", "<labels>"]
    lines += [f"<label><name>{escape(name)}</name><attributes/></label>" for name in annotations.classes]
    lines += ["</labels>", "</task></meta>"]
    for number, image in enumerate(annotations.images):
        width, height = expect_size(image, "CVAT")
        facts = {"name": image.name, "width": str(width), "height": str(height)}
        ours = {"subset": image.split, "sha256": image.sha256, "labelled_by": image.by}
        facts |= {name: value for name, value in ours.items() if value}
        more = take_more(image.more, is_own)
        label_facts = pop_objects(more, LABEL_FACTS)
        # What is known for certain comes last, so that it counts.
        lines.append(f"<image{_render({'id': str(number)} | _take_texts(more) | facts)}>")
        for label in image.labels:
            tag = {"source": "manual"} | _take_texts(label_facts.get(label, {})) | {"label": label}
            lines.append(f"<tag{_render(tag)}/>")
        for box in image.boxes:
            lines += _render_box(box, (width, height), is_own)
        lines.append("</image>")
    return Rendered("\n".join([*lines, "</annotations>"]) + "\n")


def _render_box(box: Box, size: tuple[int, int], is_own: bool) -> list[str]:
    numbers = convert_box(box, "corners", size)
    corners = {name: repr(number) for name, number in zip(_CORNERS, numbers, strict=True)}
    more = take_more(box.more, is_own)
    head = f"<box{_render({**_USUAL, **_take_texts(more), 'label': box.label, **corners})}"
    attributes = more.get("attributes")
    if not is_object(attributes) or not attributes:
        return [f"{head}/>"]
    # A carriage return that is not escaped is read as a line feed.
    inner = [
        f"<attribute name={quoteattr(name)}>{escape(text, {chr(13): '&#13;'})}</attribute>"
        for name, text in attributes.items()
        if is_text(text)
    ]
    return [f"{head}>", *inner, "</box>"]


def _take_texts(more: Mapping[str, Any]) -> dict[str, str]:
    # A store may have got them from anybody: XML has no way to escape a name.
    return {name: value for name, value in more.items() if is_text(value) and _ATTRIBUTE.fullmatch(name)}


def _render(attributes: dict[str, str]) -> str:
    return "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items())
