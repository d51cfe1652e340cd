"""The stand-in for a training set that is absent, in a dry run."""

from __future__ import annotations

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe
from headway.data.data_recipe import SyntheticRecipe
from headway.data.resolution import expand_size
from headway.setup.recipe import TrainRecipe


def build_stand_in(
    loaded: LoadedRecipe[TrainRecipe], stated: SyntheticRecipe
) -> tuple[LoadedRecipe[TrainRecipe], SyntheticRecipe]:
    """Builds the stand-in for an absent training set: as stated, with the recipe's size and channels."""
    data_recipe = loaded.recipe.data
    if data_recipe.size is None:
        what = "the data are not there, so the size of their images is unknown"
        raise RecipeError(what, where="data.size", fix="Set it, for example to 224.")
    channels = data_recipe.channels or 3
    if data_recipe.channels is None:
        loaded = loaded.resolve("data.channels", channels, "images have colour unless the recipe says otherwise")
    return loaded, stated.model_copy(update={"size": expand_size(data_recipe.size), "channels": channels})
