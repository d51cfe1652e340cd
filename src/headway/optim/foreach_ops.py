"""Elementwise operations over lists of tensors that several update rules share.

They call torch's `_foreach_` functions and work on every device and type; names that end in `_` work in place. A
coefficient is a number, a tensor of one number, or a list with one of these for each parameter. Nothing here waits for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Coefficient = float | Tensor | Sequence[Tensor] | Sequence[float]


def compute_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norms, float64 [n]; each is summed in the tensors' own type."""
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 / (1 - beta^t): makes a running mean that began at 0 unbiased."""
    # expm1 stays exact when beta^t is nearly 1.
    return -1 / torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))


def multiply(tensors: list[Tensor], factor: Coefficient) -> list[Tensor]:
    """tensor * factor, as new tensors."""
    return list(torch._foreach_mul(tensors, factor))  # type: ignore[arg-type]


# In place: moments and momentum buffers are updated where they lie.
def scale_(tensors: list[Tensor], factor: Coefficient) -> None:
    torch._foreach_mul_(tensors, factor)  # type: ignore[arg-type]


def add_(tensors: list[Tensor], others: list[Tensor]) -> None:
    torch._foreach_add_(tensors, others)


def subtract_(tensors: list[Tensor], others: list[Tensor]) -> None:
    torch._foreach_sub_(tensors, others)


def combine(grads: list[Tensor], from_g: Coefficient, weights: list[Tensor], from_w: Coefficient) -> list[Tensor]:
    """from_g * g + from_w * w, as new tensors."""
    # Without weight decay the second pass over memory is left out.
    out = multiply(grads, from_g)
    if not (isinstance(from_w, float | int) and from_w == 0):
        add_(out, multiply(weights, from_w))
    return out


def update_moment_(moments: list[Tensor], keep: float | Tensor, rest: float, values: list[Tensor]) -> None:
    """moment = keep * moment + rest * value."""
    scale_(moments, keep)
    torch._foreach_add_(moments, values, alpha=rest)


def update_square_moment_(moments: list[Tensor], keep: float | Tensor, rest: float, values: list[Tensor]) -> None:
    """moment = keep * moment + rest * value^2."""
    scale_(moments, keep)
    torch._foreach_addcmul_(moments, values, values, rest)


def divide_by_root(values: list[Tensor], moments: list[Tensor], factor: Coefficient, eps: float) -> list[Tensor]:
    """value / (sqrt(moment * factor) + eps), as new tensors."""
    # sqrt and division in place: one temporary list in all.
    below = multiply(moments, factor)
    torch._foreach_sqrt_(below)
    torch._foreach_add_(below, eps)
    return list(torch._foreach_div(values, below))
