"""torch's optimizers without the import of its compiler, which each of them makes when it is built.

torch.optim keeps some methods out of compiled graphs, and imports torch._dynamo to say so: 0.9 s of a core and 75 MB in
every process, twice the time of `import torch` in all (torch 2.13, CPU build). A run compiles its network, never its
optimizer, so these classes have the methods as they are without that. Steps and states are torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _get_undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method without its outermost decorator, or itself if it has none."""
    undecorated: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return undecorated


def _build_step(optimizer: type[Optimizer]) -> Callable[..., Any]:
    """Returns the step of a class, which tracks no gradients."""
    step: Callable[..., Any] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return step


class EagerOptimizer(Optimizer):
    """Base of optimizers that are built without torch's compiler."""

    add_param_group = _get_undecorated(Optimizer.add_param_group)
    zero_grad = _get_undecorated(Optimizer.zero_grad)
    state_dict = _get_undecorated(Optimizer.state_dict)
    load_state_dict = _get_undecorated(Optimizer.load_state_dict)


class SGD(EagerOptimizer, torch.optim.SGD):
    """torch's SGD."""

    step = _build_step(torch.optim.SGD)


class Adam(EagerOptimizer, torch.optim.Adam):
    """torch's Adam."""

    step = _build_step(torch.optim.Adam)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW."""

    step = _build_step(torch.optim.AdamW)
