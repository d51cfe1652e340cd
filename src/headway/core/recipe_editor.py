"""Edits values in the text of a recipe; comments, order, quotes and flow style stay, and lines end in \\n.

Not ruamel.yaml: its round trip (0.19.1) reindents lists in 6 of the 14 recipes without any change and
fails 17 of the 26 cases of this editor's tests, among them a comment that is lost behind a replaced list.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import RecipeError
from headway.core.files import read_text
from headway.core.recipe import RecipePart
from headway.core.recipe_yaml import (
    RecipeDumper,
    RecipeLoader,
    dump_in_line,
    dump_tree,
    parse_override,
    parse_recipe,
    set_value,
)

# Start and end of the characters to replace, and their replacement.
Edit = tuple[int, int, str]


def edit_recipe(path: Path, overrides: Sequence[str], values: Mapping[str, Any], model: type[RecipePart]) -> str:
    """Returns a recipe's YAML with overrides and other values by dotted key; no defaults are added.

    A short form (`data: FOLDER`) is written out if one of its keys is set. If a value of an anchor is set, which counts
    elsewhere too, the whole recipe is dumped again and loses its comments.

    Raises:
        RecipeError: there is no such file, or it is not YAML.
        pydantic.ValidationError: it is not a recipe of this kind.
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
            # A single value in place of a mapping is a short form; the validated part has its long form.
            if not isinstance(inner, dict):
                long = part.model_dump(mode="json", exclude_unset=True)
                set_value(tree, above[: place + 1], long, key)
                break
        set_value(tree, key.split("."), value, key)
    # Edits may have another effect than intended, for example through an anchor: parse the result to be sure.
    edited = _apply_edits(text, before, tree)
    if _reads_as(edited, tree):
        return edited
    return dump_tree(tree)


def _apply_edits(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns the text with the differences between two trees edited in; it may not yet read as `after`."""
    root = yaml.compose(text, _AliasLoader)
    edits = list(_find_edits(text, root, before, after)) if isinstance(root, yaml.MappingNode) else []
    edits.sort(key=lambda edit: edit[0])
    # From the back, so that offsets stay valid. At equal offsets the inner mapping's keys come first in the text.
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    return text


def _reads_as(text: str, tree: Mapping[str, Any]) -> bool:
    try:
        return _is_same(parse_recipe(text, "")[0], tree)
    except RecipeError:
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Returns True if two trees are equal, in any order of keys; NaN equals NaN."""
    first, second = (yaml.dump(value, Dumper=RecipeDumper) for value in (one, other))
    return first == second


class _AliasLoader(RecipeLoader):
    """Composes an alias as a scalar `*name` at its own position, not as the node that it refers to."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()  # type: ignore[no-untyped-call]
            return yaml.ScalarNode("", f"*{event.anchor}", event.start_mark, event.end_mark)
        return super().compose_node(parent, index)


def _find_edits(text: str, node: yaml.Node, old: Any, new: Any) -> Iterator[Edit]:
    """Yields an edit for each innermost value that differs, and one for all new keys of a mapping."""
    if _is_same(old, new):
        return
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and old.keys() <= new.keys():
        # Keys that are in the text of this mapping; others may come from a merged one.
        own = {_read_key(key): value for key, value in node.value}
        for key in own:
            if key in old:
                yield from _find_edits(text, own[key], old[key], new[key])
        others = {key: value for key, value in new.items() if key not in own}
        if more := {key: value for key, value in others.items() if key not in old or not _is_same(old[key], value)}:
            # This also overrides a key that comes from another mapping by `<<`: a mapping's own keys win.
            yield _append_keys(text, node, more)
    # Lists of equal length are edited entry by entry, others are replaced as a whole.
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and len(new) == len(node.value):
        for inner, one, other in zip(node.value, old, new, strict=True):
            yield from _find_edits(text, inner, one, other)
    else:
        start, end = node.start_mark.index, _find_end(text, node)
        # A block starts on a line of its own: its replacement moves up behind the key, unless a comment is there.
        if text[:start].rstrip(" ").endswith("\n"):
            above = text[:start].rstrip()
            bare = above.endswith(":") and "#" not in above.rpartition("\n")[2]
            yield len(above) if bare else start, end, " " + dump_in_line(new)
        else:
            yield start, end, (" " if start == end else "") + dump_in_line(new)


def _read_key(node: yaml.Node) -> str:
    """Returns a key as `parse_recipe` has it; `<<` is not constructed."""
    return "<<" if node.tag == "tag:yaml.org,2002:merge" else str(RecipeLoader("").construct_object(node))


def _find_end(text: str, node: yaml.Node) -> int:
    """Returns the offset behind a value's last character."""
    # PyYAML's end mark of a block is the start of the next key, behind comments and blank lines.
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_end(text, last[1] if isinstance(node, yaml.MappingNode) else last)
    start, end = node.start_mark.index, node.end_mark.index
    return start + len(text[start:end].rstrip())


def _append_keys(text: str, node: yaml.MappingNode, more: Mapping[str, Any]) -> Edit:
    """Returns the edit that appends keys to a mapping, in its line (flow style) or on lines of their own."""
    parts = [f"{dump_in_line(key)}: {dump_in_line(value)}" for key, value in more.items()]
    # An empty mapping is `{}`: insert before the bracket.
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
