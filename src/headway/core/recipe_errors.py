"""Turns pydantic's errors into sentences about a recipe: the file and line, the user's own key, and how to fix it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.core.key_suggestions import ErrorPlace, refuse_key
from headway.core.recipe_types import (
    count_entries,
    find_first_part,
    find_tagged_members,
    get_value_type,
    has_list_of_texts,
    list_alternatives,
)
from headway.core.value_errors import SENTENCE_ERRORS, describe_value, list_kinds, strip_prefix, suggest_value

MOST_ERRORS = 50
"""Errors of one recipe that are named one by one."""

_KIND = re.compile(r"(constrained-)?(int|float|str|bool)|.*\[.*\]|[A-Z]\w*")
"""Elements that pydantic adds to a location for a union, as in `micro_batch.int` or `device.Device.title`."""

_TAG_NAMES = ("name", "type", "kind", "mode", "method")
"""Keys that say elsewhere which one of several parts is meant."""


def explain_errors(
    error: ValidationError, tree: Mapping[str, Any], model: type[BaseModel], path: Path, origins: Mapping[str, str]
) -> str:
    """Describes all errors of a recipe, one line each.

    Args:
        tree: the recipe as it was read, with the overrides.
        origins: file and line, `command line` or `overrides`, by dotted key.
    """
    out: list[str] = []
    # A value that may be of several kinds has one error for each kind: they become one sentence.
    values: dict[str, tuple[int, list[str], list[str]]] = {}
    # A key that is missing is often there, but misspelt: the unknown key comes first.
    entries = sorted(map(_join_entries, error.errors(include_url=False)), key=lambda one: one["type"] == "missing")
    places = [_find_place(entry, tree, model) for entry in entries]
    for entry, place in zip(entries[:MOST_ERRORS], places, strict=False):
        keys = place.keys
        # Of a union of a plain value and a part, the user meant the part if an error lies inside it.
        if any(other.keys[: len(keys)] == keys != other.keys for other in places):
            continue
        tag = [entry["ctx"]["discriminator"].strip("'")] if entry["type"] == "union_tag_invalid" else []
        # An error of the whole may begin with the key that it is about.
        head = "" if keys else entry["msg"].removeprefix("Value error, ").partition(": ")[0]
        named = [] if " " in head or not head else head.split(".")
        where = f"{_find_origin(named or [*keys, *tag], origins) or path.name}: "
        if (sentence := _explain_key(entry, place, model)) is not None:
            out.append(where + sentence)
            continue
        if place.dotted not in values:
            values[place.dotted] = (len(out), [], [])
            out.append("")
        index, kinds, hints = values[place.dotted]
        kinds += _list_kinds(entry, place)
        hints.append(_suggest_fix(entry, place, model))
        # The error of the last kind completes the sentence.
        hint = next((one for one in hints if one), "")
        out[index] = f"{where}{describe_value(place.dotted or 'it', kinds, entry['input'])}. {hint}".rstrip()
    if (more := len(entries) - MOST_ERRORS) > 0:
        out.append(f"{path.name}: {more:,} more errors.")
    return "\n".join(out)


def find_unknown_key(keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """Says that the recipe has no such key, and names the right one. None: it has it, or nothing is known of it."""
    annotation: Any = model
    for index, key in enumerate(keys):
        parts = [part for part in map(find_first_part, list_alternatives(annotation)) if part is not None]
        if parts and not key.isdecimal() and not any(key in part.model_fields for part in parts):
            # Of several parts, such as the optimizers, the one that has the nearest key was meant.
            close = difflib.get_close_matches(key, [name for part in parts for name in part.model_fields], n=1)
            part = next((part for part in parts if set(close) <= part.model_fields.keys()), parts[0])
            return refuse_key(ErrorPlace(list(keys[: index + 1]), part, {}), model)
        annotation = get_value_type(annotation, int(key) if key.isdecimal() else key)
    return None


def _join_entries(entry: Any) -> Any:
    """Returns the error of a whole list in place of that of an entry that it lacks."""
    if entry["type"] == "missing" and entry["loc"] and isinstance(entry["loc"][-1], int):
        return {**entry, "type": "too_short", "loc": entry["loc"][:-1], "ctx": {"min_length": entry["loc"][-1] + 1}}
    return entry


def _find_origin(keys: Sequence[str], origins: Mapping[str, str]) -> str:
    """The file and line of the nearest key above, else of the first key below."""
    above = [".".join(keys[:n]) for n in range(len(keys), 0, -1)]
    for key in above:
        if key in origins:
            return origins[key]
    below = f"{above[0]}." if above else "."
    return next((origin for key, origin in origins.items() if above and key.startswith(below)), "")


def _find_place(entry: Any, tree: Any, model: type[BaseModel]) -> ErrorPlace:
    """Follows a location of pydantic through the recipe and its model at once."""
    keys: list[str] = []
    annotation: Any = model
    part: type[BaseModel] | None = None
    members: Mapping[str, type[BaseModel]] = {}
    last = len(entry["loc"]) - 1
    for index, element in enumerate(entry["loc"]):
        # pydantic puts the tag of a union into the location: `optimizer.lars.clip`. It is not a key of the user.
        tagged = find_tagged_members(annotation)
        if element in tagged:
            annotation, members = tagged[element], tagged
            continue
        has = element in tree if isinstance(tree, dict) else isinstance(tree, list) and element in range(len(tree))
        is_missing = entry["type"] == "missing" and index == last
        # A key that the user wrote counts, also if it looks like one of pydantic's own elements.
        if has or is_missing or not _KIND.fullmatch(str(element)):
            keys.append(str(element))
            part = find_first_part(annotation)
            # An unknown key keeps the members of its part, one of which may have it.
            if index < last or entry["type"] != "extra_forbidden":
                annotation = get_value_type(annotation, element)
            if index < last:
                members = {}
            tree = tree[element] if has else None
    return ErrorPlace(keys, part, members, annotation)


def _explain_key(entry: Any, place: ErrorPlace, model: type[BaseModel]) -> str | None:
    """The sentence for an error about a key or a combination of keys; None: the error is about a value."""
    kind, dotted = entry["type"], place.dotted
    if kind == "extra_forbidden":
        return refuse_key(place, model)
    if kind == "missing":
        return f"the key {dotted!r} is missing."
    if kind in SENTENCE_ERRORS:
        text = strip_prefix(entry["msg"]).removeprefix(f"{place.keys[-1]} " if place.keys else "")
        return f"{dotted + ': ' if dotted else ''}{text}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        name = entry["ctx"]["discriminator"].strip("'")
        key = f"{dotted}.{name}" if dotted else name
        if kind == "union_tag_invalid":
            tags, given = re.findall(r"'([^']*)'", entry["ctx"]["expected_tags"]), entry["ctx"]["tag"]
            hint = suggest_value({**entry, "input": given}, _get_value_synonyms(key, model))
            return f"{describe_value(key, list(map(repr, tags)), given)}. {hint}".rstrip()
        # pydantic looks no further than the tag: a misspelt tag key would be called missing.
        given = [str(one) for one in entry["input"]] if isinstance(entry["input"], dict) else []
        if close := difflib.get_close_matches(name, given, n=1) or [one for one in given if one in _TAG_NAMES]:
            return f"there is no key {key.removesuffix(name) + close[0]!r}. Did you mean {key!r}?"
        return f"the key {key!r} is missing."
    return None


def _list_kinds(entry: Any, place: ErrorPlace) -> list[str]:
    """The kinds of value that a key accepts. A list with a fixed number of entries is named with that number."""
    if entry["type"] in ("too_short", "too_long") and (count := count_entries(place.value_type)) is not None:
        return [f"a list of {count}"]
    return list_kinds(entry)


def _suggest_fix(entry: Any, place: ErrorPlace, model: type[BaseModel]) -> str:
    """A sentence with the value that was probably meant; empty if it is not known."""
    value = entry["input"]
    parts = [part for part in map(find_first_part, list_alternatives(place.value_type)) if part is not None]
    if entry["type"] == "model_type" and not isinstance(value, str) and len(parts) == 1:
        # `early_stopping: true`
        return f"Its keys: {', '.join(parts[0].model_fields)}."
    if isinstance(value, str) and value:
        if entry["type"] in ("tuple_type", "list_type") and has_list_of_texts(place.value_type):
            return f"Write {place.dotted}: [{value}]."
        # `optimizer: sgd` or `model: resnet18`: the text belongs to the key that says which one, a path to `factory`.
        keys = ("factory", "name") if ":" in value else ("name", "factory")
        for key in keys if entry["type"].startswith("model") else ():
            if any(key in part.model_fields for part in parts):
                return f"Write {place.dotted}: {{{key}: {value}}}."
    return suggest_value(entry, _get_value_synonyms(place.dotted, model))


def _get_value_synonyms(dotted: str, model: type[BaseModel]) -> Mapping[str, str]:
    synonyms: Mapping[str, Mapping[str, str]] = getattr(model, "value_synonyms", {})
    return synonyms.get(dotted, {})
