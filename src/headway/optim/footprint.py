"""Memory that an optimizer needs, and memory traffic and products of its step, all known before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

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
            once for each pass over it. The matrix products of Muon and SOAP are left out.
    """

    state_bytes: int
    moved_bytes: int


def estimate_footprint(optimizer: torch.optim.Optimizer, own_state_share: float | None = None) -> OptimizerFootprint:
    """Returns the memory of an optimizer from `build_optimizer`, which need not have stepped yet.

    Args:
        own_state_share: bytes of state for each byte of a parameter, if it is the user's own optimizer.
    """
    state_bytes = moved_bytes = 0
    for group in optimizer.param_groups:
        rule = optimizer._build_update_rule(group) if isinstance(optimizer, FusedOptimizer) else None
        is_rounded = isinstance(optimizer, FusedOptimizer) and optimizer.rounding is not None
        for parameter in group["params"]:
            parameter_bytes = parameter.numel() * parameter.element_size()
            if rule is not None:
                # States are float32 at least, whatever the type of the parameter, or all bfloat16 but for matrices.
                wide = torch.promote_types(parameter.dtype, torch.float32).itemsize
                array_bytes = (2 if is_rounded else wide) * parameter.numel()
                arrays_bytes = array_bytes * ((rule.first_state is not None) + (rule.second_state is not None))
                if rule.matrix_states is not None:
                    arrays_bytes += wide * sum(size**2 for size in rule.matrix_states(parameter).values())
                has_step_count = rule.has_step_count or is_rounded
                state_bytes += arrays_bytes + 4 * has_step_count + 4 * (rule.norm_state is not None)
                if rule.norm_state is not None:
                    # The norm of gradients.
                    moved_bytes += parameter_bytes
                elif rule.trust_ratio is not None and (rule.has_trust_ratio is None or rule.has_trust_ratio(parameter)):
                    # The norms of weights and gradients.
                    moved_bytes += 2 * parameter_bytes
                    # LAMB's moments are read for the norms, and rounded once.
                    moved_bytes += arrays_bytes * (is_rounded and rule.second_state is not None)
            elif isinstance(optimizer, MOMENT_OPTIMIZERS):
                arrays_bytes = 2 * parameter_bytes
                state_bytes += arrays_bytes + 4
            elif own_state_share is not None:
                arrays_bytes = round(own_state_share * parameter_bytes)
                state_bytes += arrays_bytes
            else:
                arrays_bytes = sum(
                    state.numel() * state.element_size()
                    for state in optimizer.state[parameter].values()
                    if isinstance(state, Tensor)
                )
                state_bytes += arrays_bytes
            # Weights are read and written, gradients read, states read and written.
            moved_bytes += 3 * parameter_bytes + 2 * arrays_bytes
    return OptimizerFootprint(state_bytes, moved_bytes)


def count_multiply_adds(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Returns the multiply-adds of the matrix products that a step makes for a parameter; others have no products.

    Products that are made every few steps count as their mean.

    Args:
        parameters: (name, parameter) of all that the optimizer steps.
    """
    if not isinstance(optimizer, FusedOptimizer):
        return {}
    counts: dict[Tensor, float] = {}
    for group in optimizer.param_groups:
        count = optimizer._build_update_rule(group).count_multiply_adds
        counts |= {} if count is None else {parameter: count(parameter) for parameter in group["params"]}
    return {name: counts[parameter] for name, parameter in parameters if counts.get(parameter)}


def find_product_precision(optimizer: torch.optim.Optimizer) -> Literal["fp32", "bf16"]:
    """Returns the precision of an optimizer's matrix products on a GPU from compute capability 8.0 on."""
    found = {group.get("ns_precision", "fp32") for group in optimizer.param_groups}
    return "bf16" if found & {"auto", "bf16"} else "fp32"
