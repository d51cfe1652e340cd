"""The learning rate that each layer really has, of optimizers that scale layers apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim.fused_optimizer import FusedOptimizer
from headway.optim.lamb import LAMB
from headway.optim.lars import LARS
from headway.optim.lbsgd import LBSGD
from headway.optim.novograd import NovoGrad

Group = dict[str, Any]


def has_layer_rates(optimizer: Optimizer) -> bool:
    """Whether the rule has a learning rate for each layer."""
    if isinstance(optimizer, LBSGD):
        # Of a macro-batch, what the rate is made of is gone after the step: the sum of several steps' gradients.
        return all(group["warmup"] == "lars" and group["batch_scale"] == 1 for group in optimizer.param_groups)
    if isinstance(optimizer, LARS | LAMB):
        return any(group["layerwise"] for group in optimizer.param_groups)
    return isinstance(optimizer, NovoGrad)


@torch.no_grad()
def measure_layer_rates(
    optimizer: Optimizer, parameters: Sequence[Tensor], before: Sequence[Tensor], g: Tensor
) -> Tensor:
    """The local learning rate of each parameter in the step that was just made, float64 [n] on the device: the factor
    on the gradient (LARS, LBSGD, NovoGrad) or on Adam's update (LAMB) before momentum; waits for nothing.

    Args:
        parameters: of the optimizer, after the step. before: what they were.
        g: norms of their gradients, float64 [n].

    Returns:
        NaN for a parameter that had no gradient or whose norm of weights or gradient is 0, and for all of an optimizer
        without local rates (`has_local_rates`), as is an LBSGD whose macro-batches have several steps.
    """
    one = torch.ones((), dtype=g.dtype, device=g.device)
    nothing = one * torch.nan
    rates = [nothing] * len(parameters)
    if not has_layer_rates(optimizer):
        return torch.stack(rates)
    assert isinstance(optimizer, FusedOptimizer)
    place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
    w = torch.stack(torch._foreach_norm(list(before))).double()
    weights, gradients = w.unbind(), g.unbind()
    for group in optimizer.param_groups:
        places = [place_of[id(one)] for one in group["params"] if id(one) in place_of]
        if not places:
            continue
        rule, found = optimizer._rule(group), [one] * len(places)
        if rule.trust_ratio is not None:
            below = [_scaled_norm(optimizer, parameters[at], before[at], gradients[at], group) for at in places]
            found = list(rule.trust_ratio(torch.stack([weights[at] for at in places]), torch.stack(below)).unbind())
        for at, ratio in zip(places, found, strict=True):
            adapts = rule.has_trust_ratio is None or rule.has_trust_ratio(parameters[at])
            rates[at] = group["lr"] * (ratio if adapts else one)
    unknown = g == 0 if isinstance(optimizer, NovoGrad) else (w == 0) | (g == 0)
    return torch.stack(rates).masked_fill(unknown, torch.nan)


def _scaled_norm(optimizer: Optimizer, parameter: Tensor, before: Tensor, g: Tensor, group: Group) -> Tensor:
    """The norm of what the trust ratio scales, as the step had it."""
    if isinstance(optimizer, NovoGrad):
        return _read_state_number(optimizer, parameter, "norm_sq", g).sqrt()
    return _lamb_update_norm(optimizer, parameter, before, group, g) if isinstance(optimizer, LAMB) else g


def _read_state_number(optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor) -> Tensor:
    found = optimizer.state[parameter].get(name)
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device) if found is None else found.to(like.dtype)


def _lamb_update_norm(optimizer: Optimizer, parameter: Tensor, before: Tensor, group: Group, like: Tensor) -> Tensor:
    """Norm of LAMB's update before the trust ratio, from the moments after the step."""
    state = optimizer.state[parameter]
    if "exp_avg" not in state:
        return torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    (beta1, beta2), steps = group["betas"], state["step"].double().clamp(min=1)
    first = state["exp_avg"] / (1 - beta1**steps).to(state["exp_avg"].dtype)
    second = state["exp_avg_sq"] / (1 - beta2**steps).to(state["exp_avg_sq"].dtype)
    update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * before
    norm: Tensor = torch.linalg.vector_norm(update)
    return norm.to(like.dtype)
