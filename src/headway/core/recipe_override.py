"""Gives a loaded recipe other values, as if the user had written them into its file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe, P, find_leaf_origins, flatten
from headway.core.recipe_errors import explain_errors
from headway.core.recipe_types import find_tag_key, find_tagged_members, get_value_type
from headway.core.recipe_yaml import set_value


def override_values(loaded: LoadedRecipe[P], values: Mapping[str, Any], origin: str) -> LoadedRecipe[P]:
    """Returns a recipe with other values, which count as the user's: nothing says that they were resolved.

    Keys that the recipe leaves to their defaults stay so, and follow the new values: with `optimizer.name: lars`,
    `no_decay` is true. If a value picks another member of a union by its tag, such as `optimizer.name`, given keys that
    the new member lacks are left out, and the tag's origin names them.

    Args:
        values: values by dotted key. A key above another one is set first.
        origin: the origin of these values.

    Raises:
        RecipeError: the recipe refuses the values.
    """
    model = type(loaded.recipe)
    tree = collect_given_values(loaded)
    # A key above replaces everything below it, and so comes first.
    keys = sorted(values, key=lambda key: (key.count("."), key))
    tag_origins = _pick_members(tree, loaded.recipe, {key: values[key] for key in keys}, origin)
    for key in keys:
        # A copy, as a key below may be set in it.
        set_value(tree, key.split("."), copy.deepcopy(values[key]), key)
    above = tuple(f"{key}." for key in keys)
    kept = {leaf for leaf, _ in flatten(tree)}
    origins = {
        leaf: _find_nearest(loaded.origins, leaf) for leaf in kept if leaf not in values and not leaf.startswith(above)
    }
    origins |= dict.fromkeys(keys, origin) | tag_origins
    try:
        recipe = model.model_validate(tree)
    except ValidationError as error:
        path = loaded.path or Path("recipe")
        raise RecipeError(explain_errors(error, tree, model, path, origins)) from None
    return replace(loaded, recipe=recipe, origins=find_leaf_origins(recipe, origins, origin))


def collect_given_values(loaded: LoadedRecipe[P]) -> dict[str, Any]:
    """Returns the tree of the values that were given or resolved, without those that are defaults."""

    def prune(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in tree.items():
            inner = prune(value, f"{prefix}{key}.") if isinstance(value, dict) and value else value
            is_given = inner != {} if inner is not value else _find_nearest(loaded.origins, prefix + key) != "default"
            if is_given:
                out[key] = inner
        return out

    # The fields that pydantic knows as set are exact for a recipe as it was read: `optimizer={name: sgd, lr: 0.1}` on
    # the command line gives the defaults of an optimizer its origin too. Once values are resolved, every field is set,
    # and the origins tell.
    return prune(loaded.recipe.model_dump(mode="json", exclude_unset=True), "")


def _find_nearest(origins: Mapping[str, str], key: str) -> str:
    """Returns the origin of a key, else of the nearest key above it."""
    # A resolved mapping has one origin for all that it holds; an entry of a list has that of its list.
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "recipe")


def _pick_members(tree: dict[str, Any], recipe: BaseModel, values: Mapping[str, Any], origin: str) -> dict[str, str]:
    """Makes the parts of `tree` that are members of tagged unions fit the tags in `values`, in place.

    Returns the origin of each tag that left out keys.
    """
    origins: dict[str, str] = {}
    for name, members in _find_tagged_parts(type(recipe)).items():
        # A whole new part brings its own tag.
        if name in values or not any(key.startswith(f"{name}.") for key in values):
            continue
        tag_key = find_tag_key(members)
        before = getattr(getattr(recipe, name), tag_key)
        # The tag may be a default, and its part absent.
        part = tree.setdefault(name, {})
        part.setdefault(tag_key, before)
        after = values.get(f"{name}.{tag_key}", before)
        member = members.get(after) if isinstance(after, str) else None
        if member is None or after == before:
            continue
        if lacking := [key for key in part if key not in member.model_fields]:
            for key in lacking:
                del part[key]
            origins[f"{name}.{tag_key}"] = f"{origin}, without {', '.join(lacking)}, which {after} lacks"
    return origins


@cache
def _find_tagged_parts(model: type[BaseModel]) -> dict[str, dict[str, type[BaseModel]]]:
    """Returns the members by tag of each key that holds a tagged union."""
    # A walk over all types takes milliseconds, and a sweep makes a recipe for each of its trials.
    found = {name: find_tagged_members(get_value_type(model, name)) for name in model.model_fields}
    return {name: members for name, members in found.items() if members}
