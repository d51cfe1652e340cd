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
        parts: patterns of parameters, and the epochs after which they are frozen.
        epoch: positions of one epoch.

    Raises:
        RecipeError: a pattern matches no trained parameter, or nothing is left to train.
    """

    def __init__(self, model: nn.Module, parts: Sequence[FreezeAfterRecipe], epoch: int) -> None:
        # Parameters that `freeze` took out from the start are not candidates.
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._due: list[tuple[int, nn.Parameter]] = []
        for place, part in enumerate(parts):
            matched = [name for name in trained if re.search(part.match, name)]
            if not matched:
                what, where = f"{part.match!r} matches no trained parameter", f"model.freeze_after.{place}"
                raise RecipeError(what, where=where, fix=f"There are for example: {', '.join(list(trained)[:3])}.")
            self._due += [(epochs_to_position(part.after_epochs, epoch), trained[name]) for name in matched]
        # A parameter that two patterns match counts once.
        if parts and len({id(parameter) for _, parameter in self._due}) == len(trained):
            what = "every parameter would be frozen before the run ends"
            raise RecipeError(
                what, where="model.freeze_after", fix="Leave out the pattern that matches the last layer."
            )
        self._due.sort(key=lambda one: one[0])
        # The first so many entries of `_due` are frozen.
        self._frozen = 0

    def freeze_until(self, position: int) -> None:
        """Freezes the parameters that are due. Call it before the step that begins at a position."""
        while self._frozen < len(self._due) and self._due[self._frozen][0] <= position:
            _, parameter = self._due[self._frozen]
            parameter.requires_grad_(False)
            # Optimizers skip a parameter without a gradient, its weight decay and momentum included.
            parameter.grad = None
            self._frozen += 1

    def thaw(self) -> None:
        """Unfreezes all parameters until the next step, so that ranks that join, which have frozen none, have the same
        parameters as the others."""
        for _, parameter in self._due[: self._frozen]:
            parameter.requires_grad_(True)
        self._frozen = 0
