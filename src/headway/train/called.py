"""How a network is called: as it is, compiled, or with activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from headway.core.errors import RecipeError, UsageError
from headway.model.recompute import recompute

SHOWN = 3
"""Names of modules that are said."""


def called(
    model: torch.nn.Module, how: bool | Literal["graphs", "max-autotune"]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A network by the recipe's `compile`. Optimizers stay outside of what is compiled, and of graphs."""
    if how is False:
        return model
    if how is True:
        return torch.compile(model)
    if how == "max-autotune":
        return torch.compile(model, mode="max-autotune-no-cudagraphs")
    compiled = torch.compile(model, mode="reduce-overhead")

    def replayed(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        outputs: torch.Tensor = compiled(images)
        return outputs.clone()  # the next replay writes where they lie

    return replayed


def compute_again(model: torch.nn.Module, asked: bool | tuple[str, ...], say: Callable[[str], object]) -> None:
    """Does what the recipe's `recompute` asks for. Raises RecipeError: the network has no such modules."""
    if asked is False:
        return
    try:
        names = recompute(model, None if asked is True else asked)
    except UsageError as error:
        raise RecipeError(error.what, where="recompute", fix=error.fix) from None
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    say(f"Computed again in the backward pass: {', '.join(names[:SHOWN])}{more}.")
