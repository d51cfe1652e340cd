"""How large a network is: parameters, and multiply-adds of one image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.core.modules import switch_to_evaluation
from headway.model.flops import MultiplyAddCounter


@dataclass(frozen=True)
class ModelSize:
    """Of one network.

    Attributes:
        parameters: trained or not.
        multiply_adds: of convolutions and matrix products in one forward pass over one image; what is added or
            multiplied elementwise does not count, as in the published numbers. None where they could not be counted.
    """

    parameters: int
    multiply_adds: int | None

    def describe(self) -> str:
        """`25,557,032 parameters, 4.089 billion multiply-adds`."""
        done = "" if self.multiply_adds is None else f", {_abbreviate(self.multiply_adds)} multiply-adds"
        return f"{self.parameters:,} parameters{done}"


def measure_model_size(model: nn.Module, images: Tensor) -> ModelSize:
    """Counts in one forward pass over some images [N, C, H, W], in evaluation mode, without gradients; network and
    images may lie on the device `meta`, which computes nothing. The network is left as it was.
    """
    with torch.no_grad(), switch_to_evaluation(model), MultiplyAddCounter() as counter:
        model(images)
    parameters = sum(value.numel() for value in model.parameters())
    return ModelSize(parameters, counter.total // len(images))


def _abbreviate(number: int) -> str:
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:,}"
