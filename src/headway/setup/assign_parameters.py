"""Assigns the parameters that an optimizer steps to the ranks, as a recipe asks for it."""

from __future__ import annotations

import torch

from headway.launch.ranks import Ranks
from headway.optim.footprint import count_multiply_adds
from headway.parallel.owners import Owners
from headway.parallel.parallel_recipe import AnyParallelRecipe, ShardedRecipe, divides_weights


def assign_parameters(
    recipe: AnyParallelRecipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, ranks: Ranks | None
) -> Owners | None:
    """Assigns each parameter of the optimizer to a rank, which alone keeps the state of it; None if each keeps all.

    Raises:
        UsageError: a parameter has gaps in memory.
    """
    if ranks is None or not isinstance(recipe, ShardedRecipe) or divides_weights(recipe):
        return None
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    every = model.named_parameters(remove_duplicate=False)
    named = [(name, parameter) for name, parameter in every if id(parameter) in stepped]
    owners = ranks.owners = Owners(named, *ranks.launched_place, count_multiply_adds(optimizer, named))
    owners.drop_state(optimizer)
    return owners
