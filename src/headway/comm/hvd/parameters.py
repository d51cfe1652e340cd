"""Broadcasts the state of a network and of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway.comm.hvd import context, ops
from headway.comm.hvd.objects import broadcast_object


def broadcast_parameters(
    params: Mapping[str, Tensor] | list[Tensor] | list[tuple[str, Tensor]], root_rank: int
) -> None:
    """Broadcasts one rank's tensors to all ranks, in place.

    Args:
        params: `model.state_dict()`, or a list of `model.named_parameters()` or `model.parameters()`.

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
        plain = tensor.detach()
        # Channels-last weights are not contiguous.
        buffer = plain.contiguous()
        handles.append((ops.broadcast_async_(buffer, root_rank, name), plain, buffer))
    for handle, plain, buffer in handles:
        ops.synchronize(handle)
        if buffer is not plain:
            plain.copy_(buffer)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Broadcasts one rank's optimizer state: tensors, numbers, and the options of its parameter groups.

    It takes no step to create missing state: state that the root lacks is dropped on the others.

    Args:
        model: not used; part of Horovod's signature.

    Raises:
        ValueError: the optimizer is LBFGS, whose state has no fixed form.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast; use another optimizer")
    # First the structure, pickled; then the tensors, each as a broadcast of its own.
    tensors: list[Tensor] = []
    is_root = context.rank() == root_rank
    shape = broadcast_object(_extract_tensors(optimizer.state_dict(), tensors) if is_root else None, root_rank)
    if not is_root:
        state = _insert_tensors(shape, tensors)
    handles = [ops.broadcast_async_(tensor, root_rank) for tensor in tensors]
    for handle in handles:
        ops.synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(state)


class _TensorPlaceholder:
    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device.type


def _extract_tensors(value: Any, tensors: list[Tensor]) -> Any:
    # The value with placeholders for its tensors, which are appended to the list.
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return _TensorPlaceholder(value)
    if isinstance(value, Mapping):
        return {key: _extract_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_extract_tensors(entry, tensors) for entry in value)
    return value


def _insert_tensors(value: Any, tensors: list[Tensor]) -> Any:
    # The value with new tensors for its placeholders, which are appended to the list in the same order.
    if isinstance(value, _TensorPlaceholder):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _insert_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_insert_tensors(entry, tensors) for entry in value)
    return value
