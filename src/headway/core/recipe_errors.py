"""Turns pydantic's errors into sentences about a recipe: the file and line, the user's own key, and how to fix it."""

from __future__ import annotations

import datetime
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from headway.core.errors import suggest_nearest

MOST_ERRORS = 50
"""Errors of one recipe that are named one by one."""

KIND_WORDS = {
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values"),
    "string_type": "a text",
}
"""The kind of value that each of pydantic's error types asks for, in a recipe's words."""

_KIND = re.compile(r"(constrained-)?(int|float|str|bool)|.*\[.*\]|[A-Z]\w*")
"""Elements that pydantic adds to a location for a union, as in `micro_batch.int` or `device.Device.title`."""

_CLOSE = 0.8
"""Similarity (difflib) from which a key of the same part beats a key of that very name elsewhere in the recipe."""
_DEEPEST = 8
"""Levels of parts that the search for a key goes down: a part may hold its own kind."""


class _ErrorPlace(NamedTuple):
    """The place of one error in the user's own terms.

    Attributes:
        keys: the user's keys, without the elements that pydantic adds.
        part: the part that should have the last key; None: unknown.
        members: if that part was picked from a tagged union, all its members by tag.
    """

    keys: list[str]
    part: type[BaseModel] | None
    members: Mapping[str, type[BaseModel]]

    @property
    def dotted(self) -> str:
        return ".".join(self.keys)


def explain_errors(
    error: ValidationError, tree: Mapping[str, Any], model: type[BaseModel], path: Path, origins: Mapping[str, str]
) -> str:
    """Describes all errors of a recipe, one line each.

    Args:
        tree: the recipe as it was read, with the overrides.
        origins: file and line, or `command line`, by dotted key.
    """
    out: list[str] = []
    # A value that may be of several kinds has one error for each kind: they become one sentence.
    kinds: dict[str, tuple[int, list[str]]] = {}
    # A key that is missing is often there, but misspelt: the unknown key comes first.
    entries = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    places = [_find_place(entry, tree, model) for entry in entries]
    for entry, place in zip(entries[:MOST_ERRORS], places, strict=False):
        keys = place.keys
        # Of a union of a plain value and a part, the user meant the part if an error lies inside it.
        if any(other.keys[: len(keys)] == keys != other.keys for other in places):
            continue
        where = f"{_find_origin(keys, origins) or path.name}: "
        if (sentence := _explain_key(entry, place, model)) is not None:
            out.append(where + sentence)
            continue
        if place.dotted not in kinds:
            kinds[place.dotted] = (len(out), [])
            out.append("")
        index, wanted = kinds[place.dotted]
        wanted.append(_describe_kind(entry))
        choices = _list_choices(entry)
        close = suggest_nearest(entry["input"], choices, only_close=True) if choices else ""
        text = f"{where}{place.dotted}: Input should be {' or '.join(wanted)}, not {_show(entry['input'])}."
        out[index] = f"{text} {close}".rstrip()
    if (more := len(entries) - MOST_ERRORS) > 0:
        out.append(f"{path.name}: {more:,} more errors.")
    return "\n".join(out)


