"""SGD with momentum, as torch's fused optimizer."""

from __future__ import annotations

from typing import Any

import torch

from headway.optim.eager_optimizer import SGD


def build_sgd(groups: list[dict[str, Any]], lr: float, momentum: float, *, nesterov: bool = False) -> SGD:
    """Builds torch's fused SGD with momentum buffers of zeros."""
    sgd = SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    # Fused SGD (torch 2.13) makes the buffers at the first step without filling them. If loss scaling skips that step,
    # they hold whatever was in memory. From zeros the first step is the same, bit by bit.
    for group in sgd.param_groups if momentum > 0 else ():
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd
