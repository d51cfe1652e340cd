"""Optimizers of torch.optim from a recipe, with parameter groups by regular expression."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from headway.core.errors import RecipeError
from headway.core.recipe import Part
from headway.optim.options import refuse_unused, without_unused

if TYPE_CHECKING:  # a recipe is checked without torch, whose import takes seconds
    import torch

USERS = {"momentum": ("sgd", "nag"), "betas": ("adamw",), "eps": ("adamw",)}

Share = Annotated[float, Field(ge=0, lt=1)]


class GroupRecipe(Part):
    """Parameters with their own learning rate or weight decay."""

    match: str
    """Regular expression (re.search) on the parameter's full name; of several groups the first that matches wins."""
    lr_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Instead of the optimizer's weight decay, where it is set."""

    @field_validator("match")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern


class OptimizerRecipe(Part):
    """How gradients become steps."""

    name: Literal["sgd", "nag", "adamw"]
    """`sgd`, `nag` (SGD with Nesterov's momentum) or `adamw` (weight decay apart from the gradient)."""
    lr: float = Field(gt=0, allow_inf_nan=False)
    """Learning rate; the schedule gives its factor."""
    momentum: Share = 0.9
    """Of `sgd` and `nag`: share of the last step that the next one keeps."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of `adamw`: shares of the running first and second moments that one step keeps."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Of `adamw`: added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the gradient as weight_decay * weight (`sgd`, `nag`), or taken off the weight times lr (`adamw`)."""
    groups: tuple[GroupRecipe, ...] = ()
    """Parameter groups; unset: one group of all. Where there are groups, every trained parameter must be in one."""
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gradients are scaled down to this norm, over all parameters together, where theirs is greater."""

    @model_validator(mode="after")
    def _fits(self) -> OptimizerRecipe:
        refuse_unused(self, self.name, USERS)
        if self.name == "nag" and self.momentum == 0:
            raise ValueError("'nag' needs a momentum above 0. Set momentum: 0.9, or name: sgd")
        return self

    @model_serializer(mode="wrap")
    def _used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(handler(self), self.name, USERS)


def build(recipe: OptimizerRecipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a network that has its device and memory format already; fused, so no step waits for the device.

    Each of its param_groups carries `lr_scale` and `name`: the group's pattern, `all` where there are no groups.

    Raises:
        RecipeError: nothing to train, a parameter without a group, or a group without a parameter.
    """
    import torch
    from torch.optim import SGD, AdamW

    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise RecipeError("the network has no parameter to train", where="optimizer", fix="Freeze less.")
    groups = [
        {
            "name": group.match if recipe.groups else "all",
            "params": [parameters[name] for name in names],
            "lr": recipe.lr * group.lr_scale,
            "lr_scale": group.lr_scale,
            "weight_decay": recipe.weight_decay if group.weight_decay is None else group.weight_decay,
        }
        for group, names in assign(recipe.groups or (GroupRecipe(match=""),), list(parameters))
    ]
    if recipe.name == "adamw":
        return AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
    optimizer = SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.name == "nag", fused=True)
    if recipe.momentum > 0:
        # Left to itself, fused SGD (torch 2.13) makes the buffers at the first step without filling them, and where
        # loss scaling skips that step they stay as found in memory. From zeros the first step is the same, bit by bit.
        for parameter in parameters.values():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def assign(groups: tuple[GroupRecipe, ...], names: list[str]) -> list[tuple[GroupRecipe, list[str]]]:
    """Each group with the names it takes: a name goes to the first group whose pattern it matches.

    Raises:
        RecipeError: a name that no group takes, or a group that takes no name.
    """
    taken: list[list[str]] = [[] for _ in groups]
    patterns = [re.compile(group.match) for group in groups]
    unmatched = []
    for name in names:
        index = next((index for index, pattern in enumerate(patterns) if pattern.search(name)), None)
        if index is None:
            unmatched.append(name)
        else:
            taken[index].append(name)
    for index, group in enumerate(groups):
        if not taken[index]:
            where = f"optimizer.groups.{index}"
            if any(patterns[index].search(name) for name in names):
                what = f"earlier groups took every parameter that {group.match!r} matches"
                raise RecipeError(what, where=where, fix="Move it up, or remove it.")
            near = difflib.get_close_matches(group.match, names, n=3, cutoff=0.3) or names[:3]
            fix = f"Trained parameters are for example: {', '.join(near)}."
            fix += " Change the pattern, or remove the group."
            raise RecipeError(f"{group.match!r} matches no trained parameter", where=where, fix=fix)
    if unmatched:
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        what = f"no group matches {unmatched[0]!r}{more}"
        raise RecipeError(what, where="optimizer.groups", fix="Add a last group with match: '.*'.")
    return list(zip(groups, taken, strict=True))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group of an optimizer of `build`, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
