"""Parsing of recipe YAML into a tree and the line of each key, with limits against hostile files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headway.core.errors import RecipeError

# Limit of values, where an alias counts as all values that it stands for; a recipe has about 200.
MOST_VALUES = 20_000
# Limit of characters: PyYAML parses about 100,000 a second.
MOST_CHARACTERS = 1 << 20


class RecipeLoader(yaml.SafeLoader):
    """Safe YAML loader that reads 1e-3 as a number: YAML 1.1 takes it for a text and wants 1.0e-3."""


# libyaml is many times as fast as PyYAML's own parser and emitter. It parses by recursion in C, so deep nesting would
# end the process.
if TYPE_CHECKING:
    _FastBase = yaml.SafeLoader
    _FastDumperBase = yaml.SafeDumper
else:
    _FastBase = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    _FastDumperBase = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TEXT_TAG, _MAP_TAG, _LIST_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
# Levels of nesting that are surely no harm: libyaml is stopped by 50,000 of them, and composes 3,000.
_MOST_LEVELS = 2000


class _FastLoader(_FastBase):
    """Loader of the same dialect on top of libyaml, where PyYAML was built with it."""


class RecipeDumper(yaml.SafeDumper):
    """Dumper that matches `RecipeLoader`: a text that looks like 1e-3 is quoted."""


class _FastDumper(_FastDumperBase):
    """Dumper of the same dialect on top of libyaml, where PyYAML was built with it."""


for _dialect in (RecipeLoader, _FastLoader, RecipeDumper, _FastDumper):
    _dialect.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def parse_recipe(text: str, where: str, kind: str = "recipe") -> tuple[dict[str, Any], dict[str, int]]:
    """Parses a YAML text; returns its tree and the line of each dotted key.

    Raises:
        RecipeError: it is not a YAML mapping, has a key twice, or exceeds the limits.
    """
    lines: dict[str, int] = {}

    def build_value(node: yaml.Node, path: tuple[str, ...], line: int) -> Any:
        if path:
            lines[".".join(path)] = line
        if isinstance(node, yaml.MappingNode):
            # Entries merged by `<<` come first, so that the mapping's own keys override them.
            loader.flatten_mapping(node)
            out: dict[str, Any] = {}
            for key_node, value_node in node.value:
                at = key_node.start_mark.line + 1
                if not isinstance(key_node, yaml.ScalarNode):
                    raise RecipeError("a key is a single value", where=f"{where}:{at}")
                key = str(loader.construct_object(key_node))
                out[key] = build_value(value_node, (*path, key), at)
            return out
        if isinstance(node, yaml.SequenceNode):
            entries = enumerate(node.value)
            return [build_value(child, (*path, str(place)), child.start_mark.line + 1) for place, child in entries]
        try:
            return loader.construct_object(node)
        # PyYAML raises ValueError for a date such as 2024-13-01.
        except ValueError as error:
            raise RecipeError(f"{node.value!r} is not a value ({error})", where=f"{where}:{line}") from None

    try:
        loader = RecipeLoader(text)
        # Before anything is composed.
        if len(text) > MOST_CHARACTERS:
            many = f"it has {len(text):,} characters, and a {kind} at most {MOST_CHARACTERS:,}"
            raise RecipeError(many, where=where)
        node = loader.get_single_node()
        _refuse_duplicate_keys(node, where, set())
        _refuse_too_many_values(node, where)
        tree = build_value(node, (), 1) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        what = getattr(error, "problem", None) or getattr(error, "reason", error)
        fix = "Indent with blanks, not with tabs." if "'\\t'" in str(what) else ""
        raise RecipeError(f"this is not YAML ({what})", where=at, fix=fix) from None
    except RecursionError:
        raise RecipeError("this YAML holds itself, or is nested too deeply", where=where) from None
    if not isinstance(tree, dict):
        raise RecipeError(f"a {kind} is a mapping of keys to values", where=where)
    return tree, lines


def parse_recipe_tree(text: str, where: str) -> dict[str, Any]:
    """Parses a YAML text as `parse_recipe` does, without the lines of its keys: many times as fast.

    Raises:
        RecipeError: as `parse_recipe`, with the same messages.
    """
    # Without anchors there are no aliases, and each value takes a character: none of the limits can be exceeded.
    if len(text) < MOST_VALUES and "&" not in text and _is_shallow(text):
        try:
            loader = _FastLoader(text)
            node = loader.get_single_node()
            if isinstance(node, yaml.MappingNode):
                tree: dict[str, Any] = _build_plain(loader, node)
                return tree
        # The slow parser words the message, and takes what only libyaml refuses.
        except (yaml.YAMLError, ValueError, RecursionError):
            pass
    return parse_recipe(text, where)[0]


def _is_shallow(text: str) -> bool:
    """Returns True if the text cannot be nested deeply. Each level takes a bracket, or begins further right."""
    # A list may begin in the same column as the key above it, hence two levels for a column.
    longest = max(map(len, text.split("\n")))
    return 2 * longest + text.count("[") + text.count("{") <= _MOST_LEVELS


def _build_plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Builds mappings with texts as keys, lists and single values. Raises ValueError for all else, such as two equal
    keys."""
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.tag == _TEXT_TAG else loader.construct_object(node)
    if isinstance(node, yaml.MappingNode) and node.tag == _MAP_TAG:
        tree = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG or key.value in tree:
                raise ValueError
            tree[key.value] = _build_plain(loader, value)
        return tree
    if not isinstance(node, yaml.SequenceNode) or node.tag != _LIST_TAG:
        raise ValueError
    return [_build_plain(loader, value) for value in node.value]


