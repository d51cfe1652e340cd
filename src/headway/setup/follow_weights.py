"""Makes a recipe treat images as its pretrained weights saw them in their training: mean, std, size, centre crop."""

from __future__ import annotations

import logging
from typing import Any

from headway.core.recipe import LoadedRecipe
from headway.data.data_recipe import SYNTHETIC
from headway.model.factory_weights import find_input_format
from headway.model.input_format import InputFormat, format_metadata
from headway.setup.recipe import TrainRecipe

LOG = logging.getLogger("headway.setup")

# ImageNet's, times 255: the normalisation of most weights that do not tell their own.
USUAL = "mean [123.675, 116.28, 103.53], std [58.395, 57.12, 57.375]"


def follow_weights(loaded: LoadedRecipe[TrainRecipe]) -> LoadedRecipe[TrainRecipe]:
    """Resolves what the recipe leaves open by the InputFormat of its pretrained weights, and logs it.

    `augment.mean`, `augment.std`, `data.size`, `data.channels` and `data.crop.share` are set if the recipe does not
    set them: the first layers of a network expect the numbers that they were trained on.

    Raises:
        RecipeError: no such factory, or it has no such weights.
    """
    recipe = loaded.recipe
    found = find_input_format(recipe.model, base=loaded.base)
    if found is None:
        # Weights that do not tell their normalisation are usable, and the user has to know that it is a guess.
        if recipe.model.weights is not None and "auto" in (recipe.augment.mean, recipe.augment.std):
            LOG.warning(
                f"{recipe.model.weights} does not tell its normalisation, so it is measured on your images. If the "
                f"network was trained with another one (ImageNet's usual: {USUAL}), set augment.mean and augment.std."
            )
        return loaded
    values = _list_open_values(recipe, found)
    if not values:
        return loaded
    reason = f"of the weights ({found.origin})"
    loaded = loaded.resolve_all({key: (value, reason) for key, value in values.items()})
    shown = ", ".join(f"{key} {_format(value)}" for key, value in values.items())
    LOG.info(f"Images as the weights were trained ({found.origin}): {shown}.")
    return loaded


def describe_weights(recipe: TrainRecipe) -> dict[str, str] | None:
    """Returns the metadata that tell a later run how images must look to the weights of this one.

    None if mean or std are not resolved.
    """
    mean, std, size = recipe.augment.mean, recipe.augment.std, recipe.data.size
    if mean == "auto" or std == "auto":
        return None
    sides = (size, size) if isinstance(size, int) else size
    return format_metadata(InputFormat(origin="", mean=mean, std=std, size=sides, share=recipe.data.crop.share))


def _list_open_values(recipe: TrainRecipe, found: InputFormat) -> dict[str, Any]:
    """Returns the values of the weights for the keys that the recipe leaves open."""
    values: dict[str, Any] = {}
    data, is_synthetic = recipe.data, recipe.data.train == SYNTHETIC
    channels = recipe.data.channels or found.channels
    if is_synthetic:
        channels = 3 if data.synthetic is None else data.synthetic.channels
    # A network that the recipe gives another number of channels has no use for these numbers.
    if channels == found.channels:
        for key in ("mean", "std"):
            if getattr(recipe.augment, key) == "auto":
                values[f"augment.{key}"] = getattr(found, key)
    # Random images have no size to choose, and are not cropped.
    if is_synthetic:
        return values
    if data.size is None and found.size is not None:
        values["data.size"] = found.size
    if data.channels is None:
        values["data.channels"] = found.channels
    if "share" not in data.crop.model_fields_set and found.share not in (None, data.crop.share):
        values["data.crop.share"] = found.share
    return values


def _format(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(f'{one:g}' for one in value)}]"
    return f"{value:g}"
