"""Operations on all modules of a network: replacing them, evaluation mode, and passes that leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import nn

Converted = TypeVar("Converted", bound="nn.Module")


def replace_modules(module: nn.Module, make: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    """Replaces every module m by make(m, name), in place, parents before the children of their replacements.

    A module that is used in several places becomes one module, used in the same places.

    Returns:
        The network; another object only if `make` replaced the root.
    """
    return _replace(module, make, "", {})


@contextmanager
def switch_to_evaluation(module: nn.Module) -> Iterator[None]:
    """Sets evaluation mode for the duration of the block and restores each module's own mode afterwards."""
    # Each module's own mode: frozen batch norms are in evaluation mode during training.
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


@contextmanager
def preserve_training_state(module: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and random generators after the block, for passes that are no part of the training.

    The block begins without gradients. The generators are those of torch (CUDA too), numpy and Python.
    """
    import torch

    parameters, buffers = list(module.parameters()), list(module.buffers())
    devices = {value.device for value in (*parameters, *buffers) if value.device.type == "cuda"}
    # Gradients are set aside, not copied; buffers (running statistics) change in place, so they are copied.
    grads, kept = [value.grad for value in parameters], [value.clone() for value in buffers]
    states = random.getstate(), np.random.get_state()
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        if buffers:
            with torch.no_grad():
                torch._foreach_copy_(buffers, kept)


def convert_module(module: nn.Module, kind: type[Converted]) -> Converted:
    """Returns a module of another class that shares the parameters, buffers, children and hooks of `module`."""
    # The same dictionaries, so an optimizer or a hook that holds an entry keeps working.
    converted = kind.__new__(kind)
    converted.__dict__.update(module.__dict__)
    return converted


def _replace(
    module: nn.Module, make: Callable[[nn.Module, str], nn.Module], name: str, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    # A shared module is replaced once.
    if module in done:
        return done[module]
    made = make(module, name)
    done[module] = done[made] = made
    for key, child in list(made._modules.items()):
        if child is not None:
            made._modules[key] = _replace(child, make, f"{name}.{key}" if name else key, done)
    return made
