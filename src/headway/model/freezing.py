"""Freezes parameters during the run: they are trained for the first epochs only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from torch import nn

from headway.core.epochs import epochs_to_position
from headway.core.errors import RecipeError
from headway.model.model_recipe import FreezeAfterRecipe


@final
class FreezeSchedule:
    """Freezes parts of a network from given positions of the run on (Brock et al. 2017, "FreezeOut", arXiv 1706.04983).

    A frozen parameter has no gradient, and optimizers leave it and its momentum as they are. The backward pass stops
    below the lowest trained parameter.

    Args:
        model: the network; parameters that are never trained are frozen already.
        freeze_recipes: patterns of parameters, and the epochs after which they are frozen.
        epoch: number of samples of one epoch.

    Raises:
        RecipeError: a pattern matches no trained parameter, or nothing is left to train.
    """

    def __init__(self, model: nn.Module, freeze_recipes: Sequence[FreezeAfterRecipe], epoch: int) -> None:
        # Parameters that `freeze` took out from the start are not candidates.
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._freeze_points: list[tuple[int, nn.Parameter]] = []
        for index, freeze_recipe in enumerate(freeze_recipes):
            matched = [name for name in trained if re.search(freeze_recipe.match, name)]
            if not matched:
                what = f"{freeze_recipe.match!r} matches no trained parameter"
                fix = f"There are for example: {', '.join(list(trained)[:3])}."
                raise RecipeError(what, where=f"model.freeze_after.{index}", fix=fix)
            self._freeze_points += [
                (epochs_to_position(freeze_recipe.after_epochs, epoch), trained[name]) for name in matched
            ]
        # A parameter that two patterns match counts once.
        if freeze_recipes and len({id(parameter) for _, parameter in self._freeze_points}) == len(trained):
            what = "every parameter would be frozen before the run ends"
            raise RecipeError(
                what, where="model.freeze_after", fix="Leave out the pattern that matches the last layer."
            )
        self._freeze_points.sort(key=lambda entry: entry[0])
        # Number of entries of `_freeze_points` that are frozen.
        self._num_frozen = 0

    def freeze_until(self, position: int) -> None:
        """Freezes the parameters that are due at a position. Call it before the step that begins there."""
        while self._num_frozen < len(self._freeze_points) and self._freeze_points[self._num_frozen][0] <= position:
            _, parameter = self._freeze_points[self._num_frozen]
            parameter.requires_grad_(False)
            # Optimizers skip a parameter without a gradient, its weight decay and momentum included.
            parameter.grad = None
            self._num_frozen += 1

    def thaw(self) -> None:
        """Unfreezes all parameters until the next `freeze_until`.

        Ranks that join have frozen none, so this gives all ranks the same trained parameters.
        """
        for _, parameter in self._freeze_points[: self._num_frozen]:
            parameter.requires_grad_(True)
        self._num_frozen = 0
