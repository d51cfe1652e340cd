"""What an optimizer keeps, and how often it goes through memory, known before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.optim.fused_optimizer import FusedOptimizer

COUNTED = (torch.optim.Adam, torch.optim.AdamW)
"""Those of torch's own that begin their state at the first step: two moments and a count."""


@final
@dataclass(frozen=True)
class OptimizerFootprint:
    """Of one optimizer.

    Attributes:
        state_bytes: of all its state after the first step.
        moved_bytes: what a step reads and writes of weights, gradients and state, norms included, each array as often
            as a pass goes through it. What Muon computes of its filters is not in it.
    """

    state_bytes: int
    moved_bytes: int


def estimate_footprint(optimizer: torch.optim.Optimizer) -> OptimizerFootprint:
    """That of an optimizer that `build` made."""
    kept = moved = 0
    for group in optimizer.param_groups:
        rule = optimizer._rule(group) if isinstance(optimizer, FusedOptimizer) else None
        for parameter in group["params"]:
            size = parameter.numel() * parameter.element_size()
            if rule is not None:
                wide = torch.promote_types(parameter.dtype, torch.float32).itemsize * parameter.numel()
                arrays = wide * ((rule.first_state is not None) + (rule.second_state is not None))
                kept += arrays + 4 * rule.has_step_count + 4 * (rule.norm_state is not None)
                if rule.has_trust_ratio is not None and rule.has_trust_ratio(parameter):
                    moved += 2 * size  # the norms of weights and gradients
                elif rule.norm_state is not None:
                    moved += size  # that of gradients
            elif isinstance(optimizer, COUNTED):
                arrays = 2 * size
                kept += arrays + 4
            else:
                arrays = sum(
                    value.numel() * value.element_size()
                    for value in optimizer.state[parameter].values()
                    if isinstance(value, Tensor)
                )
                kept += arrays
            moved += 3 * size + 2 * arrays
    return OptimizerFootprint(kept, moved)
