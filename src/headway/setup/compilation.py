"""torch.compile and activation checkpointing, as a recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, final

import torch

from headway.core.errors import RecipeError, UsageError
from headway.model.activation_checkpointing import checkpoint_activations
from headway.model.graph_breaks import collect_break_notes, list_graph_breaks

MAX_LISTED_MODULES = 3
"""Largest number of module names in a message; the others are counted."""


def compile_model(
    model: torch.nn.Module,
    mode: bool | Literal["graphs", "max-autotune"],
    say: Callable[[str], object] = lambda text: None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a network compiled as the recipe's `compile` says. The optimizer is not compiled.

    Args:
        mode: False: the network itself. True: torch.compile. `graphs`: with CUDA graphs. `max-autotune`: with kernels
            that are chosen by trial.
        say: called at the first forward pass with each line that breaks the network's graph.
    """
    if mode is False:
        return model
    if mode is True:
        return report_graph_breaks(torch.compile(model), model, say)
    # Without CUDA graphs, which only `graphs` asks for.
    if mode == "max-autotune":
        return report_graph_breaks(torch.compile(model, mode="max-autotune-no-cudagraphs"), model, say)
    # CUDA graphs replay kernels at fixed addresses; torch.compile manages their memory in this mode.
    compiled = report_graph_breaks(torch.compile(model, mode="reduce-overhead"), model, say)

    def replay(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # A copy: the next replay overwrites the outputs of this one.
        return compiled(images).clone()

    return replay


@final
class GraphBreakMessage(str):
    """A message about a break of the compiled graph.

    Attributes:
        line: the part of the message that names the line.
    """

    line: str

    def __new__(cls, line: str) -> GraphBreakMessage:
        message = super().__new__(cls, f"torch.compile breaks the network's graph: {line}.")
        message.line = line
        return message


def report_graph_breaks(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, say: Callable[[str], object]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wraps a compiled network, so that the graph breaks of its first call, which compiles, are reported."""
    was_called = False

    def forward(images: torch.Tensor) -> torch.Tensor:
        nonlocal was_called
        # Only the first call compiles, so later ones skip the listener, which costs some time.
        if was_called:
            return compiled(images)
        was_called = True
        with collect_break_notes() as notes:
            outputs = compiled(images)
        for graph_break in list_graph_breaks(model, notes):
            say(GraphBreakMessage(graph_break.describe()))
        return outputs

    return forward


def apply_activation_checkpointing(
    model: torch.nn.Module, setting: bool | tuple[str, ...], say: Callable[[str], object]
) -> None:
    """Applies activation checkpointing to a network in place, as the recipe's `activation_checkpointing` says.

    Raises:
        RecipeError: the network has no such modules.
    """
    if setting is False:
        return
    try:
        names = checkpoint_activations(model, None if setting is True else setting)
    except UsageError as error:
        raise RecipeError(error.what, where="activation_checkpointing", fix=error.fix) from None
    others = f" and {len(names) - MAX_LISTED_MODULES} more" if len(names) > MAX_LISTED_MODULES else ""
    say(f"Computed again in the backward pass: {', '.join(names[:MAX_LISTED_MODULES])}{others}.")
