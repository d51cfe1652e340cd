"""Divides layers, experts or all weights of a network over the ranks, as a recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.core.errors import UsageError
from headway.launch.ranks import Ranks
from headway.model.activation_checkpointing import list_blocks
from headway.model.auxiliary import AuxiliaryLosses, HasAuxiliaryLoss
from headway.optim.fused_optimizer import FusedOptimizer
from headway.parallel.divided_linear import divide_linear_layers, find_divisible_layers
from headway.parallel.experts import SharedExperts, expect_experts
from headway.parallel.full_shards import FullShards
from headway.parallel.parallel_recipe import (
    AnyParallelRecipe,
    ExpertsRecipe,
    HybridRecipe,
    LocalRecipe,
    SpatialRecipe,
    TowersRecipe,
    divides_weights,
)
from headway.parallel.parts import DividedNetwork
from headway.parallel.strips import find_layer
from headway.parallel.tower_modules import find_towers
from headway.parallel.towers import divide_towers, find_divisible_towers


def check_network_divides(recipe: AnyParallelRecipe, model: torch.nn.Module, num_ranks: int) -> None:
    """Refuses a network that cannot be divided as a recipe asks for it, without running it.

    The names that a recipe has are checked for one process too, so that a dry run finds a misspelt one.

    Raises:
        UsageError: see `find_divisible_layers`, `find_divisible_towers`, `expect_experts` and `find_layer`; or the
            network has a loss of its own, and each rank is to make steps alone.
    """
    if isinstance(recipe, HybridRecipe) and recipe.layers != "auto":
        find_divisible_layers(model, recipe.layers, num_ranks)
    elif isinstance(recipe, TowersRecipe) and num_ranks > 1:
        find_divisible_towers(model, recipe.match, num_ranks)
    elif isinstance(recipe, TowersRecipe):
        find_towers(model, recipe.match)
    elif isinstance(recipe, ExpertsRecipe):
        expect_experts(model, recipe.ranks)
    elif isinstance(recipe, SpatialRecipe) and recipe.until is not None and recipe.until != "auto":
        find_layer(model, recipe.until)
    elif isinstance(recipe, LocalRecipe) and num_ranks > 1:
        _expect_no_own_loss(model)


def _expect_no_own_loss(model: torch.nn.Module) -> None:
    if any(isinstance(module, HasAuxiliaryLoss) for module in model.modules()):
        what = "the network has a loss of its own, such as that of experts, which is of the samples of all processes"
        fix = "Set it to data, or to experts: with local each process makes steps alone."
        raise UsageError(what, where="parallel.strategy", fix=fix)


def divide_layers(
    recipe: AnyParallelRecipe,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks | None,
    blocks: bool | tuple[str, ...] = False,
) -> DividedNetwork | None:
    """Divides the layers, towers, experts or rows that the recipe names over the ranks; None: nothing is to divide.

    It comes last in a setup, as all checks run the whole network.

    Args:
        blocks: patterns for the modules whose weights are gathered together, as in `activation_checkpointing`; else
            those of Headway's own networks.

    Raises:
        UsageError: see `FullShards`; what `check_network_divides` refuses is refused here again.
    """
    if ranks is None:
        return None
    # A loss that a trial pass has left keeps a graph with the gradients of whole weights.
    AuxiliaryLosses(model).pop()
    divided: DividedNetwork
    if isinstance(recipe, HybridRecipe):
        # Left to more processes, which have something to choose for.
        if recipe.layers == "auto":
            return None
        divided = divide_linear_layers(model, recipe.layers, *ranks.launched_place, recipe.scheme)
    elif isinstance(recipe, ExpertsRecipe):
        divided = SharedExperts(model, *ranks.launched_place, recipe.ranks, across_hosts=recipe.across_hosts)
    elif isinstance(recipe, TowersRecipe) and ranks.launched_size > 1:
        divided = divide_towers(model, recipe.match, *ranks.launched_place, across_hosts=recipe.across_hosts)
    elif divides_weights(recipe) and ranks.launched_size > 1:
        names = list_blocks(model, blocks if isinstance(blocks, tuple) else None)
        whole = dict(model.named_parameters())
        divided = FullShards(model, names, *ranks.launched_place)
        divided.take_parameters(optimizer, whole)
    else:
        return None
    divided.parts.cut_state(model, optimizer)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.split = divided.split
    ranks.divided = divided
    return divided


@contextmanager
def join_layers(divided: DividedNetwork | None) -> Iterator[None]:
    """Prepares a divided network, if it is one, for evaluation for the duration of the block."""
    if divided is None:
        yield
        return
    with divided.join():
        yield
