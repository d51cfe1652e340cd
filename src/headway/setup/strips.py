"""Resolves `parallel.until: auto`, and refuses networks that cannot be split, before the ranks meet."""

from __future__ import annotations

import torch

from headway.core.recipe import LoadedRecipe
from headway.parallel.parallel_recipe import SpatialRecipe
from headway.parallel.until import check_until, choose_until
from headway.setup.inputs import Inputs
from headway.setup.recipe import TrainRecipe


def resolve_until(
    loaded: LoadedRecipe[TrainRecipe], model: torch.nn.Module, inputs: Inputs, num_ranks: int
) -> LoadedRecipe[TrainRecipe]:
    """Tries a network in strips on shapes alone, and returns the recipe with the layer where they become samples.

    Recipes of other strategies are returned as they are.

    Raises:
        UsageError: the network cannot be split, or no strip enters the layer.
    """
    parallel = loaded.recipe.parallel
    if not isinstance(parallel, SpatialRecipe):
        return loaded
    samples = max(1, loaded.recipe.global_batch * parallel.sharing // num_ranks)
    shape = (samples, inputs.channels, *inputs.size)
    if parallel.until != "auto":
        check_until(model, shape, parallel.shape, parallel.until)
        return loaded
    layer, reason = choose_until(model, shape, parallel.shape)
    return loaded.resolve("parallel.until", layer, reason)
