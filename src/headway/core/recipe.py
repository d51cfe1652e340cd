"""Loading of recipes: overrides, validation by a pydantic model, errors with the nearest key, origins of values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from headway.core.errors import RecipeError
from headway.core.files import describe_os_error, read_text
from headway.core.interface import choose_wording
from headway.core.path_suggestions import suggest_path
from headway.core.recipe_errors import explain_errors, find_unknown_key
from headway.core.recipe_yaml import RecipeDumper, dump_tree, parse_override, parse_recipe, set_value


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
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None


def _check_pattern(pattern: str) -> str:
    check_patterns(pattern)
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A field that holds a regular expression. A list of them is checked as a whole, so that a message names its key."""


@dataclass(frozen=True)
class LoadedRecipe(Generic[P]):
    """A validated recipe and the origin of each of its values.

    Attributes:
        recipe: the validated tree.
        origins: `default`, `FILE:LINE`, `command line`, `overrides` (in Python), `sweep: trial N`, or `auto: reason`
            for a value that was resolved, by dotted key of each leaf.
        base: folder that the recipe's relative paths start from.
        path: file of the recipe; None: Python gave its values.
    """

    recipe: P
    origins: Mapping[str, str]
    base: Path
    path: Path | None = None

    def resolve(self, key: str, value: Any, reason: str) -> LoadedRecipe[P]:
        """Returns the recipe with an `auto` value replaced by the chosen one."""
        return self.resolve_all({key: (value, reason)})

    def resolve_all(self, values: Mapping[str, tuple[Any, str]]) -> LoadedRecipe[P]:
        """Replaces several values at once, (value, reason) by dotted key, if only all of them together are valid.

        Raises RecipeError if the recipe refuses them.
        """
        # Through JSON and back, so that the validators of the whole recipe see the new values together.
        tree, origins = self.recipe.model_dump(mode="json"), dict(self.origins)
        for key, (value, reason) in values.items():
            set_value(tree, key.split("."), value, key)
            # The value replaces everything below its key, and with it the origins there.
            origins = {other: origin for other, origin in origins.items() if not other.startswith(f"{key}.")}
            origins[key] = f"auto: {reason}"
        try:
            recipe = type(self.recipe).model_validate(tree)
        except ValidationError as error:
            raise RecipeError(explain_errors(error, tree, type(self.recipe), Path("recipe"), origins)) from None
        return replace(self, recipe=recipe, origins=origins)

    def list_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, JSON value) of each leaf."""
        yield from flatten(self.recipe.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Returns YAML with every value spelled out; loading it gives the same recipe."""
        tree = self.recipe.model_dump(mode="json")
        return dump_tree(tree)


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
        RecipeError: there is no such file, it is not YAML, or it has an unknown key (the message names the nearest
            known one), a wrong type or an impossible combination.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = f"the {kind} cannot be read ({describe_os_error(error)})"
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            # A folder was named, or a name without its extension: the recipe that `headway init` wrote for it.
            beside = path.with_name(f"{path.name}.yaml") if path.name else path
            kinds = (".yaml", ".yml", path.suffix.lower())

            def is_meant(entry: Path) -> bool:
                return entry.suffix.lower() in kinds and entry.is_file()

            hint = f"Did you mean {str(beside)!r}?" if beside.is_file() else suggest_path(path, is_meant)
            raise RecipeError(what, where=str(path), fix=hint or fix) from None
        raise RecipeError(what, where=str(path)) from None
    tree, lines = parse_recipe(text, str(path), kind)
    loaded = _validate(tree, {key: f"{path.name}:{line}" for key, line in lines.items()}, overrides, model, path)
    return replace(loaded, path=path.resolve())


