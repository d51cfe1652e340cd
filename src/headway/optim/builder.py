"""Builds an optimizer from its recipe: parameter groups first, then the optimizer over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.core.errors import RecipeError
from headway.optim.batch_scaling import require_number
from headway.optim.groups import GroupRecipe, assign_parameters, split_decay
from headway.optim.recipe_base import OptimizerRecipe

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch


def build_optimizer(
    recipe: OptimizerRecipe, model: torch.nn.Module, steps_per_epoch: float | None = None, *, seed: int = 0
) -> torch.optim.Optimizer:
    """Builds the optimizer for a network that is on its device, in its memory format. Its step causes no sync.

    Each of its param_groups has `lr_scale` and `name`: the group's pattern, or `all` without groups. Parameters of a
    group that are treated differently (`no_decay`, `layer_decay`, `muon`) form param_groups of their own, with the
    same name.

    Args:
        recipe: the `optimizer` part of a recipe, with a number as its learning rate.
        model: the network.
        steps_per_epoch: samples / batch; required for `lbsgd` and `rmsprop_sgd`.
        seed: of the stochastic rounding with `precision: bf16`.

    Raises:
        RecipeError: every parameter is frozen, a parameter matches no group, a group has no parameter, or Muon would
            step no filter.
    """
    from headway.optim.fused_optimizer import FusedOptimizer
    from headway.optim.layer_decay import scale_layers, split_by_factor

    lr = require_number(recipe.lr, "optimizer.lr")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise RecipeError("the network has no parameter to train", where="optimizer", fix="Freeze less.")
    # Frozen layers count too, so that freezing one changes no other's rate.
    factors = {} if recipe.layer_decay == 1 else scale_layers(model, recipe.layer_decay)
    groups: list[dict[str, Any]] = []
    for group, group_names in assign_parameters(recipe.groups or (GroupRecipe(match=""),), list(parameters)):
        decay = recipe.weight_decay if group.weight_decay is None else group.weight_decay
        # A group's own weight decay applies to all its parameters, those of one dimension too.
        splits_decay = recipe.no_decay and group.weight_decay is None
        for factor, names in split_by_factor(group_names, factors):
            same_rate = [parameters[name] for name in names]
            parts = split_decay(same_rate, decay) if splits_decay else [{"params": same_rate, "weight_decay": decay}]
            for part in parts:
                part |= {"name": group.match if recipe.groups else "all", "lr_scale": group.lr_scale * factor}
                groups += recipe.split_group(part, lr)
    recipe.check_groups(groups)
    # `lr_scale` stays in the group: `set_lr` applies it again at every step.
    for param_group in groups:
        param_group["lr"] = lr * param_group["lr_scale"]
    optimizer = recipe.make(groups, lr, steps_per_epoch)
    if recipe.precision == "bf16":
        assert isinstance(optimizer, FusedOptimizer)
        optimizer.use_bf16(seed)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of an optimizer from `build_optimizer`, times the `lr_scale` of each group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
