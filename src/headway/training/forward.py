"""The forward pass of a training step, alone or together with the ranks that share its samples."""

from __future__ import annotations

import torch

from headway.launch.ranks import Ranks
from headway.parallel.divided_linear import DividedLayers
from headway.parallel.maps import to_parts
from headway.parallel.parallel_recipe import SpatialRecipe
from headway.parallel.strips import run_in_strips
from headway.parallel.towers import Towers
from headway.setup.train_setup import TrainSetup


def run_network(setup: TrainSetup, ranks: Ranks | None, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Computes the outputs of this rank's images, together with the ranks that share images or layers with it.

    Args:
        images: those of this rank; of a network with towers, those of its place.
        batch_size: samples of the step over all ranks.
    """
    divided = setup.divided
    if isinstance(divided, Towers):
        return divided.run(setup.model, images)
    if isinstance(divided, DividedLayers):
        divided.set_batch(batch_size)
    if ranks is None or (place := ranks.place) is None:
        return setup.forward(images)
    parallel = setup.recipe.parallel
    assert isinstance(parallel, SpatialRecipe)
    x = to_parts(images, place.divide_batch(batch_size, ranks.world.size), place)
    return run_in_strips(setup.model, x, parallel.until)