def _refuse_duplicate_keys(node: yaml.Node | None, where: str, seen: set[int]) -> None:
    """Raises RecipeError if a mapping has a key twice; YAML would silently take the last."""
    # `seen`: an alias leads to the same node again, or into a cycle.
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    names: set[str] = set()
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                raise RecipeError(f"the key {key.value!r} occurs twice", where=f"{where}:{key.start_mark.line + 1}")
            names.add(key.value)
        _refuse_duplicate_keys(value, where, seen)


def _refuse_too_many_values(root: yaml.Node | None, where: str) -> None:
    """Raises RecipeError if aliases of aliases make few lines stand for more values than memory holds.

    Each node is counted once; its count includes everything below it.
    """
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            children: list[Any] = []
            if isinstance(node, yaml.MappingNode):
                children = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                children = node.value
            counts[id(node)] = 1 + sum(map(count, children))
        return counts[id(node)]

    if root is not None and count(root) > MOST_VALUES:
        aliases = count(root) > len(counts)
        what = f"{'its aliases stand for' if aliases else 'it has'} more than {MOST_VALUES:,} values"
        raise RecipeError(what, where=where, fix="Remove some.")


def parse_override(text: str, key: str) -> Any:
    """Parses the value of an override as YAML. Raises RecipeError if it is not YAML, or has too many values."""
    try:
        loader = RecipeLoader(text)
        node = loader.get_single_node()
        _refuse_too_many_values(node, key)
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"the value {text!r} is not YAML", where=key) from None


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Formats values by dotted key as overrides, for example `optimizer.lr=0.1`; `parse_override` reads them back."""
    # YAML's safe form refuses a Path.
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    return [f"{key}={dump_in_line(value)}" for key, value in plain.items()]


def dump_tree(tree: Mapping[str, Any]) -> str:
    """Dumps a mapping in lines of at most 120 characters where it can, keys in their order."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 120}
    with suppress(UnicodeEncodeError):
        text: str = yaml.dump(tree, Dumper=_FastDumper, **options)
        if "\\U" not in text:
            return text
    # libyaml escapes characters beyond 16 bits, such as emoji, and refuses halves of them.
    return str(yaml.dump(tree, Dumper=RecipeDumper, **options))


def dump_in_line(value: Any) -> str:
    """Dumps a value on one line, however long, quoted as inside brackets."""
    # Numbers as YAML writes them, without its serializer, which takes a fifth of a millisecond.
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        text = repr(value)
        return text.replace("e", ".0e", 1) if "." not in text else text
    # Inside a list, as YAML ends a bare value with a line of dots.
    text = yaml.dump(
        [value], Dumper=RecipeDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.strip()[1:-1]


def set_value(tree: Any, keys: Sequence[str], value: Any, whole: str) -> None:
    """Sets the value at a path of keys in a tree, in place. Raises RecipeError if the path leads nowhere."""
    for place, key in enumerate(keys):
        last = place == len(keys) - 1
        if isinstance(tree, list):
            if not key.isdecimal() or int(key) >= len(tree):
                raise RecipeError(f"{whole}: a list of {len(tree)} entries has no entry {key!r}", fix="Count from 0.")
            index: Any = int(key)
        elif isinstance(tree, dict):
            index = key
            # A mapping on the way may be missing: `augment.flip=true` works without an `augment` in the file.
            if not last and tree.get(key) is None:
                tree[key] = {}
        else:
            above = ".".join(keys[:place])
            raise RecipeError(f"{whole}: {above} is a single value and has no {key!r}", fix=f"Set {above} as a whole.")
        if last:
            tree[index] = value
        else:
            tree = tree[index]
