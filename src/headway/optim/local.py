"""The learning rate that each layer really has, of optimizers that scale layers apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim.lamb import LAMB
from headway.optim.lars import LARS
from headway.optim.lbsgd import LBSGD
from headway.optim.novograd import NovoGrad

Group = dict[str, Any]


def has_local_rates(optimizer: Optimizer) -> bool:
    """Whether the rule has a learning rate for each layer."""
    if isinstance(optimizer, LBSGD):
        # Of a macro-batch, what the rate is made of is gone after the step: the sum of several steps' gradients.
        return all(group["warmup"] == "lars" and group["batch_scale"] == 1 for group in optimizer.param_groups)
    if isinstance(optimizer, LARS | LAMB):
        return any(group["trust"] for group in optimizer.param_groups)
    return isinstance(optimizer, NovoGrad)


@torch.no_grad()
def local_rates(optimizer: Optimizer, parameters: Sequence[Tensor], before: Sequence[Tensor], g: Tensor) -> Tensor:
    """The local learning rate of each parameter in the step that was just made, float64 [n] on the device: the factor
    on the gradient (LARS, LBSGD, NovoGrad) or on Adam's update (LAMB) before momentum; waits for nothing.

    Args:
        parameters: of the optimizer, after the step. before: what they were.
        g: norms of their gradients, float64 [n].

    Returns:
        NaN for a parameter that had no gradient or whose norm of weights or gradient is 0, and for all of an optimizer
        without local rates (`has_local_rates`), as is an LBSGD whose macro-batches have several steps.
    """
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    groups = [group_of[id(parameter)] for parameter in parameters]
    w = torch.stack(torch._foreach_norm(list(before))).double()
    out = torch.full_like(g, torch.nan)
    if not has_local_rates(optimizer):
        return out

    def each(key: str) -> Tensor:
        values = [group[key] for group in groups]
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack([torch.as_tensor(value, device=g.device, dtype=g.dtype) for value in values])
        return torch.tensor(values, dtype=g.dtype).to(g.device, non_blocking=True)

    lr = each("lr")
    if isinstance(optimizer, NovoGrad):
        below = torch.stack([_number(optimizer, one, "norm_sq", g) for one in parameters]).sqrt() + each("eps")
        return (lr / below).masked_fill(g == 0, torch.nan)
    decay = each("weight_decay")
    if isinstance(optimizer, LARS):
        out = each("eta") * w / (g + decay * w + each("eps"))
        clipped = torch.minimum(out, lr)
        out = torch.where(each("clip") > 0, clipped, lr * out)
        out = torch.where(each("trust") > 0, out, lr)
    elif isinstance(optimizer, LBSGD):
        out = lr * (w.square() / (g.square() + decay * w.square() + 1e-18)).sqrt().clamp(0.01, 100)
    else:
        update = torch.stack([_adam(optimizer, *one, g) for one in zip(parameters, before, groups, strict=True)])
        out = torch.where(each("trust") > 0, lr * w / update, lr)
    return out.masked_fill((w == 0) | (g == 0), torch.nan)


def _number(optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor) -> Tensor:
    found = optimizer.state[parameter].get(name)
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device) if found is None else found.to(like.dtype)


def _adam(optimizer: Optimizer, parameter: Tensor, before: Tensor, group: Group, like: Tensor) -> Tensor:
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
