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

MAX_LISTED_MODULES = 3
"""Largest number of module names in a message; the others are counted."""


def compile_model(
    model: torch.nn.Module, mode: bool | Literal["graphs", "max-autotune"]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a network compiled as the recipe's `compile` says. The optimizer is not compiled.

    At the first forward pass, the log has a message for each line that breaks the network's graph.

    Args:
        mode: False: the network itself. True: torch.compile. `graphs`: with CUDA graphs. `max-autotune`: with kernels
            that are chosen by trial.
    """
    if mode is False:
        return model
    # CUDA graphs replay kernels at fixed addresses; torch.compile manages their memory in the mode `reduce-overhead`.
    # Only `graphs` asks for them.
    torch_modes = {True: None, "max-autotune": "max-autotune-no-cudagraphs", "graphs": "reduce-overhead"}
    compiled = report_graph_breaks(torch.compile(model, mode=torch_modes[mode]), model)
    if mode != "graphs":
        return compiled

    def replay(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # A copy: the next replay overwrites the outputs of this one.
        return compiled(images).clone()

    return replay


def report_graph_breaks(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module
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
            LOG.info(f"torch.compile breaks the network's graph: {graph_break.describe()}.")
        return outputs

    return forward


def apply_activation_checkpointing(model: torch.nn.Module, setting: bool | tuple[str, ...]) -> None:
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
    LOG.info(f"Computed again in the backward pass: {', '.join(names[:MAX_LISTED_MODULES])}{others}.")
