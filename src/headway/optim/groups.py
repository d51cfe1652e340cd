"""Parameter groups: by regular expression, and without weight decay for biases and normalisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from pydantic import Field

from headway.core.errors import RecipeError, UsageError, list_similar
from headway.core.recipe import Pattern, RecipePart

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

Group = dict[str, Any]
"""A parameter group as torch's optimizers have them: `params`, and an option by each other key."""


class GroupRecipe(RecipePart):
    """Parameters with their own learning rate or weight decay."""

    match: Pattern
    """Regular expression (re.search) on the parameter's full name. The first group that matches takes the parameter."""
    lr_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Replaces the optimizer's weight decay and `no_decay` for this group."""


def split_decay(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns groups for any torch optimizer: parameters with two dimensions or more get weight decay, others none.

    The others are biases, and the beta and gamma of normalisation. Decay only slows them down (Goyal et al. 2017, arXiv
    1706.02677; He et al. 2018, arXiv 1812.01187, section 3.1).

    Args:
        params: the parameters of a network, or its (name, parameter) pairs; torch's optimizers then keep the names.
        weight_decay: weight decay of the first group.

    Raises:
        UsageError: `params` are not parameters, or `weight_decay` is below 0 or not finite.
    """
    import torch

    if not 0 <= weight_decay < inf:
        raise UsageError(f"split_decay has weight_decay={weight_decay!r}", fix="Give it a finite number of at least 0.")
    # Parameters come alone, or as torch's (name, parameter) pairs.
    params_by_decay: tuple[list[Any], list[Any]] = ([], [])
    # A tensor alone could be iterated too, row by row: it becomes the only entry, and is refused.
    for entry in params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else (params,):
        parameter = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(parameter, torch.Tensor) or parameter is params:
            what = f"split_decay takes the parameters of a network, and was given a {type(parameter).__name__}"
            raise UsageError(what, fix="Give it model.parameters(), or model.named_parameters().")
        params_by_decay[parameter.ndim <= 1].append(entry)
    groups = [
        {"params": entries, "weight_decay": decay}
        for entries, decay in zip(params_by_decay, (weight_decay, 0.0), strict=True)
    ]
    return [group for group in groups if group["params"]]


def assign_parameters(groups: tuple[GroupRecipe, ...], names: list[str]) -> list[tuple[GroupRecipe, list[str]]]:
    """Assigns each parameter name to the first group whose pattern it matches. Returns each group with its names.

    Raises:
        RecipeError: a parameter matches no group, or a group gets no parameter.
    """
    names_by_group: list[list[str]] = [[] for _ in groups]
    # Compiled once: every pattern meets every name.
    patterns = [re.compile(group.match) for group in groups]
    unmatched = []
    for name in names:
        index = next((index for index, pattern in enumerate(patterns) if pattern.search(name)), None)
        if index is None:
            unmatched.append(name)
        else:
            names_by_group[index].append(name)
    # The pattern of an empty group is misspelt, or stands below a group that takes everything.
    for index, group in enumerate(groups):
        if not names_by_group[index]:
            where = f"optimizer.groups.{index}"
            if any(patterns[index].search(name) for name in names):
                what = f"earlier groups took every parameter that {group.match!r} matches"
                raise RecipeError(what, where=where, fix="Move it up, or remove it.")
            fix = f"Trained parameters are for example: {list_similar(group.match, names)}."
            fix += " Change the pattern, or remove the group."
            raise RecipeError(f"{group.match!r} matches no trained parameter", where=where, fix=fix)
    if unmatched:
        others = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        what = f"no group matches {unmatched[0]!r}{others}"
        raise RecipeError(what, where="optimizer.groups", fix="Add a last group with match: '.*'.")
    return list(zip(groups, names_by_group, strict=True))
