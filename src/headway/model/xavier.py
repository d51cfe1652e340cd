"""Xavier initialisation with a magnitude, as MXNet has it (Glorot and Bengio 2010)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headway.core.errors import UsageError


def init_xavier(model: nn.Module, images: Tensor | None = None, *, magnitude: float = 3.0) -> None:
    """Draws all weights uniformly from [-s, s], s = sqrt(magnitude / mean of inputs and outputs); biases become zero.

    Inputs and outputs are those of a weight, times the size of its kernel. 3 gives `torch.nn.init.xavier_uniform_`, and
    is MXNet's default; 2.3 is that of some of its examples. Scales of norms become one.

    Args:
        model: its parameters of two dimensions or more are weights.
        images: not used; a recipe's `model.init` gets the first batch.

    Raises:
        UsageError: the magnitude is not above 0.
    """
    if not magnitude > 0:
        raise UsageError(f"Xavier with a magnitude of {magnitude:g}", fix="Give a number above 0, such as 2.3.")
    norms = {id(one.weight) for one in model.modules() if isinstance(one, _BatchNorm | nn.LayerNorm | nn.GroupNorm)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                kernel = parameter[0][0].numel()
                mean = kernel * (parameter.shape[0] + parameter.shape[1]) / 2
                bound = math.sqrt(magnitude / mean)
                parameter.uniform_(-bound, bound)
            else:
                parameter.fill_(1.0 if id(parameter) in norms else 0.0)
