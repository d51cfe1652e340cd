"""Broadcasts the state of a network and of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headway.comm.hvd import context, ops
from headway.comm.hvd.objects import broadcast_object


def broadcast_parameters(
    params: Mapping[str, Tensor] | list[Tensor] | list[tuple[str, Tensor]], root_rank: int
) -> None:
    """Broadcasts one rank's tensors to all ranks, in place.

    Args:
        params: `model.state_dict()`, or a list of `model.named_parameters()` or `model.parameters()`.
        root_rank: rank whose tensors are sent.

    Raises:
        ValueError: params is something else.
    """
    named: Iterable[tuple[str | None, Tensor]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"broadcast_parameters takes a state dict or a list, not {type(params).__name__}")
    handles = []
    for name, tensor in named:
        target = tensor.detach()
        # Channels-last weights are not contiguous.
        buffer = target.contiguous()
        handles.append((ops.broadcast_async_(buffer, root_rank, name), target, buffer))
    for handle, target, buffer in handles:
        ops.synchronize(handle)
        if buffer is not target:
            target.copy_(buffer)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Broadcasts one rank's optimizer state: tensors, numbers, and the options of its parameter groups.

    The other ranks load it. It takes no step to create missing state: state that the root lacks is dropped on them.

    Args:
        root_rank: rank whose state is sent.
        model: not used; part of Horovod's signature.

    Raises:
        ValueError: the optimizer is LBFGS, whose state has no fixed form.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast; use another optimizer")
    # First the structure, pickled, with placeholders for tensors; then the tensors, each as a broadcast of its own.
    tensors: list[Tensor] = []
    is_root = context.rank() == root_rank

    def extract_tensor(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach().contiguous())
        return _TensorPlaceholder(value)

    def insert_tensor(value: Any) -> Any:
        if not isinstance(value, _TensorPlaceholder):
            return value
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return tensors[-1]

    structure = broadcast_object(tree_map(extract_tensor, optimizer.state_dict()) if is_root else None, root_rank)
    state_dict = None if is_root else tree_map(insert_tensor, structure)
    handles = [ops.broadcast_async_(tensor, root_rank) for tensor in tensors]
    for handle in handles:
        ops.synchronize(handle)
    if state_dict is not None:
        optimizer.load_state_dict(state_dict)


class _TensorPlaceholder:
    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device.type
