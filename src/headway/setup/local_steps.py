"""Builds what the strategy `local` needs: the rounds of a run, and the optimizer that ends each of them."""

from __future__ import annotations

import torch

from headway.core.epochs import count_longest_round, epochs_to_position
from headway.core.errors import RecipeError
from headway.core.text_format import pluralise
from headway.data.batch_plan import BatchPlan
from headway.launch.generations import AveragedWeights
from headway.launch.ranks import Ranks
from headway.optim import MasterWeights
from headway.parallel.local import OuterOptimizer
from headway.parallel.parallel_recipe import AnyParallelRecipe, LocalRecipe
from headway.parallel.rounds import Rounds
from headway.setup.recipe import TrainRecipe


def plan_rounds(recipe: TrainRecipe, plan: BatchPlan, steps: int, samples: int) -> Rounds:
    """Plans the rounds of a run; without the strategy `local` each step is a round of all ranks.

    Args:
        recipe: its rates are resolved.
        samples: size of the training set.

    Raises:
        RecipeError: a round takes more than a quarter of an epoch.
    """
    local = recipe.parallel
    if not isinstance(local, LocalRecipe):
        return Rounds(first=steps, length=1, steps=steps)
    fitting = count_longest_round(samples, plan.largest_batch)
    # One step a round is data parallel.
    if local.every_steps > max(1, fitting):
        what = f"{local.every_steps} steps of {plan.largest_batch:,} samples are more than a quarter of an epoch"
        fix = f"Set it to at most {max(1, fitting)}."
        raise RecipeError(f"{what} ({samples:,} samples)", where="parallel.every_steps", fix=fix)
    assert local.from_epoch != "auto"
    start = epochs_to_position(local.from_epoch, samples)
    return Rounds(first=min(steps, plan.count_steps(0, start)), length=local.every_steps, steps=steps)


def describe_rounds(rounds: Rounds, plan: BatchPlan, samples: int) -> str:
    """Describes the rounds of a run; returns an empty text if no step is made alone."""
    if rounds.first == rounds.steps:
        return ""
    start = f"From epoch {plan.find_position(rounds.first) / samples:.4g} (step {rounds.first:,}) on"
    what = f"each process makes {pluralise(rounds.length, 'step')} alone, then all average their weights"
    return f"{start} {what}. Records, evaluations, checkpoints and stop signals wait for the end of such a round."


def build_outer_optimizer(
    recipe: AnyParallelRecipe,
    model: torch.nn.Module,
    masters: MasterWeights | None,
    rounds: Rounds,
    ranks: Ranks | None,
) -> OuterOptimizer | None:
    """Builds the optimizer that ends each round, and tells the ranks what they will average; None if none is local."""
    if not isinstance(recipe, LocalRecipe):
        return None
    # 16-bit weights would lose most of a difference, so their fp32 masters are averaged.
    named = [(name, weight) for name, weight in (masters or model).named_parameters() if weight.requires_grad]
    if ranks is not None:
        ranks.averaged = AveragedWeights(named, masters is not None, rounds.length)
    if recipe.outer is None:
        return OuterOptimizer(named)
    return OuterOptimizer(named, lr=recipe.outer.lr, momentum=recipe.outer.momentum)
