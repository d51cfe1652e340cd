"""Memory that an optimizer needs, and memory traffic of its step, both known before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.optim.fused_optimizer import FusedOptimizer

MOMENT_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch that create their state at the first step: two moments and a count."""


@final
@dataclass(frozen=True)
class OptimizerFootprint:
    """Memory of one optimizer.

    Attributes:
        state_bytes: size of its state after the first step.
        moved_bytes: bytes of weights, gradients and state that a step reads and writes, norms included; an array counts
            once for each pass over it. Muon's matrix products are left out.
    """

    state_bytes: int
    moved_bytes: int


def estimate_footprint(optimizer: torch.optim.Optimizer) -> OptimizerFootprint:
    """Computes the memory of an optimizer from `build_optimizer`."""
    kept = moved = 0
    for group in optimizer.param_groups:
        rule = optimizer._rule(group) if isinstance(optimizer, FusedOptimizer) else None
        for parameter in group["params"]:
            size = parameter.numel() * parameter.element_size()
            if rule is not None:
                wide = torch.promote_types(parameter.dtype, torch.float32).itemsize * parameter.numel()
                # States are float32 at least, whatever the type of the parameter.
                arrays = wide * ((rule.first_state is not None) + (rule.second_state is not None))
                kept += arrays + 4 * rule.has_step_count + 4 * (rule.norm_state is not None)
                if rule.has_trust_ratio is not None and rule.has_trust_ratio(parameter):
                    # The norms of weights and gradients.
                    moved += 2 * size
                elif rule.norm_state is not None:
                    # The norm of gradients.
                    moved += size
            elif isinstance(optimizer, MOMENT_OPTIMIZERS):
                arrays = 2 * size
                kept += arrays + 4
            else:
                arrays = sum(
                    value.numel() * value.element_size()
                    for value in optimizer.state[parameter].values()
                    if isinstance(value, Tensor)
                )
                kept += arrays
            # Weights are read and written, gradients read, states read and written.
            moved += 3 * size + 2 * arrays
    return OptimizerFootprint(kept, moved)
