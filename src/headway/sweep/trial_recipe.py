"""The recipe of one trial: the base recipe with the trial's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe
from headway.core.recipe_override import override_values
from headway.core.recipe_yaml import format_overrides
from headway.setup.recipe import TrainRecipe
from headway.sweep.space import Space
from headway.sweep.space_recipe import SpaceRecipe, list_allowed

CONTEXTS = 4
"""Draws of the other parameters with which `check_space` tries each value."""


def build_trial_recipe(
    loaded: LoadedRecipe[TrainRecipe], trial: int, values: Mapping[str, Any]
) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe of a trial. The origin of its values is `sweep: trial N`.

    The values count as the user's own, as if they stood in the recipe's file; see `override_values`.

    Args:
        loaded: the base recipe, as it was read.
        trial: number of the trial.
        values: see `Space.draw`.

    Raises:
        RecipeError: the recipe refuses the values; the message names the trial and all its values.
    """
    try:
        return override_values(loaded, values, f"sweep: trial {trial}")
    except RecipeError as error:
        what = f"the recipe refuses trial {trial} of the sweep ({' '.join(format_overrides(values))}): {error}"
        fix = "Narrow the space, or add a `when`, so that no trial has such values."
        raise RecipeError(what, fix=fix) from None


def check_space(space: Space, loaded: LoadedRecipe[TrainRecipe], origins: Mapping[str, str] | None = None) -> None:
    """Checks before the first trial that the recipe accepts each value of a choice, and the ends of each range.

    Args:
        loaded: the base recipe.
        origins: file and line of the keys of the space; see `LoadedRecipe`.

    Raises:
        RecipeError: the recipe refuses a value, alone as well as among four draws of the others.
    """
    for key, parameter in space.recipe.parameters.items():
        ends = parameter.choice if parameter.choice is not None else getattr(parameter, parameter.kind)
        # The line of its values, so that a message sends the user there.
        where = (origins or {}).get(f"parameters.{key}.{parameter.kind}", f"parameters.{key}")
        for value in ends:
            errors = []
            for values in _list_contexts(space, key, value):
                try:
                    override_values(loaded, values, where)
                    break
                except RecipeError as error:
                    errors.append(error)
            else:
                if str(errors[0]).startswith(f"{where}: "):
                    raise errors[0]
                # The values of the recipe itself that do not go with it.
                what = f"the recipe refuses {format_overrides({key: value})[0]}: {errors[0]}"
                raise RecipeError(what, where=where)


def _list_contexts(space: Space, key: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yields values of trials that have a value and those that its conditions ask for."""
    wanted = _choose_conditions(space.recipe, key) | {key: value}
    # First without any others, so that a message is about this value and no other one. A value may need another
    # parameter, too, such as `epochs` for a long warm-up: then one of the draws has it.
    yield wanted
    for trial in range(CONTEXTS):
        values: dict[str, Any] = {}
        for name, drawn in space.draw_all(0, trial).items():
            if name in wanted:
                values[name] = wanted[name]
            elif space.recipe.is_active(name, values):
                values[name] = drawn
        yield values


def _choose_conditions(recipe: SpaceRecipe, key: str) -> dict[str, Any]:
    """Returns values of other parameters for which a parameter takes part."""
    wanted: dict[str, Any] = {}
    for name, condition in recipe.parameters[key].when.items():
        wanted |= _choose_conditions(recipe, name)
        wanted[name] = list_allowed(recipe.parameters[name], condition)[0]
    return wanted
