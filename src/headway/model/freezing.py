"""Freezes and unfreezes parameters during the run."""

from __future__ import annotations

import re
from typing import final

from torch import nn

from headway.core.epochs import epochs_to_position
from headway.core.errors import RecipeError
from headway.model.model_recipe import ModelRecipe


@final
class FreezeSchedule:
    """Freezes and unfreezes parts of a network at given positions of the run.

    A frozen parameter has no gradient, and optimizers leave it and its momentum as they are; the state of one that is
    unfrozen begins at its first gradient. The backward pass stops below the lowest trained parameter (Brock et al.
    2017, "FreezeOut", arXiv 1706.04983).

    Args:
        model: the network; parameters that are never trained are frozen already.
        recipe: the patterns of `freeze_after`, `freeze` and `unfreeze_at`.
        epoch: number of samples of one epoch.

    Raises:
        RecipeError: a pattern matches no trained parameter, or nothing is left to train.
    """

    def __init__(self, model: nn.Module, recipe: ModelRecipe, epoch: int) -> None:
        # Parameters that `freeze` took out for the whole run are no candidates.
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        unfrozen = find_unfrozen(model, recipe)
        self._late = [parameter for _, parameter in unfrozen]
        # (position, parameter, whether it is trained from there on).
        self._changes = [(epochs_to_position(at_epoch, epoch), parameter, True) for at_epoch, parameter in unfrozen]
        frozen_ids = set()
        for index, freeze_recipe in enumerate(recipe.freeze_after):
            matched = [name for name in trained if re.search(freeze_recipe.match, name)]
            if not matched:
                what = f"{freeze_recipe.match!r} matches no trained parameter"
                fix = f"There are for example: {', '.join(list(trained)[:3])}."
                raise RecipeError(what, where=f"model.freeze_after.{index}", fix=fix)
            position = epochs_to_position(freeze_recipe.after_epochs, epoch)
            self._changes += [(position, trained[name], False) for name in matched]
            # A parameter that two patterns match counts once.
            frozen_ids |= {id(trained[name]) for name in matched}
        if recipe.freeze_after and len(frozen_ids) == len(trained):
            what = "every parameter would be frozen before the run ends"
            raise RecipeError(
                what, where="model.freeze_after", fix="Leave out the pattern that matches the last layer."
            )
        # Stable: at one position, `freeze_after` has the last word.
        self._changes.sort(key=lambda entry: entry[0])
        # Number of entries of `_changes` that are done.
        self._num_done = 0
        self._has_begun = False

    def freeze_until(self, position: int) -> None:
        """Freezes and unfreezes the parameters that are due at a position. Call it before the step that begins there.

        Positions must not fall between two calls, except after `thaw`.
        """
        if not self._has_begun:
            self._has_begun = True
            for parameter in self._late:
                _set_trained(parameter, is_trained=False)
        while self._num_done < len(self._changes) and self._changes[self._num_done][0] <= position:
            _, parameter, is_trained = self._changes[self._num_done]
            _set_trained(parameter, is_trained=is_trained)
            self._num_done += 1

    def thaw(self) -> None:
        """Unfreezes all parameters until the next `freeze_until`.

        Ranks that join have frozen none, so this gives all ranks the same trained parameters.
        """
        for parameter in (*self._late, *(parameter for _, parameter, _ in self._changes)):
            parameter.requires_grad_(True)
        self._num_done, self._has_begun = 0, False


def _set_trained(parameter: nn.Parameter, *, is_trained: bool) -> None:
    parameter.requires_grad_(is_trained)
    # Optimizers skip a parameter without a gradient, its weight decay and momentum included.
    if not is_trained:
        parameter.grad = None


def find_unfrozen(model: nn.Module, recipe: ModelRecipe) -> list[tuple[float, nn.Parameter]]:
    """Returns (epoch, parameter) of the parameters that `unfreeze_at` trains later.

    The first pattern that matches counts.

    Raises:
        RecipeError: a pattern matches none of the parameters that `freeze` matches.
    """
    if not recipe.unfreeze_at:
        return []
    named = dict(model.named_parameters())
    frozen = [name for name in named if any(re.search(pattern, name) for pattern in recipe.freeze)]
    epochs: dict[str, float] = {}
    for index, part in enumerate(recipe.unfreeze_at):
        matched = [name for name in frozen if re.search(part.match, name)]
        if not matched:
            fix = f"There are for example: {', '.join(frozen[:3])}."
            what = f"{part.match!r} matches no parameter that model.freeze freezes"
            raise RecipeError(what, where=f"model.unfreeze_at.{index}", fix=fix)
        for name in matched:
            epochs.setdefault(name, part.at_epoch)
    return [(epoch, named[name]) for name, epoch in epochs.items()]
