"""A network that a Python program gives in place of the one that the recipe names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headway.core.files import read_text
from headway.core.recipe import LoadedRecipe
from headway.core.recipe_yaml import parse_recipe
from headway.core.user_code import GIVEN
from headway.model.model_recipe import ModelRecipe
from headway.setup.recipe import TrainRecipe

LOG = logging.getLogger("headway.api")

MODEL_KEY = "model.factory"


def name_model(model: torch.nn.Module) -> str:
    """Returns the text that stands in `model.factory` for a network that was given: no import finds it."""
    return f"{GIVEN}{type(model).__module__}.{type(model).__qualname__}"


def leave_out_network_keys(
    loaded: LoadedRecipe[TrainRecipe], recipe: str | os.PathLike[str] | Mapping[str, Any], model: torch.nn.Module
) -> LoadedRecipe[TrainRecipe]:
    """Leaves out what a recipe says about the network of its factory, which a given network replaces.

    Values that the caller gave as overrides stay. Groups of the optimizer stay if they match a parameter of the given
    network. A message names what is left out.

    Args:
        loaded: the recipe, with the given network as its factory.
        recipe: the file or mapping that it was loaded from.
    """
    factory = _find_factory(recipe)
    # Without a factory, or in a recipe of a run that was given its network too, all keys are about the given one.
    if not factory or factory.startswith(GIVEN):
        return loaded
    part = loaded.recipe.model
    defaults = ModelRecipe(factory=part.factory)
    changes: dict[str, tuple[Any, str]] = {}
    for key in ModelRecipe.network_keys:
        is_own = _find_origin(loaded, f"model.{key}") != "overrides"
        if is_own and getattr(part, key) != getattr(defaults, key):
            changes[f"model.{key}"] = (defaults.model_dump(mode="json")[key], f"it was about {factory}")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = loaded.recipe.optimizer.groups
    matching = [group for group in groups if any(re.search(group.match, name) for name in names)]
    if len(matching) < len(groups) and _find_origin(loaded, "optimizer.groups") != "overrides":
        values = [group.model_dump(mode="json") for group in matching]
        changes["optimizer.groups"] = (values, f"the other patterns were about {factory}")
    if not changes:
        return loaded
    left_out = [key for key in changes if key != "optimizer.groups"]
    left_out += [f"optimizer.groups with match {group.match!r}" for group in groups if group not in matching]
    LOG.warning(
        f"Your network takes the place of {factory}. Left out, because the recipe says it about that one: "
        f"{', '.join(left_out)}. Give in the overrides what is meant for yours."
    )
    return loaded.resolve_all(changes)


def _find_factory(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> str | None:
    tree = recipe if isinstance(recipe, Mapping) else parse_recipe(read_text(Path(recipe)), str(recipe))[0]
    part = tree.get("model")
    factory = part.get("factory") if isinstance(part, Mapping) else None
    return factory if isinstance(factory, str) else None


def _find_origin(loaded: LoadedRecipe[TrainRecipe], key: str) -> str:
    """Returns `overrides` if the caller gave the value of a key or one below it, else where it comes from."""
    origins = [origin for leaf, origin in loaded.origins.items() if leaf == key or leaf.startswith(f"{key}.")]
    return "overrides" if "overrides" in origins else (origins or [""])[0]
