"""What is done with all modules of a network: others in their place, evaluation mode or no trace for a while."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # nothing of torch is needed to walk through a network
    from torch import nn


def replace_modules(module: nn.Module, make: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    """The network with every module m replaced by make(m, name), parents before what is inside of what they became.

    A module that is used in several places becomes one module, used in the same places.

    Returns:
        the network; another object only where `make` made another one of it.
    """
    return _replace(module, make, "", {})


@contextmanager
def switch_to_evaluation(module: nn.Module) -> Iterator[None]:
    """Within it the network is in evaluation mode; afterwards each module is in the mode in which it was."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


@contextmanager
def preserve_training_state(module: nn.Module) -> Iterator[None]:
    """For passes that are no part of the training. Within it parameters begin without gradients; afterwards gradients,
    buffers and the generators of torch (on a GPU too), numpy and Python are as before."""
    import torch

    parameters, buffers = list(module.parameters()), list(module.buffers())
    devices = {value.device for value in (*parameters, *buffers) if value.device.type == "cuda"}
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


def _replace(
    module: nn.Module, make: Callable[[nn.Module, str], nn.Module], name: str, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in done:
        return done[module]
    made = make(module, name)
    done[module] = done[made] = made
    for key, child in list(made._modules.items()):
        if child is not None:
            made._modules[key] = _replace(child, make, f"{name}.{key}" if name else key, done)
    return made
