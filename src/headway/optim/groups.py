"""Parameter groups: by regular expression, and without weight decay for biases and normalisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from headway.core.errors import RecipeError, UsageError, list_similar
from headway.core.recipe import RecipePart, check_patterns

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

Group = dict[str, Any]
"""A parameter group as torch's optimizers have them: `params`, and an option by each other key."""


class GroupRecipe(RecipePart):
    """Parameters with their own learning rate or weight decay."""

    match: str
    """Regular expression (re.search) on the parameter's full name. The first group that matches takes the parameter."""
    lr_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Replaces the optimizer's weight decay and `no_decay` for this group."""

    @field_validator("match")
    @classmethod
    def _check_patterns(cls, pattern: str) -> str:
        check_patterns(pattern)
        return pattern


def split_decay(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]], weight_decay: float
) -> list[Group]:
    """Makes groups for any torch optimizer: weight decay for parameters of two dimensions or more, none for the others.

    The others are biases, and the beta and gamma of normalisation. Decay only slows them down (Goyal et al. 2017, arXiv
    1706.02677; He et al. 2018, arXiv 1812.01187, section 3.1).

    Args:
        params: the parameters of a network, or its (name, parameter) pairs; torch's optimizers then keep the names.

    Raises:
        UsageError: no parameters, or a decay below 0.
    """
    import torch

    if not 0 <= weight_decay < inf:
        raise UsageError(f"split_decay has weight_decay={weight_decay!r}", fix="Give it a finite number of at least 0.")
    # Parameters come alone, or as torch's (name, parameter) pairs.
    both: tuple[list[Any], list[Any]] = ([], [])
    for one in params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else (params,):
        parameter = one[1] if isinstance(one, tuple) and len(one) == 2 else one
        if not isinstance(parameter, torch.Tensor) or parameter is params:
            what = f"split_decay takes the parameters of a network, and was given a {type(parameter).__name__}"
            raise UsageError(what, fix="Give it model.parameters(), or model.named_parameters().")
        both[parameter.ndim <= 1].append(one)
    groups = [{"params": some, "weight_decay": decay} for some, decay in zip(both, (weight_decay, 0.0), strict=True)]
    return [group for group in groups if group["params"]]


def assign_parameters(groups: tuple[GroupRecipe, ...], names: list[str]) -> list[tuple[GroupRecipe, list[str]]]:
    """Assigns each parameter name to the first group whose pattern it matches.

    Raises:
        RecipeError: a name without a group, or a group without a name.
    """
    taken: list[list[str]] = [[] for _ in groups]
    # Compiled once: every pattern meets every name.
    patterns = [re.compile(group.match) for group in groups]
    unmatched = []
    for name in names:
        index = next((index for index, pattern in enumerate(patterns) if pattern.search(name)), None)
        if index is None:
            unmatched.append(name)
        else:
            taken[index].append(name)
    # A group that takes nothing is a misspelt pattern, or stands below a group that takes everything.
    for index, group in enumerate(groups):
        if not taken[index]:
            where = f"optimizer.groups.{index}"
            if any(patterns[index].search(name) for name in names):
                what = f"earlier groups took every parameter that {group.match!r} matches"
                raise RecipeError(what, where=where, fix="Move it up, or remove it.")
            fix = f"Trained parameters are for example: {list_similar(group.match, names)}."
            fix += " Change the pattern, or remove the group."
            raise RecipeError(f"{group.match!r} matches no trained parameter", where=where, fix=fix)
    if unmatched:
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        what = f"no group matches {unmatched[0]!r}{more}"
        raise RecipeError(what, where="optimizer.groups", fix="Add a last group with match: '.*'.")
    return list(zip(groups, taken, strict=True))
