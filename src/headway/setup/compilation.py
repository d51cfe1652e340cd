"""How a network is called: as it is, compiled, or with activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, final

import torch

from headway.core.errors import RecipeError, UsageError
from headway.model.compilable import breaks, noted
from headway.model.recompute import recompute

SHOWN = 3
"""Names of modules that are said."""


def called(
    model: torch.nn.Module,
    how: bool | Literal["graphs", "max-autotune"],
    say: Callable[[str], object] = lambda text: None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A network by the recipe's `compile`. Optimizers stay outside of what is compiled, and of graphs.

    Args:
        say: told, at the first call, of each line at which torch.compile breaks the network's graph.
    """
    if how is False:
        return model
    if how is True:
        return telling(torch.compile(model), model, say)
    if how == "max-autotune":
        return telling(torch.compile(model, mode="max-autotune-no-cudagraphs"), model, say)
    compiled = telling(torch.compile(model, mode="reduce-overhead"), model, say)

    def replayed(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(images).clone()  # the next replay writes where they lie

    return replayed


@final
class GraphBreakMessage(str):
    """A message about a break of the compiled graph; `line` names the line of the network alone."""

    line: str

    def __new__(cls, line: str) -> GraphBreakMessage:
        message = super().__new__(cls, f"torch.compile breaks the network's graph: {line}.")
        message.line = line
        return message


def telling(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, say: Callable[[str], object]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same; what torch notes at the first call, which compiles, is said. It notes it anyway."""
    begun = False

    def forward(images: torch.Tensor) -> torch.Tensor:
        nonlocal begun
        if begun:
            return compiled(images)
        begun = True
        with noted() as notes:
            outputs = compiled(images)
        for one in breaks(model, notes):
            say(GraphBreakMessage(one.text()))
        return outputs

    return forward


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
