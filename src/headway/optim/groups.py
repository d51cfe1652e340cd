"""Parameter groups: by regular expression, and without weight decay where it does harm."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from headway.core.errors import RecipeError, UsageError
from headway.core.recipe import RecipePart, check_patterns

if TYPE_CHECKING:  # a recipe is checked without torch, whose import takes seconds
    import torch


class GroupRecipe(RecipePart):
    """Parameters with their own learning rate or weight decay."""

    match: str
    """Regular expression (re.search) on the parameter's full name; of several groups the first that matches wins."""
    lr_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Instead of the optimizer's weight decay and `no_decay`, where it is set."""

    @field_validator("match")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        check_patterns(pattern)
        return pattern


def split_decay(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: weight decay for parameters of two dimensions or more, none for the others.

    Those are biases, and the beta and gamma of normalisation: they cannot grow the network's function without bound,
    and decay only holds them back (Goyal et al. 2017, arXiv 1706.02677; He et al. 2018, arXiv 1812.01187, section 3.1).

    Args:
        params: of a network, or its (name, parameter) pairs, whose names the groups then keep as torch has it.

    Raises:
        UsageError: something else, or a decay below 0.
    """
    import torch

    if not 0 <= weight_decay < inf:
        raise UsageError(f"split_decay has weight_decay={weight_decay!r}", fix="Give it a finite number of at least 0.")
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
