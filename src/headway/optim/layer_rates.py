"""The effective learning rate of each layer, for optimizers that scale layers separately."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim.fused_optimizer import FusedOptimizer
from headway.optim.groups import Group
from headway.optim.lamb import LAMB
from headway.optim.lars import LARS
from headway.optim.lbsgd import LBSGD
from headway.optim.novograd import NovoGrad


def has_layer_rates(optimizer: Optimizer) -> bool:
    """Returns True if the optimizer has a learning rate for each layer that is known after its step."""
    if isinstance(optimizer, LBSGD):
        # The rate of a macro-batch comes from the sum of its gradients, which is cleared in the step.
        return all(group["warmup"] == "lars" and group["batch_scale"] == 1 for group in optimizer.param_groups)
    if isinstance(optimizer, LARS):
        return any(group["trust"] is not None for group in optimizer.param_groups)
    if isinstance(optimizer, LAMB):
        return any(group["layerwise"] for group in optimizer.param_groups)
    return isinstance(optimizer, NovoGrad)


@torch.no_grad()
def measure_layer_rates(
    optimizer: Optimizer, parameters: Sequence[Tensor], before: Sequence[Tensor], g: Tensor
) -> Tensor:
    """Computes the learning rate that each parameter had in the step that was just made, without waiting for the
    device.

    Args:
        parameters: the parameters after the step.
        before: their values before the step.
        g: norms of their gradients, float64 [n].

    Returns:
        float64 [n] on the device: the factor on the gradient (LARS, LBSGD, NovoGrad) or on Adam's update (LAMB) before
        momentum. NaN for a parameter without a gradient or with a norm of 0, and for every parameter of an optimizer
        without rates for each layer (`has_layer_rates`).
    """
    one = torch.ones((), dtype=g.dtype, device=g.device)
    nothing = one * torch.nan
    # A parameter that another optimizer steps, or that had no gradient, keeps NaN.
    rates = [nothing] * len(parameters)
    if not has_layer_rates(optimizer):
        return torch.stack(rates)
    assert isinstance(optimizer, FusedOptimizer)
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    w = torch.stack(torch._foreach_norm(list(before))).double()
    weights, gradients = w.unbind(), g.unbind()
    for group in optimizer.param_groups:
        indices = [index_of[id(one)] for one in group["params"] if id(one) in index_of]
        if not indices:
            continue
        rule, found = optimizer._rule(group), [one] * len(indices)
        # The same function as in the step, given the norms as they were in it.
        if rule.trust_ratio is not None:
            below = [
                _measure_scaled_norm(optimizer, parameters[at], before[at], gradients[at], group) for at in indices
            ]
            found = list(rule.trust_ratio(torch.stack([weights[at] for at in indices]), torch.stack(below)).unbind())
        for at, ratio in zip(indices, found, strict=True):
            # Biases and batch norm step at the plain learning rate.
            adapts = rule.has_trust_ratio is None or rule.has_trust_ratio(parameters[at])
            rates[at] = group["lr"] * (ratio if adapts else one)
    # NovoGrad's rate does not depend on the norm of the weights.
    unknown = g == 0 if isinstance(optimizer, NovoGrad) else (w == 0) | (g == 0)
    return torch.stack(rates).masked_fill(unknown, torch.nan)


def _measure_scaled_norm(optimizer: Optimizer, parameter: Tensor, before: Tensor, g: Tensor, group: Group) -> Tensor:
    """The norm of the value that the trust ratio scaled in the step: the gradient, or the optimizer's update of it."""
    if isinstance(optimizer, NovoGrad):
        return _read_state_number(optimizer, parameter, "norm_sq", g).sqrt()
    return _lamb_update_norm(optimizer, parameter, before, group, g) if isinstance(optimizer, LAMB) else g


def _read_state_number(optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor) -> Tensor:
    found = optimizer.state[parameter].get(name)
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device) if found is None else found.to(like.dtype)


def _lamb_update_norm(optimizer: Optimizer, parameter: Tensor, before: Tensor, group: Group, like: Tensor) -> Tensor:
    """Norm of LAMB's update before the trust ratio, computed from the moments after the step."""
    state = optimizer.state[parameter]
    # Before the first step with a gradient there is no moment.
    if "exp_avg" not in state:
        return torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    (beta1, beta2), steps = group["betas"], state["step"].double().clamp(min=1)
    first = state["exp_avg"] / (1 - beta1**steps).to(state["exp_avg"].dtype)
    second = state["exp_avg_sq"] / (1 - beta2**steps).to(state["exp_avg_sq"].dtype)
    update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * before
    norm: Tensor = torch.linalg.vector_norm(update)
    return norm.to(like.dtype)
