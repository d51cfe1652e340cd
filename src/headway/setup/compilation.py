"""How a network is called: as it is, compiled, or with activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from headway.core.errors import RecipeError, UsageError
from headway.model.compilable import breaks, noted
from headway.model.recompute import recompute

MAX_NAMES = 3
"""Names of modules that are said."""


def compile_model(
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
        return report_graph_breaks(torch.compile(model), model, say)
    if how == "max-autotune":
        return report_graph_breaks(torch.compile(model, mode="max-autotune-no-cudagraphs"), model, say)
    compiled = report_graph_breaks(torch.compile(model, mode="reduce-overhead"), model, say)

    def replayed(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(images).clone()  # the next replay writes where they lie

    return replayed


def report_graph_breaks(
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
            say(f"torch.compile breaks the network's graph: {one.text()}.")
        return outputs

    return forward


def apply_activation_checkpointing(
    model: torch.nn.Module, asked: bool | tuple[str, ...], say: Callable[[str], object]
) -> None:
    """Does what the recipe's `recompute` asks for. Raises RecipeError: the network has no such modules."""
    if asked is False:
        return
    try:
        names = recompute(model, None if asked is True else asked)
    except UsageError as error:
        raise RecipeError(error.what, where="recompute", fix=error.fix) from None
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    say(f"Computed again in the backward pass: {', '.join(names[:MAX_NAMES])}{more}.")
