"""The machinery of recipes: load, override, validate against a model class, nearest key, origin of every value."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.errors import RecipeError, nearest


class Part(BaseModel):
    """Base of every part of a recipe: immutable, unknown keys refused. A part lives beside the code it configures."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Loaded(Generic[P]):
    """A validated recipe, and where each of its values came from.

    Attributes:
        recipe: the tree.
        origins: dotted key of each leaf -> `default`, `FILE:LINE`, `command line` or `auto: reason`.
        base: folder that relative paths of the recipe start from.
    """

    recipe: P
    origins: Mapping[str, str]
    base: Path

    def resolve(self, key: str, value: Any, reason: str) -> Loaded[P]:
        """The same recipe with an `auto` value replaced by what it stands for."""
        tree = self.recipe.model_dump(mode="json")
        _put(tree, key.split("."), value, key)
        origins = {**self.origins, key: f"auto: {reason}"}
        return replace(self, recipe=type(self.recipe).model_validate(tree), origins=origins)

    def to_yaml(self) -> str:
        """The whole tree, every value spelled out; loading it gives the same recipe."""
        return yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def load(path: Path, overrides: Sequence[str], model: type[P]) -> Loaded[P]:
    """Reads a YAML recipe, applies `key=value` overrides, and validates it.

    Raises:
        RecipeError: no such file, no YAML, an unknown key (names the nearest right one), a wrong type, an impossible
            combination.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe cannot be read ({error})", where=str(path)) from None
    tree, lines = _parse(text, str(path))
    origins = {key: f"{path.name}:{line}" for key, line in lines.items()}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"{override!r} is no override", fix="Write key=value, for example optimizer.lr=0.1.")
        _put(tree, key.split("."), _parse_value(value, key), key)
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(f"{key}.")}
        origins[key] = "command line"
    try:
        recipe = model.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(_explain(error, model, path, origins)) from None
    return Loaded(recipe, _origins_of_leaves(recipe, origins), path.resolve().parent)


class _Yaml(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 wants 1.0e-3 and calls the rest a text)."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The tree of a YAML text, and the line of each key."""
    loader = _Yaml(text)
    lines: dict[str, int] = {}

    def plain(node: yaml.Node, path: tuple[str, ...]) -> Any:
        if path:
            lines[".".join(path)] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
            out: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(loader.construct_object(key_node))
                if key in out:
                    raise RecipeError(f"the key {key!r} stands twice", where=f"{where}:{key_node.start_mark.line + 1}")
                out[key] = plain(value_node, (*path, key))
            return out
        if isinstance(node, yaml.SequenceNode):
            return [plain(child, (*path, str(place))) for place, child in enumerate(node.value)]
        return loader.construct_object(node)

    try:
        node = loader.get_single_node()
        tree = plain(node, ()) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        raise RecipeError(f"this is no YAML ({getattr(error, 'problem', error)})", where=at) from None
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise RecipeError("a recipe is a mapping of keys to values", where=where)
    return tree, lines


def _parse_value(text: str, key: str) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError:
        raise RecipeError(f"the value {text!r} is no YAML", where=key) from None


def _put(tree: Any, keys: Sequence[str], value: Any, whole: str) -> None:
    for place, key in enumerate(keys):
        last = place == len(keys) - 1
        if isinstance(tree, list):
            if not key.isdigit() or int(key) >= len(tree):
                raise RecipeError(f"{whole}: a list of {len(tree)} entries has no entry {key!r}", fix="Count from 0.")
            index: Any = int(key)
        elif isinstance(tree, dict):
            index = key
            if not last and not isinstance(tree.get(key), dict | list):
                tree[key] = {}
        else:
            raise RecipeError(f"{whole}: {'.'.join(keys[:place])} is a single value and has no {key!r}")
        if last:
            tree[index] = value
        else:
            tree = tree[index]


def _leaves(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path


def _origins_of_leaves(recipe: Part, origins: Mapping[str, str]) -> dict[str, str]:
    """Origin of each leaf: its own, else that of the nearest key above it (a whole part given at once)."""
    out = {}
    for leaf in _leaves(recipe.model_dump(mode="json")):
        given = [key for key in origins if leaf == key or leaf.startswith(f"{key}.") or key.startswith(f"{leaf}.")]
        exact = [key for key in given if leaf == key or key.startswith(f"{leaf}.") or origins[key] == "command line"]
        scalar = [key for key in given if not any(other.startswith(f"{key}.") for other in origins)]
        best = exact or scalar
        out[leaf] = origins[max(best, key=len)] if best else "default"
    return out


def _explain(error: ValidationError, model: type[Part], path: Path, origins: Mapping[str, str]) -> str:
    out = []
    for entry in error.errors(include_url=False):
        keys = [str(part) for part in entry["loc"]]
        dotted = ".".join(keys)
        at = next((origins[".".join(keys[:n])] for n in range(len(keys), 0, -1) if ".".join(keys[:n]) in origins), "")
        where = f"{at}: " if at else f"{path.name}: "
        if entry["type"] == "extra_forbidden":
            part = _part_at(model, keys[:-1])
            hint = nearest(keys[-1], part.model_fields) if part else ""
            out.append(f"{where}there is no key {dotted!r}. {hint}")
        elif entry["type"] == "missing":
            out.append(f"{where}the key {dotted!r} is missing.")
        elif entry["type"] == "value_error":
            text = entry["msg"].removeprefix("Value error, ")
            out.append(f"{where}{dotted + ': ' if dotted else ''}{text}")
        else:
            out.append(f"{where}{dotted}: {entry['msg']}, not {entry['input']!r}.")
    return "\n".join(out)


def _part_at(model: type[Part], keys: Sequence[str]) -> type[Part] | None:
    current: Any = model
    for key in keys:
        if isinstance(current, type) and issubclass(current, Part):
            field = current.model_fields.get(key)
            current = field.annotation if field else None
        parts = [a for a in typing.get_args(current) if isinstance(a, type) and issubclass(a, Part)]
        if parts:
            current = parts[0]
    return current if isinstance(current, type) and issubclass(current, Part) else None
