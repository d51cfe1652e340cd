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
    optimizer: Optimizer, parameters: Sequence[Tensor], weights_before: Sequence[Tensor], gradient_norms: Tensor
) -> Tensor:
    """Returns the learning rate that each parameter had in the newest step, without a host-device sync.

    Args:
        optimizer: the optimizer after the step.
        parameters: the parameters after the step.
        weights_before: their values before the step.
        gradient_norms: norms of their gradients, float64 [n].

    Returns:
        float64 [n] on the device: the factor on the gradient (LARS, LBSGD, NovoGrad) or on Adam's update (LAMB) before
        momentum. NaN for a parameter without a gradient or with a norm of 0, and for every parameter of an optimizer
        without rates for each layer (`has_layer_rates`).
    """
    unit = torch.ones((), dtype=gradient_norms.dtype, device=gradient_norms.device)
    unknown_rate = unit * torch.nan
    # A parameter that another optimizer steps, or that had no gradient, keeps NaN.
    rates = [unknown_rate] * len(parameters)
    if not has_layer_rates(optimizer):
        return torch.stack(rates)
    assert isinstance(optimizer, FusedOptimizer)
    index_by_id = {id(parameter): index for index, parameter in enumerate(parameters)}
    weight_norms = torch.stack(torch._foreach_norm(list(weights_before))).double()
    norm_of_weights, norm_of_gradients = weight_norms.unbind(), gradient_norms.unbind()
    for group in optimizer.param_groups:
        indices = [index_by_id[id(parameter)] for parameter in group["params"] if id(parameter) in index_by_id]
        if not indices:
            continue
        rule = optimizer._build_update_rule(group)
        ratios = [unit] * len(indices)
        # The function that the step used, with the norms of that step.
        if rule.trust_ratio is not None:
            scaled_norms = [
                _measure_scaled_norm(
                    optimizer, parameters[index], weights_before[index], norm_of_gradients[index], group
                )
                for index in indices
            ]
            ratios = list(
                rule.trust_ratio(
                    torch.stack([norm_of_weights[index] for index in indices]), torch.stack(scaled_norms)
                ).unbind()
            )
        for index, ratio in zip(indices, ratios, strict=True):
            # Biases and batch norm have no ratio.
            has_ratio = rule.has_trust_ratio is None or rule.has_trust_ratio(parameters[index])
            rates[index] = group["lr"] * (ratio if has_ratio else unit)
    # NovoGrad's rate does not depend on the norm of the weights.
    is_unknown = gradient_norms == 0 if isinstance(optimizer, NovoGrad) else (weight_norms == 0) | (gradient_norms == 0)
    return torch.stack(rates).masked_fill(is_unknown, torch.nan)


def _measure_scaled_norm(
    optimizer: Optimizer, parameter: Tensor, weights_before: Tensor, gradient_norm: Tensor, group: Group
) -> Tensor:
    """Returns the norm of the value that the trust ratio scaled: the gradient, LAMB's update, or NovoGrad's moment."""
    if isinstance(optimizer, NovoGrad):
        return _read_state_number(optimizer, parameter, "norm_sq", gradient_norm).sqrt()
    return (
        _compute_lamb_update_norm(optimizer, parameter, weights_before, group, gradient_norm)
        if isinstance(optimizer, LAMB)
        else gradient_norm
    )


def _read_state_number(optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor) -> Tensor:
    """Returns a scalar state in the type of `like`; NaN if there is none."""
    value = optimizer.state[parameter].get(name)
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device) if value is None else value.to(like.dtype)


def _compute_lamb_update_norm(
    optimizer: Optimizer, parameter: Tensor, weights_before: Tensor, group: Group, like: Tensor
) -> Tensor:
    """Returns the norm of LAMB's update before the trust ratio, computed from the moments after the step."""
    state = optimizer.state[parameter]
    # Before the first step with a gradient there is no moment.
    if "exp_avg" not in state:
        return torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    beta1, beta2 = group["betas"]
    steps = state["step"].double().clamp(min=1)
    # A moment in bfloat16 is widened first.
    first, second = (value.to(weights_before.dtype) for value in (state["exp_avg"], state["exp_avg_sq"]))
    first_moment = first / (1 - beta1**steps).to(first.dtype)
    second_moment = second / (1 - beta2**steps).to(second.dtype)
    update = first_moment / (second_moment.sqrt() + group["eps"]) + group["weight_decay"] * weights_before
    norm: Tensor = torch.linalg.vector_norm(update)
    return norm.to(like.dtype)