def build_recipe(tree: Mapping[str, Any], overrides: Sequence[str], model: type[P]) -> LoadedRecipe[P]:
    """Builds a recipe from a mapping of Python values, in place of a file. Its paths start at the current folder.

    Raises:
        RecipeError: as `read_recipe`.
    """
    try:
        # Through YAML and back: a mapping means what a file with its values would mean.
        text = yaml.dump(_simplify(tree), Dumper=RecipeDumper)
    except yaml.YAMLError as error:
        raise RecipeError(f"a recipe holds numbers, texts, lists and mappings ({error})", where="recipe") from None
    plain, lines = parse_recipe(text, "recipe")
    return _validate(plain, dict.fromkeys(lines, "Python"), overrides, model, Path("recipe"))


def _simplify(value: Any) -> Any:
    """Returns mappings as dicts, tuples as lists, and paths as texts."""
    if isinstance(value, Mapping):
        return {str(key): _simplify(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_simplify(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _validate(
    tree: dict[str, Any], origins: dict[str, str], overrides: Sequence[str], model: type[P], path: Path
) -> LoadedRecipe[P]:
    given = choose_wording(command="command line", python="overrides")
    # Overrides edit the tree before validation, so that they pass the same checks as the file.
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            # A line of a recipe, such as the planner prints.
            line, colon, rest = override.partition(": ")
            example = f"'{line}={rest}'" if colon and line.isidentifier() else "optimizer.lr=0.1"
            raise RecipeError(f"{override!r} is not an override", fix=f"Write key=value, for example {example}.")
        try:
            set_value(tree, key.split("."), parse_override(value, key), key)
        except RecipeError:
            # A key that the recipe does not have is the likelier mistake: `data.batch=128` over `data: FOLDER`.
            if (unknown := find_unknown_key(key.split("."), model)) is not None:
                raise RecipeError(unknown, where=given) from None
            raise
        # The override replaces what the file said there and below.
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(f"{key}.")}
        origins[key] = given
    try:
        recipe = model.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(explain_errors(error, tree, model, path, origins)) from None
    return LoadedRecipe(recipe, find_leaf_origins(recipe, origins, given), path.resolve().parent)


def validate_part(values: Mapping[str, Any], model: type[P], name: str) -> P:
    """Validates values that Python code gives for a part of a recipe.

    Args:
        name: name of the function that takes the values, for the message.

    Raises:
        RecipeError: an unknown name or key, or a value out of range.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise RecipeError(explain_errors(error, values, model, Path(name), {})) from None


def format_value(value: Any) -> str:
    """Formats a value of `list_leaves` for a table: as in a recipe, and `unset` for None."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by dotted key; an empty mapping is a leaf, too."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def find_leaf_origins(recipe: RecipePart, origins: Mapping[str, str], given: str) -> dict[str, str]:
    """Returns the origin of each leaf.

    It is the leaf's own, or that of the overrides if an entry below it came from there; else that of the nearest key
    above it that was given as a whole (`data: synthetic`, `augment={flip: true}`).

    Args:
        origins: the origin of each key that was given.
        given: the origin of the overrides among them.
    """

    # By key, the origins at and below it: is one of them that of the overrides, and the key that is nearest.
    own: dict[str, tuple[bool, str]] = {}
    partial: set[str] = set()
    for key, value in origins.items():
        is_given, nearest = own.get(key, (False, key))
        own[key] = is_given or value == given, min(key, nearest, key=len)
        for above in _list_ancestors(key):
            is_given, nearest = own.get(above, (False, key))
            own[above] = is_given or value == given, min(nearest, key, key=len)
            partial.add(above)

    def origin(leaf: str) -> str:
        # A leaf may have entries of its own: a list, or a mapping such as `model.args`.
        if leaf in own:
            is_given, nearest = own[leaf]
            return given if is_given else origins[nearest]
        # A key above counts only if it was given as a whole: `data.train` in the file says nothing about `data.eval`.
        for key in _list_ancestors(leaf):
            if key in origins and (origins[key] == given or key not in partial):
                return origins[key]
        return "default"

    return {leaf: origin(leaf) for leaf, _ in flatten(recipe.model_dump(mode="json"))}


def _list_ancestors(key: str) -> list[str]:
    """Returns the keys above a dotted key, the nearest one first."""
    return [key[:place] for place in range(len(key) - 1, 0, -1) if key[place] == "."]
