"""Assigns the parameters that an optimizer steps to the ranks, as a recipe asks for it."""

from __future__ import annotations

import torch

from headway.core.weight_copies import HasWeights
from headway.launch.ranks import Ranks
from headway.model.model_size import ModelSize
from headway.optim.footprint import count_multiply_adds
from headway.parallel.owners import Owners
from headway.parallel.parallel_recipe import AnyParallelRecipe, DataParallelRecipe, ShardedRecipe, divides_weights
from headway.setup.recipe import TrainRecipe
from headway.setup.refused_strategies import list_refused_strategies

WORTH_DIVIDING = 0.05
"""Share of a step's multiply-adds from which on their division over owners is worth a line of the log."""


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


def advise_owners(
    recipe: TrainRecipe, weights: HasWeights, optimizer: torch.optim.Optimizer, counts: ModelSize | None, ranks: int
) -> str:
    """Returns a sentence if all ranks make many matrix products in the optimizer's step that owners would divide.

    Args:
        weights: those that the optimizer steps.
        counts: the multiply-adds of the network; None: they are not known, and nothing is said.
    """
    if counts is None or counts.multiply_adds is None or not isinstance(recipe.parallel, DataParallelRecipe):
        return ""
    repeated = sum(count_multiply_adds(optimizer, weights.named_parameters()).values())
    # A backward pass makes twice as many as a forward pass.
    share = repeated / (repeated + 3 * counts.multiply_adds * recipe.global_batch / ranks)
    if share * (1 - 1 / ranks) < WORTH_DIVIDING or "sharded" in list_refused_strategies(recipe):
        return ""
    return (
        f"Each of the {ranks} processes makes all matrix products of {recipe.optimizer.name}: {share:.0%} of the"
        " multiply-adds of its step. With parallel=sharded they share them."
    )
