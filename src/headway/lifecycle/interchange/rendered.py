"""Text of a file of annotations, with what it does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.core.errors import UsageError
from headway.core.untrusted_json import is_object
from headway.lifecycle.interchange.annotations import AnnotatedImage, Size

LABEL_FACTS = "label_facts"
"""Entry of `AnnotatedImage.more`: facts that a format has of each label, by label."""


class Rendered(NamedTuple):
    """A file to write: its text, and sentences about what it does not hold."""

    text: str
    notes: tuple[str, ...] = ()


def take_more(more: Mapping[str, Any], is_own: bool) -> dict[str, Any]:
    """Returns facts that are specific to a format; nothing if they came from another format."""
    return dict(more) if is_own else {}


def pop_objects(more: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Removes an entry, an object of objects, and returns it; empty if it is missing or something else."""
    found = more.pop(name, None)
    if not is_object(found):
        return {}
    return {key: dict(value) for key, value in found.items() if is_object(value)}


def expect_size(image: AnnotatedImage, kind: str) -> Size:
    """Returns the size of an image. Raises UsageError if it is not known."""
    if image.size is None:
        what = f"the size of the image {image.name!r} is not known, and {kind} needs it"
        raise UsageError(what, fix="Name the folder of the images, which are then measured: --images FOLDER.")
    return image.size
