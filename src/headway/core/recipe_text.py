"""A recipe's own text with other values: its comments, its order and its way of writing stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import RecipeError
from headway.core.recipe import Part
from headway.core.recipe_yaml import Reader, Writer, parse, parse_value, put

Edit = tuple[int, int, str]
"""First character, the one behind the last, and what comes in their place."""


def given(path: Path, overrides: Sequence[str], values: Mapping[str, Any], model: type[Part]) -> str:
    """The YAML of what a recipe itself says, with overrides and other values by dotted key: no default is added. A
    short form (`data: FOLDER`) is written out where one of its keys is set. Comments stay; only where a value is set
    that counts elsewhere too (an anchor's), or whose edges YAML does not tell, the whole is written anew without them.

    Raises:
        RecipeError: no such file, no YAML. pydantic.ValidationError: this is no such recipe.
    """
    text = path.read_text(encoding="utf-8")
    before, _ = parse(text, str(path))
    tree = copy.deepcopy(before)
    for override in overrides:
        key, _, value = override.partition("=")
        put(tree, key.split("."), parse_value(value, key), key)
    for key, value in values.items():
        inner: Any = tree
        part: Any = model.model_validate(tree)
        for place, name in enumerate(above := key.split(".")[:-1]):
            inner, part = inner.get(name), getattr(part, name)
            if inner is None:
                break
            if not isinstance(inner, dict):
                long = part.model_dump(mode="json", exclude_unset=True)
                put(tree, above[: place + 1], long, key)
                break
        put(tree, key.split("."), value, key)
    edited = _edited(text, before, tree)
    if _reads(edited, tree):
        return edited
    return yaml.dump(tree, Dumper=Writer, sort_keys=False, allow_unicode=True, width=120)


def _edited(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A text that reads as `after`, unless what differs is written elsewhere or over several lines."""
    root = yaml.compose(text, Reader)
    edits = _edits(text, root, before, after) if isinstance(root, yaml.MappingNode) else []
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _reads(text: str, tree: Mapping[str, Any]) -> bool:
    try:
        return _same(parse(text, "")[0], tree)
    except RecipeError:
        return False


def _same(one: Any, other: Any) -> bool:
    """Whatever the order of keys; NaN is NaN."""
    first, second = (yaml.dump(value, Dumper=Writer) for value in (one, other))
    return first == second


def _edits(text: str, node: yaml.MappingNode, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Edit]:
    """Of the values that differ; and of all keys that a mapping gets, one."""
    own = {key.value: value for key, value in node.value}
    for key in before:
        if key not in own or _same(before[key], after[key]):
            continue
        inner, old, new = own[key], before[key], after[key]
        if isinstance(inner, yaml.MappingNode) and isinstance(new, dict) and old.keys() <= new.keys():
            yield from _edits(text, inner, old, new)
            continue
        start, end = inner.start_mark.index, inner.end_mark.index
        yield start, end, (" " if start == end else "") + _flow(new)
    if more := {key: value for key, value in after.items() if key not in before}:
        yield _added(text, node, more)


def _added(text: str, node: yaml.MappingNode, more: Mapping[str, Any]) -> Edit:
    """Keys at the end of a mapping; of one over several lines, behind its last value that is one line."""
    parts = [f"{_flow(key)}: {_flow(value)}" for key, value in more.items()]
    if node.flow_style:
        end = node.end_mark.index - 1
        return end, end, ("" if not node.value else ", ") + ", ".join(parts)
    key, value = node.value[0]
    indent, at = " " * key.start_mark.column, key.start_mark.index
    for _, value in node.value:
        if value.start_mark.line == value.end_mark.line:
            at = text.find("\n", value.end_mark.index) + 1
    lines = "".join(f"{indent}{part}\n" for part in parts)
    if at == 0:  # the text ends without a line's end
        return len(text), len(text), f"\n{lines}"
    if at == key.start_mark.index:
        return at, at, lines.lstrip(" ") + indent
    return at, at, lines


def _flow(value: Any) -> str:
    """In one line, as it may stand inside of brackets."""
    written = yaml.dump(
        [value], Dumper=Writer, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return written.strip()[1:-1]
