"""Label Studio's JSON: a list of tasks, each with its image and the results of its annotators.

`choices` are labels of the whole image, `rectanglelabels` are boxes in percent of its size. If several people have
annotated a task, the result that is marked as ground truth counts, otherwise the newest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from headway.core.text_format import pluralise
from headway.core.untrusted_json import Checks, JsonError, expect_entries, is_object, is_text
from headway.lifecycle.interchange.annotations import (
    AnnotatedImage,
    Annotations,
    Box,
    Size,
    collect_classes,
    convert_box,
)
from headway.lifecycle.interchange.reading import (
    count_note,
    explain_format,
    get_size,
    get_text,
    is_float_number,
    read_json,
)
from headway.lifecycle.interchange.rendered import Rendered, expect_size, take_more

SOURCE = "label-studio"
LOCAL_FILES = "/data/local-files/?d="
"""Address under which Label Studio shows files of its own machine (`LOCAL_FILES_SERVING_ENABLED`)."""
_KEYS = ("image", "width", "height", "sha256", "split", "labelled_by")
_TASK = ("data", "annotations", "completions", "predictions")
_PERCENT = ("x", "y", "width", "height")
_RESULT = ("type", "value", "original_width", "original_height")
# Facts of every result: they are facts of their own only if they differ from these. Names are those of the fields in
# the project's labelling interface.
_USUAL = {"image_rotation": 0, "from_name": "boxes", "to_name": "image", "origin": "manual"}
_USUAL_CHOICES = {"from_name": "labels", "to_name": "image", "origin": "manual"}
# Entries of `AnnotatedImage.more`: facts of the annotation, and of the choices in it.
_ANNOTATION, _CHOICES = "annotation", "choices"
_A_LIST = (lambda value: isinstance(value, list), "a list")
_AN_OBJECT = (is_object, "an object")


class _Choices(NamedTuple):
    """Labels of one field, and the other facts of its result."""

    labels: list[str]
    facts: dict[str, Any]


class _Results(NamedTuple):
    """The results of one annotator for one task."""

    choices: dict[str, _Choices]
    """By the name of their field."""
    boxes: list[Box]
    size: Size | None
    by: str
    facts: dict[str, Any] | None
    """Facts of the annotation, such as its id and its author; None: nobody has annotated the task."""


def read_label_studio(path: Path, field: str | None = None) -> Annotations:
    """Reads tasks that Label Studio has exported as JSON (not as JSON-MIN).

    Args:
        field: name of the field of choices that holds the labels; None: there is only one.

    Raises:
        UsageError: the file cannot be read.
        DataError: it is not such a file, or has several fields of choices and none is named.
    """
    left_out: Counter[str] = Counter()
    with explain_format(path, "JSON of Label Studio"):
        tasks = read_json(path)
        if not isinstance(tasks, list):
            raise JsonError("it is not a list of tasks")
        found = [_read_task(task, f"[{place}].", left_out) for place, task in enumerate(tasks)]
        known = {name for _, choices in found for name in choices}
        field = _choose_field(field, known)
    images = [_take_choices(image, choices.get(field)) for image, choices in found]
    several = left_out.pop("several", 0)
    notes = count_note(left_out, "only choices and rectanglelabels are read")
    if others := sorted(known - {field}):
        notes.append(f"Left out the choices of {', '.join(map(repr, others))}: only those of {field!r} are read.")
    if several:
        notes.append(
            f"{pluralise(several, 'task')} with several annotations: the ground truth counts, else the newest."
        )
    return Annotations(images=tuple(images), classes=collect_classes(images), source=SOURCE, notes=tuple(notes))


def _take_choices(image: AnnotatedImage, choices: _Choices | None) -> AnnotatedImage:
    if choices is None:
        return image
    more = {**image.more, _CHOICES: choices.facts} if choices.facts else image.more
    return replace(image, labels=tuple(dict.fromkeys(choices.labels)), more=more)


def _choose_field(field: str | None, known: set[str]) -> str:
    """Returns the field of choices that holds the labels. Raises JsonError if it is not clear which one."""
    if field is not None:
        if field not in known:
            names = ", ".join(repr(name[:60]) for name in sorted(known)) or "none"
            raise JsonError(f"it has no field of choices {field!r}; it has {names}")
        return field
    if len(known) > 1:
        first, second = sorted(known)[:2]
        raise JsonError(f"it has two fields of choices, {first[:60]!r} and {second[:60]!r}: name one with --field")
    return next(iter(known), "")


def _read_task(task: Any, path: str, left_out: Counter[str]) -> tuple[AnnotatedImage, dict[str, _Choices]]:
    """Returns an image without its labels, and its choices by the name of their field."""
    expect_entries(task, {"data": _AN_OBJECT}, path)
    data = task["data"]
    expect_entries(data, {"image": (is_text, "a text")}, f"{path}data.")
    name = data["image"]
    if name.startswith(LOCAL_FILES):
        name = unquote(name.removeprefix(LOCAL_FILES))
    results = _read_results(task, path, left_out)
    image = AnnotatedImage(
        name=name,
        boxes=tuple(results.boxes),
        size=results.size or get_size(data, f"{path}data."),
        sha256=get_text(data, "sha256", f"{path}data."),
        split=get_text(data, "split", f"{path}data."),
        by=get_text(data, "labelled_by", f"{path}data.") or results.by,
        more={key: value for key, value in task.items() if key not in (*_TASK, _ANNOTATION, _CHOICES)}
        | {"data": {key: value for key, value in data.items() if key not in _KEYS}}
        | ({} if results.facts is None else {_ANNOTATION: results.facts}),
    )
    return image, results.choices


def _read_results(task: dict[str, Any], path: str, left_out: Counter[str]) -> _Results:
    # `completions` is the name before 2021.
    name = "annotations" if "annotations" in task else "completions"
    entries = task.get(name, [])
    if not isinstance(entries, list) or not all(map(is_object, entries)):
        raise JsonError(f"it has no list of objects as {path}{name}")
    done = [place for place, entry in enumerate(entries) if not entry.get("was_cancelled")]
    if not done:
        return _Results({}, [], None, "", None)
    if len(done) > 1:
        left_out["several"] += 1
    # Texts of times sort by time; the last in the list is the newest where there are none.
    place = max(
        done, key=lambda one: (bool(entries[one].get("ground_truth")), str(entries[one].get("updated_at", "")), one)
    )
    entry, where = entries[place], f"{path}{name}[{place}]."
    expect_entries(entry, {"result": _A_LIST}, where)
    choices: dict[str, _Choices] = {}
    boxes: list[Box] = []
    size: Size | None = None
    for number, result in enumerate(entry["result"]):
        inside = f"{where}result[{number}]."
        expect_entries(result, {"type": (is_text, "a text")}, inside)
        if (kind := result["type"]) not in ("choices", "rectanglelabels"):
            left_out[kind[:60]] += 1
            continue
        size = get_size(result, inside, ("original_width", "original_height")) or size
        expect_entries(result, {"value": _AN_OBJECT}, inside)
        names = _read_texts(result["value"], kind, inside)
        if kind == "choices":
            field, facts = get_text(result, "from_name", inside), _list_facts(result, _USUAL_CHOICES)
            choices.setdefault(field, _Choices([], facts)).labels.extend(names)
        else:
            boxes += _read_boxes(result, names, inside)
    facts = {name: one for name, one in entry.items() if name != "result"}
    return _Results(choices, boxes, size, _name_annotator(entry.get("completed_by")), facts)


def _list_facts(result: dict[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in result.items() if name not in _RESULT and usual.get(name) != one}


def _read_texts(value: dict[str, Any], kind: str, path: str) -> list[str]:
    texts = value.get(kind)
    if not isinstance(texts, list) or not all(map(is_text, texts)):
        raise JsonError(f"it has no list of texts as {path}value.{kind}")
    return [text.strip() for text in texts]


def _read_boxes(result: dict[str, Any], labels: Sequence[str], path: str) -> list[Box]:
    value = result["value"]
    a_number: Checks = dict.fromkeys(_PERCENT, (is_float_number, "a number"))
    expect_entries(value, a_number, f"{path}value.")
    numbers = tuple(float(value[name]) for name in _PERCENT)
    more = _list_facts(result, _USUAL)
    if value.get("rotation"):
        more["rotation"] = value["rotation"]
    boxes = []
    for label in labels:
        boxes.append(
            Box(label=label, form="percent", numbers=(numbers[0], numbers[1], numbers[2], numbers[3]), more=dict(more))
        )
        # An id may occur once.
        more.pop("id", None)
    return boxes


def _name_annotator(by: Any) -> str:
    """Returns the annotator's email address, or the number of the user; empty if neither is known."""
    if is_object(by):
        by = by.get("email") or by.get("username") or by.get("id")
    return str(by) if is_text(by) or type(by) is int else ""


