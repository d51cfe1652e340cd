"""torch.compile and activation checkpointing, as a recipe asks for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch

from headway.core.errors import RecipeError, UsageError
from headway.model.activation_checkpointing import checkpoint_activations
from headway.model.graph_breaks import collect_break_notes, list_graph_breaks

LOG = logging.getLogger("headway.setup")

MAX_NAMES = 3
"""Number of module names in a message; the others are counted."""


def compile_model(
    model: torch.nn.Module, how: bool | Literal["graphs", "max-autotune"]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compiles a network as the recipe's `compile` says. The optimizer is not compiled.

    At the first forward pass, the log has a message for each line that breaks the network's graph.

    Args:
        how: False: the network itself. True: torch.compile. `graphs` and `max-autotune`: its modes of these names.
    """
    if how is False:
        return model
    # CUDA graphs replay kernels at fixed addresses; torch.compile manages their memory in the mode `reduce-overhead`.
    modes = {True: None, "max-autotune": "max-autotune-no-cudagraphs", "graphs": "reduce-overhead"}
    compiled = report_graph_breaks(torch.compile(model, mode=modes[how]), model)
    if how != "graphs":
        return compiled

    def replay(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # A copy: the next replay overwrites the outputs of this one.
        return compiled(images).clone()

    return replay


def report_graph_breaks(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wraps a compiled network, so that the graph breaks of its first call are reported.

    torch.compile notes them in any case, so this costs nothing.
    """
    # Only the first call compiles; later ones skip the listener, which costs some time.
    begun = False

    def forward(images: torch.Tensor) -> torch.Tensor:
        nonlocal begun
        if begun:
            return compiled(images)
        begun = True
        with collect_break_notes() as notes:
            outputs = compiled(images)
        for one in list_graph_breaks(model, notes):
            LOG.info(f"torch.compile breaks the network's graph: {one.describe()}.")
        return outputs

    return forward


def apply_activation_checkpointing(model: torch.nn.Module, asked: bool | tuple[str, ...]) -> None:
    """Applies activation checkpointing as the recipe's `activation_checkpointing` says.

    Raises:
        RecipeError: the network has no such modules.
    """
    if asked is False:
        return
    try:
        names = checkpoint_activations(model, None if asked is True else asked)
    except UsageError as error:
        raise RecipeError(error.what, where="activation_checkpointing", fix=error.fix) from None
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    LOG.info(f"Computed again in the backward pass: {', '.join(names[:MAX_NAMES])}{more}.")
