"""From a recipe to an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.core.errors import RecipeError
from headway.optim.groups import GroupRecipe, assign, split_decay
from headway.optim.optimizer import USERS, OptimizerRecipe
from headway.optim.rate import number

if TYPE_CHECKING:  # a recipe is checked without torch, whose import takes seconds
    import torch

APART = ("lr_rmsprop", "lr_rest", "momentum_rest")
"""Fields that are no arguments of the optimizers' own."""


def build(
    recipe: OptimizerRecipe, model: torch.nn.Module, steps_per_epoch: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a network that has its device and memory format already; fused, so no step waits for the device.

    Each of its param_groups carries `lr_scale` and `name`: the group's pattern, `all` where there are no groups. What
    of a group is treated otherwise (`no_decay`, `muon`) is a param_group of its own, of the same name.

    Args:
        steps_per_epoch: samples / batch; of use to `lbsgd` and `rmsprop_sgd` alone, which need it.

    Raises:
        RecipeError: nothing to train, a parameter without a group, or a group without a parameter.
    """
    lr = number(recipe.lr, "optimizer.lr")
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise RecipeError("the network has no parameter to train", where="optimizer", fix="Freeze less.")
    groups: list[dict[str, Any]] = []
    for group, names in assign(recipe.groups or (GroupRecipe(match=""),), list(parameters)):
        mine = [parameters[name] for name in names]
        decay = recipe.weight_decay if group.weight_decay is None else group.weight_decay
        split = recipe.no_decay and group.weight_decay is None
        for part in split_decay(mine, decay) if split else [{"params": mine, "weight_decay": decay}]:
            part |= {"name": group.match if recipe.groups else "all", "lr_scale": group.lr_scale}
            groups += _filters_apart(recipe, part, lr) if recipe.name == "muon" else [part]
    for one in groups:
        one["lr"] = lr * one["lr_scale"]
    return _made(recipe, groups, lr, steps_per_epoch)


def _filters_apart(recipe: OptimizerRecipe, part: dict[str, Any], lr: float) -> list[dict[str, Any]]:
    """Of `muon`: convolution filters, and the rest."""
    filters, rest = ([p for p in part["params"] if (p.ndim > 2) == found] for found in (True, False))
    scale = part["lr_scale"] * (1.0 if recipe.lr_rest is None else recipe.lr_rest / lr)
    sgd = {"filters": False, "lr_scale": scale, "momentum": recipe.momentum_rest}
    parts = [{**part, "params": filters, "filters": True}, {**part, "params": rest, **sgd}]
    return [one for one in parts if one["params"]]


def _made(
    recipe: OptimizerRecipe, groups: list[dict[str, Any]], lr: float, steps_per_epoch: float | None
) -> torch.optim.Optimizer:
    from torch.optim import SGD, Adam, AdamW

    from headway import optim

    options: dict[str, Any] = {
        field: getattr(recipe, field) for field, names in USERS.items() if recipe.name in names and field not in APART
    }
    if recipe.name in ("lbsgd", "rmsprop_sgd"):
        if steps_per_epoch is None:
            what = f"{recipe.name!r} counts in epochs, and the length of one is not known here"
            raise RecipeError(what, where="optimizer.name", fix="Give build the argument steps_per_epoch.")
        options["steps_per_epoch"] = steps_per_epoch
    match recipe.name:
        case "sgd" | "nag":
            sgd = SGD(groups, lr=lr, nesterov=recipe.name == "nag", fused=True, **options)
            return _with_buffers(sgd) if recipe.momentum > 0 else sgd
        case "adam":
            return Adam(groups, lr=lr, fused=True, **options)
        case "adamw":
            return AdamW(groups, lr=lr, fused=True, **options)
        case "lars":
            return optim.LARS(groups, lr, **options)
        case "lamb":
            return optim.LAMB(groups, lr, **options)
        case "novograd":
            return optim.NovoGrad(groups, lr, **options)
        case "signum":
            return optim.Signum(groups, lr, **options)
        case "ftml":
            return optim.FTML(groups, lr, **options)
        case "lbsgd":
            return optim.LBSGD(groups, lr, **options)
        case "rmsprop_sgd":
            return optim.RMSpropSGD(groups, lr, rmsprop=recipe.lr_rmsprop / lr, **options)
        case "muon":
            return optim.Muon(groups, lr, **options)


def _with_buffers(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    """Left to itself, fused SGD (torch 2.13) makes the buffers at the first step without filling them, and where loss
    scaling skips that step they stay as found in memory. From zeros the first step is the same, bit by bit."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group of an optimizer of `build`, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