def render_label_studio(annotations: Annotations) -> Rendered:
    """Returns tasks for Label Studio, as a list of JSON.

    Raises:
        UsageError: an image has boxes, and its size is not known.
    """
    is_own = annotations.source == SOURCE
    tasks = []
    for image in annotations.images:
        more = take_more(image.more, is_own)
        # A store may have got these facts from anybody.
        data_facts, annotation, choices = (more.pop(name, None) for name in ("data", _ANNOTATION, _CHOICES))
        data: dict[str, Any] = {**(data_facts if is_object(data_facts) else {}), "image": _render_name(image.name)}
        size = image.size
        ours = {"sha256": image.sha256, "split": image.split, "labelled_by": image.by}
        data |= {name: value for name, value in ours.items() if value}
        data |= {} if size is None else {"width": size[0], "height": size[1]}
        results: list[dict[str, Any]] = []
        if image.labels:
            head = {**_USUAL_CHOICES, **(choices if is_object(choices) else {})}
            results.append({**head, "type": "choices", "value": {"choices": list(image.labels)}})
        results += [_render_box(box, expect_size(image, "Label Studio"), is_own) for box in image.boxes]
        # A task that somebody has looked at, and found nothing to mark in, has an annotation without results.
        is_annotated = bool(results) or is_object(annotation)
        entry = {**(annotation if is_object(annotation) else {}), "result": results}
        tasks.append({**more, "data": data, "annotations": [entry] if is_annotated else []})
    return Rendered(json.dumps(tasks, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def _render_name(name: str) -> str:
    # Addresses and absolute paths are what the user's Label Studio shows already.
    if "://" in name or (name.startswith("/") and not name.startswith(LOCAL_FILES)):
        return name
    return LOCAL_FILES + quote(name)


def _render_box(box: Box, size: Size, is_own: bool) -> dict[str, Any]:
    numbers = convert_box(box, "percent", size)
    more = take_more(box.more, is_own)
    rotation = more.pop("rotation", 0)
    value = {**dict(zip(_PERCENT, numbers, strict=True)), "rotation": rotation, "rectanglelabels": [box.label]}
    head = {**_USUAL, **more, "type": "rectanglelabels"}
    return {**head, "original_width": size[0], "original_height": size[1], "value": value}