def find_unknown_key(keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """Says that the recipe has no such key, and names the right one. None: it has it, or nothing is known of it."""
    annotation: Any = model
    for index, key in enumerate(keys):
        part = _first_model(annotation)
        if part is not None and key not in part.model_fields and not key.isdecimal():
            place = _ErrorPlace(list(keys[: index + 1]), part, {})
            return _refuse_key(place, model)
        annotation = _descend(annotation, int(key) if key.isdecimal() else key)
    return None


def _find_origin(keys: Sequence[str], origins: Mapping[str, str]) -> str:
    """The file and line of the nearest key above, else of the first key below."""
    above = [".".join(keys[:n]) for n in range(len(keys), 0, -1)]
    for key in above:
        if key in origins:
            return origins[key]
    below = f"{above[0]}." if above else "."
    return next((origin for key, origin in origins.items() if above and key.startswith(below)), "")


def _find_place(entry: Any, tree: Any, model: type[BaseModel]) -> _ErrorPlace:
    """Follows a location of pydantic through the recipe and its model at once."""
    keys: list[str] = []
    annotation: Any = model
    part: type[BaseModel] | None = None
    members: Mapping[str, type[BaseModel]] = {}
    last = len(entry["loc"]) - 1
    for index, element in enumerate(entry["loc"]):
        # pydantic puts the tag of a union into the location: `optimizer.lars.clip`. It is not a key of the user.
        tagged = _find_tagged_members(annotation)
        if element in tagged:
            annotation, members = tagged[element], tagged
            continue
        has = element in tree if isinstance(tree, dict) else isinstance(tree, list) and element in range(len(tree))
        is_missing = entry["type"] == "missing" and index == last
        # A key that the user wrote counts, also if it looks like one of pydantic's own elements.
        if has or is_missing or not _KIND.fullmatch(str(element)):
            keys.append(str(element))
            part = _first_model(annotation)
            if index < last:
                annotation, members = _descend(annotation, element), {}
            tree = tree[element] if has else None
    return _ErrorPlace(keys, part, members)


def _explain_key(entry: Any, place: _ErrorPlace, model: type[BaseModel]) -> str | None:
    """The sentence for an error about a key or a combination of keys; None: the error is about a value."""
    kind, dotted = entry["type"], place.dotted
    if kind == "extra_forbidden":
        return _refuse_key(place, model)
    if kind == "missing":
        return f"the key {dotted!r} is missing."
    if kind == "value_error":
        text = entry["msg"].removeprefix("Value error, ").removeprefix(f"{place.keys[-1]} " if place.keys else "")
        return f"{dotted + ': ' if dotted else ''}{text}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        name = entry["ctx"]["discriminator"].strip("'")
        key = f"{dotted}.{name}" if dotted else name
        if kind == "union_tag_invalid":
            tags, given = re.findall(r"'([^']*)'", entry["ctx"]["expected_tags"]), entry["ctx"]["tag"]
            choices = ", ".join(map(repr, tags[:-1])) + f" or {tags[-1]!r}"
            hint = suggest_nearest(given, tags, only_close=True)
            return f"{key}: Input should be {choices}, not {given!r}. {hint}".rstrip()
        # pydantic looks no further than the tag: a misspelt tag key would be called missing.
        given = [str(one) for one in entry["input"]] if isinstance(entry["input"], dict) else []
        if close := difflib.get_close_matches(name, given, n=1):
            return f"there is no key {key.removesuffix(name) + close[0]!r}. Did you mean {key!r}?"
        return f"the key {key!r} is missing."
    return None


def _refuse_key(place: _ErrorPlace, model: type[BaseModel]) -> str:
    """The sentence for an unknown key, with the key that was probably meant."""
    *above, key = place.keys
    prefix = "".join(f"{one}." for one in above)
    # A key of another member is not a typo: the message names the members that have it.
    owners = [tag for tag, member in place.members.items() if key in member.model_fields]
    if owners and place.part is not None:
        tag = next(tag for tag, member in place.members.items() if member is place.part)
        return (
            f"{prefix + key!r} belongs to {', '.join(owners)}; {tag} has {', '.join(_own_fields_first(place.part))}. "
            f"Remove it, or change {prefix}name."
        )
    return f"there is no key {prefix + key!r}. {_suggest_key(key, prefix, place.part, model)}".rstrip()


def _suggest_key(key: str, prefix: str, part: type[BaseModel] | None, model: type[BaseModel]) -> str:
    """A similar key of the same part, else the same or a similar key anywhere in the recipe, else the part's keys."""
    own = list(part.model_fields) if part is not None else []
    # A close typo of an own key first, then the same name elsewhere, then vaguer matches.
    if close := difflib.get_close_matches(key, own, n=1, cutoff=_CLOSE):
        return f"Did you mean {prefix + close[0]!r}?"
    elsewhere: dict[str, list[str]] = {}
    for dotted in dict.fromkeys(_walk_keys(model)):
        if not dotted.startswith(prefix) or not prefix:
            elsewhere.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    if key not in elsewhere:
        if part is not None and difflib.get_close_matches(key, own, n=1):
            return suggest_nearest(key, own, prefix=prefix)
        close = difflib.get_close_matches(key, elsewhere, n=1, cutoff=_CLOSE)
        if not close:
            return suggest_nearest(key, own, prefix=prefix) if own else ""
        key = close[0]
    places = elsewhere[key]
    # The key nearest to the top is the likeliest: `batch` before `evaluate.batch`.
    level = min(dotted.count(".") for dotted in places)
    return f"Did you mean {' or '.join(repr(one) for one in places if one.count('.') == level)}?"


def _own_fields_first(part: type[BaseModel]) -> list[str]:
    own = inspect.get_annotations(part)
    return sorted((name for name in part.model_fields if name != "name"), key=lambda name: name not in own)


def _walk_keys(annotation: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """All keys of a model by their dotted names; a list of parts shows its first entry."""
    for part in _models(annotation) if depth < _DEEPEST else ():
        for name, field in part.model_fields.items():
            yield prefix + name
            is_list = any(typing.get_origin(one) in (list, tuple) for one in _alternatives(_type_of(field)))
            yield from _walk_keys(_type_of(field), f"{prefix}{name}.{'0.' if is_list else ''}", depth + 1)


def _type_of(field: FieldInfo) -> Any:
    """A field's type with its discriminator, which pydantic takes out of the annotation."""
    if isinstance(field.discriminator, str):
        return Annotated[field.annotation, Field(discriminator=field.discriminator)]
    return field.annotation


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, at any depth; a type that is not a union is its own only member."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _alternatives(inner[0])
    if origin in (typing.Union, types.UnionType):
        return [found for one in inner for found in _alternatives(one)]
    return [annotation]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """All parts that may stand at a place, or in a list or mapping there."""
    models = []
    for one in _alternatives(annotation):
        # Parts inside lists, tuples and mappings.
        if typing.get_origin(one) is not None:
            models += [model for inner in typing.get_args(one) for model in _models(inner)]
        elif isinstance(one, type) and issubclass(one, BaseModel):
            models.append(one)
    return models


def _first_model(annotation: Any) -> type[BaseModel] | None:
    return next(
        (one for one in _alternatives(annotation) if isinstance(one, type) and issubclass(one, BaseModel)), None
    )


def _find_tagged_members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The members of a tagged union by tag; empty for every other type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        # Only `Field(discriminator="name")` makes a union tagged by a key.
        names = [one.discriminator for one in inner[1:] if isinstance(one, FieldInfo)]
        if name := next((name for name in names if isinstance(name, str)), None):
            members = _models(inner[0])
            return {tag: one for one in members for tag in typing.get_args(one.model_fields[name].annotation)}
        return _find_tagged_members(inner[0])
    if origin in (typing.Union, types.UnionType):
        return {tag: member for one in inner for tag, member in _find_tagged_members(one).items()}
    return {}


def _descend(annotation: Any, key: str | int) -> Any:
    """The type of the value that a key has in a value of this type; None: unknown."""
    for one in _alternatives(annotation):
        origin, inner = typing.get_origin(one), typing.get_args(one)
        if origin in (list, tuple) and isinstance(key, int):
            return inner[0]
        if origin in (dict, Mapping) and isinstance(key, str):
            return inner[1]
        if isinstance(one, type) and issubclass(one, BaseModel) and key in one.model_fields:
            return _type_of(one.model_fields[str(key)])
    return None


def _describe_kind(entry: Any) -> str:
    if entry["type"] == "too_short":
        return f"a list of {entry['ctx']['min_length']} or more"
    kind: str = KIND_WORDS.get(entry["type"]) or entry["msg"].removeprefix("Input should be ")
    return kind


def _show(value: Any) -> str:
    return "nothing" if value is None else str(value) if isinstance(value, datetime.date) else repr(value)


def _list_choices(entry: Any) -> list[str]:
    """The texts that a key accepts, if it accepts one of several texts."""
    is_text = entry["type"] == "literal_error" and isinstance(entry["input"], str)
    return re.findall(r"'([^']*)'", entry["ctx"]["expected"]) if is_text else []
