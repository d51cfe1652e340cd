"""Every optimizer in every mode, and parameters of every kind to try them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import torch
from tests.optim import _reference as reference
from torch import Tensor

from headway import optim
from headway.optim.optimizer_recipe import AnyOptimizerRecipe

Options = dict[str, Any]
# The user's own one needs an import path, and has tests of its own.
OPTIMIZER_NAMES = [
    name
    for recipe in get_args(get_args(AnyOptimizerRecipe)[0])
    if (name := recipe.model_fields["name"].default) != "own"
]
LARS: Options = {"momentum": 0.9, "weight_decay": 5e-3, "trust": 0.02}
LAMB: Options = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.02}
NOVOGRAD: Options = {"betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.01}
SIGNUM: Options = {"momentum": 0.9, "weight_decay": 0.01, "decoupled_decay": 0.05}
FTML: Options = {"betas": (0.6, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TURN: Options = {
    "rmsprop": 0.02, "steps_per_epoch": 2.5, "momentum": 0.9, "smoothing": 0.99, "eps": 1e-8, "center_epochs": 3.0,
    "period_epochs": 4.0, "weight_decay": 0.01,
}  # fmt: skip
LBSGD: Options = {
    "steps_per_epoch": 3.0, "momentum": 0.9, "weight_decay": 0.01, "batch_scale": 4, "warmup": "linear",
    "warmup_epochs": 4.0, "begin_epoch": 0.0,
}  # fmt: skip
MUON: Options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "ns_steps": 4, "normalise": False}
# bf16, which `auto` takes on some machines, is far from the reference.
MUON["ns_precision"] = "fp32"

# name: (class, reference, learning rate, options)
CASES: dict[str, tuple[Callable[..., Any], type[reference.Reference], float, Options]] = {
    "lars, inside": (optim.LARS, reference.LARS, 1.0, LARS),
    "lars, outside": (optim.LARS, reference.LARS, 1.0, LARS | {"lr_in_momentum": False}),
    "lars, no decay, eps": (optim.LARS, reference.LARS, 1.0, LARS | {"weight_decay": 0.0, "eps": 0.1}),
    "lars, nesterov, inside": (optim.LARS, reference.LARS, 1.0, LARS | {"nesterov": True}),
    "lars, nesterov, outside": (optim.LARS, reference.LARS, 1.0, LARS | {"nesterov": True, "lr_in_momentum": False}),
    "lars, no momentum": (optim.LARS, reference.LARS, 1.0, LARS | {"momentum": 0.0}),
    "larc, inside": (optim.LARS, reference.LARS, 0.01, LARS | {"clip": True}),
    "larc, outside": (optim.LARS, reference.LARS, 0.01, LARS | {"clip": True, "lr_in_momentum": False}),
    "lars, trust off": (optim.LARS, reference.LARS, 0.05, LARS | {"trust": None}),
    "lamb": (optim.LAMB, reference.LAMB, 0.02, LAMB),
    "lamb, trust off, no decay": (optim.LAMB, reference.LAMB, 0.02, LAMB | {"layerwise": False, "weight_decay": 0.0}),
    "lamb, no first moment": (optim.LAMB, reference.LAMB, 0.02, LAMB | {"betas": (0.0, 0.99)}),
    "novograd": (optim.NovoGrad, reference.NovoGrad, 0.02, NOVOGRAD),
    "novograd, averaging": (optim.NovoGrad, reference.NovoGrad, 0.02, NOVOGRAD | {"averaging": True}),
    "signum": (optim.Signum, reference.Signum, 0.01, SIGNUM),
    "signum, no momentum": (optim.Signum, reference.Signum, 0.01, SIGNUM | {"momentum": 0.0, "decoupled_decay": 0.0}),
    "ftml": (optim.FTML, reference.FTML, 0.01, FTML),
    "ftml, no first moment": (optim.FTML, reference.FTML, 0.01, FTML | {"betas": (0.0, 0.9), "weight_decay": 0.0}),
    "rmsprop_sgd": (optim.RMSpropSGD, reference.RMSpropSGD, 0.05, TURN),
    "rmsprop_sgd, no momentum": (optim.RMSpropSGD, reference.RMSpropSGD, 0.05, TURN | {"momentum": 0.0}),
    "lbsgd, linear": (optim.LBSGD, reference.LBSGD, 0.05, LBSGD),
    "lbsgd, power2": (optim.LBSGD, reference.LBSGD, 0.05, LBSGD | {"warmup": "power2", "begin_epoch": 1.4}),
    "lbsgd, sqrt": (optim.LBSGD, reference.LBSGD, 0.05, LBSGD | {"warmup": "sqrt", "momentum": 0.0}),
    "lbsgd, lars": (optim.LBSGD, reference.LBSGD, 0.01, LBSGD | {"warmup": "lars", "batch_scale": 2}),
    "lbsgd, one step": (optim.LBSGD, reference.LBSGD, 0.05, LBSGD | {"batch_scale": 1, "warmup_epochs": 0.0}),
    "lbsgd, lars, one step": (optim.LBSGD, reference.LBSGD, 0.01, LBSGD | {"batch_scale": 1, "warmup": "lars"}),
    "muon": (optim.Muon, reference.Muon, 0.02, MUON),
    "muon, no nesterov": (optim.Muon, reference.Muon, 0.02, MUON | {"nesterov": False, "ns_steps": 3}),
    "muon, normalise": (optim.Muon, reference.Muon, 0.02, MUON | {"normalise": True}),
}
OF_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "norm_sq", "square_avg", "grad_sum")

SHAPES = ((8, 3, 3, 3), (40, 24, 5, 5), (20000,), (6,), (5, 7), (3, 1, 1, 1), (170, 100))
"""Of several stretches of the native core and of less than one; filters, matrices, biases."""


def parameters(kind: torch.dtype = torch.float32, *, channels_last: bool = False, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for shape in SHAPES:
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        if channels_last and weight.ndim == 4:
            weight = weight.to(memory_format=torch.channels_last)
        out.append(torch.nn.Parameter(weight.to(kind)))
    return out


def gradients(steps: int = 20, seed: int = 1) -> Iterator[list[Tensor]]:
    """Recorded ones: each step's lie in one direction, and noise of the same size."""
    generator = torch.Generator().manual_seed(seed)
    way = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    for _ in range(steps):
        yield [0.1 * (one + torch.randn(one.shape, generator=generator, dtype=torch.float64)) for one in way]


def rates(lr: float, steps: int = 20) -> list[float]:
    """A warm-up from a small rate, then a fall."""
    return [lr * min((step + 1) / 6, 1 - 0.9 * max(0, step - 6) / steps) for step in range(steps)]


def give(params: list[Tensor], grads: list[Tensor], factor: float = 1.0) -> None:
    """Gradients in the parameters' type and memory format, as backward leaves them."""
    for parameter, grad in zip(params, grads, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(grad * factor)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def walk(optimizer: torch.optim.Optimizer, params: list[Tensor], lr: float, steps: int = 20, seed: int = 1) -> None:
    for grads, rate in zip(gradients(steps, seed), rates(lr, steps), strict=True):
        give(params, grads)
        set_rate(optimizer, rate)
        optimizer.step()


def distance(found: Tensor, wanted: Any) -> float:
    """||found - wanted|| / ||wanted||"""
    wanted = np.asarray(wanted, np.float64)
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found.detach().double().numpy() - wanted)) / (size or 1.0)
