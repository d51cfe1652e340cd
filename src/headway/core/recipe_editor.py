"""A recipe's own text with other values: its comments, its order and its way of writing stay; a line ends in \\n."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import RecipeError
from headway.core.files import read_text
from headway.core.recipe import RecipePart
from headway.core.recipe_yaml import RecipeDumper, RecipeLoader, parse_override, parse_recipe, set_value

Edit = tuple[int, int, str]
"""First character, the one behind the last, and what comes in their place."""


def edit_recipe(path: Path, overrides: Sequence[str], values: Mapping[str, Any], model: type[RecipePart]) -> str:
    """The YAML of what a recipe itself says, with overrides and other values by dotted key: no default is added. A
    short form (`data: FOLDER`) is written out where one of its keys is set. Comments stay; only where a value is set
    that counts elsewhere too (an anchor's), the whole is written anew without them.

    Raises:
        RecipeError: no such file, no YAML. pydantic.ValidationError: this is no such recipe.
    """
    text = read_text(path)
    before, _ = parse_recipe(text, str(path))
    tree = copy.deepcopy(before)
    for override in overrides:
        key, _, value = override.partition("=")
        set_value(tree, key.split("."), parse_override(value, key), key)
    for key, value in values.items():
        inner: Any = tree
        part: Any = model.model_validate(tree)
        for place, name in enumerate(above := key.split(".")[:-1]):
            inner, part = inner.get(name), getattr(part, name)
            if inner is None:
                break
            if not isinstance(inner, dict):
                long = part.model_dump(mode="json", exclude_unset=True)
                set_value(tree, above[: place + 1], long, key)
                break
        set_value(tree, key.split("."), value, key)
    edited = _apply_edits(text, before, tree)
    if _reads_as(edited, tree):
        return edited
    return yaml.dump(tree, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def _apply_edits(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A text that reads as `after`, unless what differs is written elsewhere or over several lines."""
    root = yaml.compose(text, _AliasLoader)
    edits = list(_find_edits(text, root, before, after)) if isinstance(root, yaml.MappingNode) else []
    edits.sort(key=lambda edit: edit[0])
    for start, end, new in reversed(edits):  # of one place, what the inner mapping gets comes to stand first
        text = text[:start] + new + text[end:]
    return text


def _reads_as(text: str, tree: Mapping[str, Any]) -> bool:
    try:
        return _is_same(parse_recipe(text, "")[0], tree)
    except RecipeError:
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Whatever the order of keys; NaN is NaN."""
    first, second = (yaml.dump(value, Dumper=RecipeDumper) for value in (one, other))
    return first == second


class _AliasLoader(RecipeLoader):
    """Nodes as they stand in the text: an alias is a value of its own, `*name`, in its own place."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()  # type: ignore[no-untyped-call]
            return yaml.ScalarNode("", f"*{event.anchor}", event.start_mark, event.end_mark)
        return super().compose_node(parent, index)


def _find_edits(text: str, node: yaml.Node, old: Any, new: Any) -> Iterator[Edit]:
    """Of the innermost values that differ; and of all keys that a mapping gets, one."""
    if _is_same(old, new):
        return
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and old.keys() <= new.keys():
        own = {_read_key(key): value for key, value in node.value}
        for key in own:
            if key in old:
                yield from _find_edits(text, own[key], old[key], new[key])
        others = {key: value for key, value in new.items() if key not in own}
        if more := {key: value for key, value in others.items() if key not in old or not _is_same(old[key], value)}:
            yield _append_keys(text, node, more)  # also what another mapping gives by `<<`: a mapping's own keys win
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and len(new) == len(node.value):
        for inner, one, other in zip(node.value, old, new, strict=True):
            yield from _find_edits(text, inner, one, other)
    else:
        start, end = node.start_mark.index, _find_end(text, node)
        if text[:start].rstrip(" ").endswith("\n"):  # a block that begins in a line of its own: behind its key
            above = text[:start].rstrip()
            bare = above.endswith(":") and "#" not in above.rpartition("\n")[2]
            yield len(above) if bare else start, end, " " + _dump_in_line(new)
        else:
            yield start, end, (" " if start == end else "") + _dump_in_line(new)


def _read_key(node: yaml.Node) -> str:
    """As `parse` has it; `<<` is none of its keys."""
    return "<<" if node.tag == "tag:yaml.org,2002:merge" else str(RecipeLoader("").construct_object(node))


def _find_end(text: str, node: yaml.Node) -> int:
    """Behind the last character of a value. YAML's own mark of a block is where the next key begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_end(text, last[1] if isinstance(node, yaml.MappingNode) else last)
    start, end = node.start_mark.index, node.end_mark.index
    return start + len(text[start:end].rstrip())


def _append_keys(text: str, node: yaml.MappingNode, more: Mapping[str, Any]) -> Edit:
    """Keys behind the last one of a mapping, in its line or in lines of their own."""
    parts = [f"{_dump_in_line(key)}: {_dump_in_line(value)}" for key, value in more.items()]
    if not node.value:
        at = node.end_mark.index - 1
        return at, at, ", ".join(parts)
    key, value = node.value[-1]
    at = _find_end(text, value)
    if node.flow_style:
        return at, at, "".join(f", {part}" for part in parts)
    lines = "\n".join(f"{' ' * key.start_mark.column}{part}" for part in parts)
    at = text.find("\n", at) + 1
    return (at, at, f"{lines}\n") if at else (len(text), len(text), f"\n{lines}")


def _dump_in_line(value: Any) -> str:
    """In one line, as it may stand inside of brackets."""
    written = yaml.dump(
        [value], Dumper=RecipeDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return written.strip()[1:-1]
