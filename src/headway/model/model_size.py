"""Size of a network: parameters, and multiply-adds for one image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.core.modules import switch_to_evaluation
from headway.model.flops import MultiplyAddCounter


@dataclass(frozen=True)
class ModelSize:
    """Size of one network.

    Attributes:
        parameters: number of parameters, trained or not.
        multiply_adds: multiply-adds of convolutions and matrix products in a forward pass over one image. Elementwise
            operations do not count, as in published numbers. None: they could not be counted.
    """

    parameters: int
    multiply_adds: int | None

    def describe(self) -> str:
        """Returns the size in words: `25,557,032 parameters, 4.089 billion multiply-adds`."""
        multiply_adds_text = "" if self.multiply_adds is None else f", {_abbreviate(self.multiply_adds)} multiply-adds"
        return f"{self.parameters:,} parameters{multiply_adds_text}"


def measure_model_size(model: nn.Module, images: Tensor) -> ModelSize:
    """Counts parameters, and multiply-adds in one forward pass in evaluation mode. The network is left unchanged.

    Args:
        model: the network; it may be on the device `meta`, which computes nothing.
        images: float [N, C, H, W] on the device of the network.
    """
    # A forward pass counts each call, however often a module is called.
    with torch.no_grad(), switch_to_evaluation(model), MultiplyAddCounter() as counter:
        model(images)
    # Tied weights count once.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(parameters, counter.total // len(images))


def _abbreviate(number: int) -> str:
    # Four digits, as published tables have.
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:,}"
