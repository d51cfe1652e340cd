"""Activation checkpointing: modules recompute their activations in the backward pass instead of keeping them.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). It saves memory, and costs a
second forward pass of these modules.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from headway.core.errors import UsageError, list_similar
from headway.model import cifar, moe_net, resnet, resnet_cifar, small

HEADWAY_BLOCKS = (
    *(cifar.CifarNetBlock, moe_net.CifarMoeBlock, resnet.BasicBlock, resnet.Bottleneck, resnet_cifar.CifarBlock),
    small.ConvLayer,
)


def checkpoint_activations(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Turns on activation checkpointing for modules of a network in place: they keep only their inputs for backward.

    Results do not change by a bit: gradients, running statistics of batch norm and random generators are as without it,
    and names stay. The second pass has the random numbers of the first one (torch, numpy and Python). Batch norm over
    several ranks repeats its all-reduce.

    Args:
        model: the network.
        patterns: regular expressions (re.search) on the modules' full names; if one module contains another, the outer
            one is taken. None: the blocks of Headway's own networks.

    Returns:
        Names of the modules.

    Raises:
        UsageError: a pattern matches no module, or one that is never called; or the network has no such block.
    """
    modules = dict(model.named_modules())
    names = list_blocks(model, patterns)
    if not names:
        example = re.escape(next(filter(None, modules), "layer1"))
        fix = f"Name modules of yours, for example activation_checkpointing: ['^{example}$']."
        raise UsageError("the network has none of Headway's own blocks", fix=fix)
    for name in names:
        # A ModuleList is never called, and a forward that was replaced already would be lost.
        if type(modules[name]).forward is nn.Module.forward or "forward" in vars(modules[name]):
            what = f"{name} is a {type(modules[name]).__name__}, which is not called as a whole"
            children = f"'^{re.escape(name)}\\.[^.]+$'"
            raise UsageError(what, fix=f"Name the modules in it, for example {children}.")
    for name in names:
        # A bound method, not a closure: a deep copy of the module then calls its own forward.
        modules[name].forward = MethodType(_run_checkpointed, modules[name])
    return names


def list_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Lists the names of the modules that match patterns, none of which contains another.

    Args:
        patterns: as for `checkpoint_activations`. None: the blocks of Headway's own networks, if there are any.

    Raises:
        UsageError: a pattern matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matched: dict[str, nn.Module] = {}
    if patterns is None:
        matched = {name: module for name, module in modules.items() if isinstance(module, HEADWAY_BLOCKS)}
    for pattern in patterns or ():
        new_matches = {name: module for name, module in modules.items() if re.search(pattern, name)}
        if not new_matches:
            similar_names = list_similar(pattern, modules)
            fix = f"Modules of this network are for example: {similar_names}." if modules else "It has no modules."
            raise UsageError(f"{pattern!r} matches no module", fix=fix)
        # Several patterns may match one module.
        matched |= new_matches
    # The inner module would be recomputed twice.
    return [name for name in matched if not any(name.startswith(f"{outer}.") for outer in matched)]


def _run_checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(module).forward, module)
    # Without gradients nothing is kept anyway.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_build_contexts, module), **kwargs)


def _build_contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the first pass and of the second."""
    first_states = (random.getstate(), np.random.get_state())
    return nullcontext(), _repeat_forward(module, first_states)


@contextmanager
def _repeat_forward(module: nn.Module, first_states: tuple[Any, Any]) -> Iterator[None]:
    """Sets the random states of the first pass within the block, and restores random states and running statistics."""
    # Running statistics are updated in copies that are discarded. Without any, kernels would save fewer tensors than in
    # the first pass, and torch pairs the saved tensors of both passes by their index.
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase)]
    saved = [(norm._buffers, dict(norm._buffers)) for norm in norms]
    # torch.utils.checkpoint restores the generators of torch, and only these.
    restore_generators: Callable[[], None] = partial(_set_random_states, (random.getstate(), np.random.get_state()))
    _set_random_states(first_states)
    for buffers, original in saved:
        buffers.update({name: None if value is None else value.clone() for name, value in original.items()})
    try:
        yield
    finally:
        for buffers, original in saved:
            buffers.update(original)
        restore_generators()


def _set_random_states(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
