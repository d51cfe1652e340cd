"""Loading of recipes: overrides, validation by a pydantic model, errors with the nearest key, origins of values."""

from __future__ import annotations

import datetime
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.errors import RecipeError, suggest_nearest
from headway.core.files import describe_os_error, read_text
from headway.core.recipe_yaml import RecipeDumper, parse_override, parse_recipe, set_value


class RecipePart(BaseModel):
    """Base of a part of a recipe: immutable, unknown keys refused. Each is defined beside the code it configures."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")


P = TypeVar("P", bound=RecipePart)


def check_patterns(*patterns: str) -> None:
    """Checks regular expressions in a part's validator. Raises ValueError if one is invalid."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"'{pattern}' is no regular expression: {error}") from None


@dataclass(frozen=True)
class LoadedRecipe(Generic[P]):
    """A validated recipe and the origin of each of its values.

    Attributes:
        recipe: the validated tree.
        origins: `default`, `FILE:LINE`, `command line` or `auto: reason` by dotted key of each leaf.
        base: folder that the recipe's relative paths start from.
    """

    recipe: P
    origins: Mapping[str, str]
    base: Path

    def resolve(self, key: str, value: Any, reason: str) -> LoadedRecipe[P]:
        """Returns the recipe with an `auto` value replaced by the chosen one."""
        return self.resolve_all({key: (value, reason)})

    def resolve_all(self, values: Mapping[str, tuple[Any, str]]) -> LoadedRecipe[P]:
        """Replaces several values at once, (value, reason) by dotted key, if only all of them together are valid."""
        # Through JSON and back, so that the validators of the whole recipe see the new values together.
        tree, origins = self.recipe.model_dump(mode="json"), dict(self.origins)
        for key, (value, reason) in values.items():
            set_value(tree, key.split("."), value, key)
            # The value replaces everything below its key, and with it the origins there.
            origins = {other: origin for other, origin in origins.items() if not other.startswith(f"{key}.")}
            origins[key] = f"auto: {reason}"
        return replace(self, recipe=type(self.recipe).model_validate(tree), origins=origins)

    def list_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, JSON value) of each leaf."""
        yield from _items(self.recipe.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Returns YAML with every value spelled out; loading it gives the same recipe."""
        tree = self.recipe.model_dump(mode="json")
        return yaml.dump(tree, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def read_recipe(
    path: Path,
    overrides: Sequence[str],
    model: type[P],
    *,
    kind: str = "recipe",
    fix: str = "headway init IMAGES writes a recipe.",
) -> LoadedRecipe[P]:
    """Reads a YAML recipe, applies `key=value` overrides, and validates it.

    Args:
        kind: name of the file's kind in messages.
        fix: remedy if there is no such file.

    Raises:
        RecipeError: there is no such file, it is no YAML, or it has an unknown key (the message names the nearest known
            one), a wrong type or an impossible combination.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = f"the {kind} cannot be read ({describe_os_error(error)})"
        known = isinstance(error, FileNotFoundError | IsADirectoryError)
        raise RecipeError(what, where=str(path), fix=fix if known else "") from None
    # Overrides edit the tree before validation, so that they pass the same checks as the file.
    tree, lines = parse_recipe(text, str(path), kind)
    origins = {key: f"{path.name}:{line}" for key, line in lines.items()}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"{override!r} is no override", fix="Write key=value, for example optimizer.lr=0.1.")
        set_value(tree, key.split("."), parse_override(value, key), key)
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(f"{key}.")}
        origins[key] = "command line"
    try:
        recipe = model.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(_explain(error, tree, model, path, origins)) from None
    return LoadedRecipe(recipe, _origins_of_leaves(recipe, origins), path.resolve().parent)


def format_value(value: Any) -> str:
    """Formats a value of `list_leaves` for a table: as in a recipe, and `unset` for None."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _items(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _items(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _origins_of_leaves(recipe: RecipePart, origins: Mapping[str, str]) -> dict[str, str]:
    """Returns the origin of each leaf.

    It is the leaf's own, or the command line if an entry below it came from there; else that of the nearest key above
    it that was given as a whole (`data: synthetic`, `augment={flip: true}`).
    """

    def origin(leaf: str) -> str:
        # A leaf may have entries of its own: a list, or a mapping such as `model.args`.
        own = [key for key in origins if key == leaf or key.startswith(f"{leaf}.")]
        if any(origins[key] == "command line" for key in own):
            return "command line"
        if own:
            return origins[min(own, key=len)]
        # A key above counts only if it was given as a whole: `data.train` in the file says nothing about `data.eval`.
        above = [key for key in origins if leaf.startswith(f"{key}.")]
        whole = [
            key
            for key in above
            if origins[key] == "command line" or not any(other.startswith(f"{key}.") for other in origins)
        ]
        return origins[max(whole, key=len)] if whole else "default"

    return {leaf: origin(leaf) for leaf, _ in _items(recipe.model_dump(mode="json"))}


# What pydantic adds to a key where a value may be of several kinds, as in `micro_batch.int`, `device.Device.title`.
_KIND = re.compile(r"(constrained-)?(int|float|str|bool)|.*\[.*\]|[A-Z]\w*")


# Of one recipe that are named.
MOST_ERRORS = 50

# What pydantic's kinds of errors want, in a recipe's words.
WORDS = {
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values"),
    "string_type": "a text",
}


def _explain(
    error: ValidationError, tree: Mapping[str, Any], model: type[RecipePart], path: Path, origins: Mapping[str, str]
) -> str:
    out = []
    kinds: dict[str, tuple[int, list[str]]] = {}  # place in `out`, and what a value of several kinds should be
    # A key that is missing is often there, misspelt: the one that nobody knows stands first.
    entries = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    more = len(entries) - MOST_ERRORS
    places = [_keys(entry["loc"], tree, missing=entry["type"] == "missing") for entry in entries]
    for entry, keys in zip(entries[:MOST_ERRORS], places, strict=False):
        dotted = ".".join(keys)
        if any(other[: len(keys)] == keys != other for other in places):  # of several kinds, the one with keys is meant
            continue
        at = next((origins[".".join(keys[:n])] for n in range(len(keys), 0, -1) if ".".join(keys[:n]) in origins), "")
        at = at or next((origin for key, origin in origins.items() if dotted and key.startswith(f"{dotted}.")), "")
        where = f"{at}: " if at else f"{path.name}: "
        if entry["type"] == "extra_forbidden":
            part = _part_at(model, keys[:-1])
            hint = suggest_nearest(keys[-1], part.model_fields, prefix=".".join([*keys[:-1], ""])) if part else ""
            out.append(f"{where}there is no key {dotted!r}. {hint}".rstrip())
        elif entry["type"] == "missing":
            out.append(f"{where}the key {dotted!r} is missing.")
        elif entry["type"] == "value_error":
            text = entry["msg"].removeprefix("Value error, ").removeprefix(f"{keys[-1]} " if keys else "")
            out.append(f"{where}{dotted + ': ' if dotted else ''}{text}")
        else:
            kind = WORDS.get(entry["type"]) or entry["msg"].removeprefix("Input should be ")
            if entry["type"] == "too_short":
                kind = f"a list of {entry['ctx']['min_length']} or more"
            if dotted not in kinds:
                kinds[dotted] = (len(out), [])
                out.append("")
            place, found = kinds[dotted]
            found.append(kind)
            choices = _choices(entry)
            close = suggest_nearest(entry["input"], choices, only_close=True) if choices else ""
            what = f"{where}{dotted}: Input should be {' or '.join(found)}, not {_shown(entry['input'])}."
            out[place] = f"{what} {close}".rstrip()
    if more > 0:
        out.append(f"{path.name}: {more:,} more errors.")
    return "\n".join(out)


def _keys(loc: Sequence[str | int], tree: Any, *, missing: bool) -> list[str]:
    """The user's own keys of a place where pydantic found something, without the kinds that it adds."""
    out = []
    for number, part in enumerate(loc):
        inside = part in tree if isinstance(tree, dict) else isinstance(tree, list) and part in range(len(tree))
        if inside or (missing and number == len(loc) - 1) or not _KIND.fullmatch(str(part)):
            out.append(str(part))
            tree = tree[part] if inside else None
    return out


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value) if isinstance(value, datetime.date) else repr(value)


def _choices(entry: Any) -> list[str]:
    """What a text may be, where it is one of several."""
    texts = entry["type"] == "literal_error" and isinstance(entry["input"], str)
    return re.findall(r"'([^']*)'", entry["ctx"]["expected"]) if texts else []


def _part_at(model: type[RecipePart], keys: Sequence[str]) -> type[RecipePart] | None:
    current: Any = model
    for key in keys:
        if key.isdecimal():  # an entry of a list, whose parts are all alike
            continue
        if isinstance(current, type) and issubclass(current, RecipePart):
            field = current.model_fields.get(key)
            current = field.annotation if field else None
        kinds = [typing.get_args(a)[0] if typing.get_origin(a) is Annotated else a for a in typing.get_args(current)]
        parts = [a for a in kinds if isinstance(a, type) and issubclass(a, RecipePart)]
        if parts:
            current = parts[0]
    return current if isinstance(current, type) and issubclass(current, RecipePart) else None
