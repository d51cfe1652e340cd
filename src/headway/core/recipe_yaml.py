"""The YAML of recipes: what it says with the line of each key, and values put into it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from headway.core.errors import RecipeError

MOST_VALUES = 20_000
"""Of a YAML text, each alias counted as all that it stands for; a recipe has about 200."""
MOST_CHARACTERS = 1 << 20
"""PyYAML reads about 100,000 in a second."""


class RecipeLoader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 wants 1.0e-3 and calls the rest a text)."""


class RecipeDumper(yaml.SafeDumper):
    """Writes what `Reader` reads: a text that looks like 1e-3 gets its quotes."""


for _dialect in (RecipeLoader, RecipeDumper):
    _dialect.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def parse_recipe(text: str, where: str, kind: str = "recipe") -> tuple[dict[str, Any], dict[str, int]]:
    """The tree of a YAML text, and the line of each key."""
    lines: dict[str, int] = {}

    def build_value(node: yaml.Node, path: tuple[str, ...], line: int) -> Any:
        if path:
            lines[".".join(path)] = line
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)  # what `<<` names comes first, so that the mapping's own keys win
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
        except ValueError as error:  # of a date such as 2024-13-01
            raise RecipeError(f"{node.value!r} is no value ({error})", where=f"{where}:{line}") from None

    try:
        loader = RecipeLoader(text)
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
        raise RecipeError(f"this is no YAML ({what})", where=at) from None
    except RecursionError:
        raise RecipeError("this YAML holds itself, or is nested too deeply", where=where) from None
    if not isinstance(tree, dict):
        raise RecipeError(f"a {kind} is a mapping of keys to values", where=where)
    return tree, lines


def _refuse_duplicate_keys(node: yaml.Node | None, where: str, seen: set[int]) -> None:
    """Raises RecipeError for a key that stands twice in one mapping; YAML itself takes the last."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    names: set[str] = set()
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                raise RecipeError(f"the key {key.value!r} stands twice", where=f"{where}:{key.start_mark.line + 1}")
            names.add(key.value)
        _refuse_duplicate_keys(value, where, seen)


def _refuse_too_many_values(root: yaml.Node | None, where: str) -> None:
    """Raises RecipeError where aliases of aliases make few lines stand for more values than memory holds. Each node is
    counted once, and costs what it stands for."""
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
        raise RecipeError(what, where=where, fix="Write it without so many.")


def parse_override(text: str, key: str) -> Any:
    """Parses the value of an override as YAML. Raises RecipeError: it is no YAML, or has too many values."""
    try:
        loader = RecipeLoader(text)
        node = loader.get_single_node()
        _refuse_too_many_values(node, key)
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"the value {text!r} is no YAML", where=key) from None


def set_value(tree: Any, keys: Sequence[str], value: Any, whole: str) -> None:
    """Sets the value at a path of keys in a recipe, in place. Raises RecipeError: there is no such place."""
    for place, key in enumerate(keys):
        last = place == len(keys) - 1
        if isinstance(tree, list):
            if not key.isdecimal() or int(key) >= len(tree):
                raise RecipeError(f"{whole}: a list of {len(tree)} entries has no entry {key!r}", fix="Count from 0.")
            index: Any = int(key)
        elif isinstance(tree, dict):
            index = key
            if not last and tree.get(key) is None:
                tree[key] = {}
        else:
            above = ".".join(keys[:place])
            raise RecipeError(f"{whole}: {above} is a single value and has no {key!r}", fix=f"Set {above} as a whole.")
        if last:
            tree[index] = value
        else:
            tree = tree[index]
