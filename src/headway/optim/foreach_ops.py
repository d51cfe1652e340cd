"""Elementwise operations over lists of tensors that several update rules share.

They call torch's `_foreach_` functions and work on every device and type; names that end in `_` work in place. A
coefficient is a number, a scalar tensor, or a list with one of these for each parameter. There is no host-device sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Coefficient = float | Tensor | Sequence[Tensor] | Sequence[float]


def compute_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norms, float64 [n]; each is summed in the tensors' own type."""
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def compute_bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Returns 1 / (1 - beta^t), which makes a running mean that began at 0 unbiased. `steps`: t, float64 [n]."""
    # expm1 stays exact when beta^t is nearly 1.
    return -1 / torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))


def multiply(tensors: list[Tensor], factor: Coefficient) -> list[Tensor]:
    """Returns tensor * factor, as new tensors."""
    return list(torch._foreach_mul(tensors, factor))  # type: ignore[arg-type]


def scale_(tensors: list[Tensor], factor: Coefficient) -> None:
    """Computes tensor *= factor."""
    torch._foreach_mul_(tensors, factor)  # type: ignore[arg-type]


def add_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Computes tensor += other."""
    torch._foreach_add_(tensors, others)


def add(tensors: list[Tensor], others: list[Tensor], factor: float) -> list[Tensor]:
    """Returns tensor + factor * other, as new tensors."""
    return list(torch._foreach_add(tensors, others, alpha=factor))


def descend_(weights: list[Tensor], directions: list[Tensor], lr: float | Tensor) -> None:
    """Computes weight -= lr * direction; the memory of the directions may be overwritten."""
    # With a number it is one pass over memory.
    if isinstance(lr, Tensor):
        scale_(directions, lr)
        subtract_(weights, directions)
    else:
        torch._foreach_add_(weights, directions, alpha=-lr)


def subtract_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Computes tensor -= other."""
    torch._foreach_sub_(tensors, others)


def combine(
    grads: list[Tensor], grad_factor: Coefficient, weights: list[Tensor], weight_factor: Coefficient
) -> list[Tensor]:
    """Returns grad_factor * g + weight_factor * w, as new tensors."""
    # Without weight decay the second pass over memory is left out.
    sums = multiply(grads, grad_factor)
    if not (isinstance(weight_factor, float | int) and weight_factor == 0):
        add_(sums, multiply(weights, weight_factor))
    return sums


def update_moment_(moments: list[Tensor], decay: float | Tensor, factor: float, values: list[Tensor]) -> None:
    """Computes moment = decay * moment + factor * value, in place."""
    scale_(moments, decay)
    torch._foreach_add_(moments, values, alpha=factor)


def update_square_moment_(moments: list[Tensor], decay: float | Tensor, factor: float, values: list[Tensor]) -> None:
    """Computes moment = decay * moment + factor * value^2, in place."""
    scale_(moments, decay)
    torch._foreach_addcmul_(moments, values, values, factor)


def divide_by_root(values: list[Tensor], moments: list[Tensor], factor: Coefficient, eps: float) -> list[Tensor]:
    """Returns value / (sqrt(moment * factor) + eps), as new tensors."""
    # sqrt and division in place: one temporary list in all.
    divisors = multiply(moments, factor)
    torch._foreach_sqrt_(divisors)
    torch._foreach_add_(divisors, eps)
    return list(torch._foreach_div(values, divisors))
