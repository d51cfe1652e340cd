"""Checks a saved optimizer state against the shapes and types that the optimizer needs.

PyTorch's fused kernels and the native core treat parameter and state as flat memory of one length. With a state of
another shape or type they would read and write beyond its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from headway.optim.fused_optimizer import SCALAR, FusedOptimizer


class _StateForm(NamedTuple):
    """Shape of one state, and the types that it may have."""

    shape: torch.Size
    types: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return describe_tensor(self.shape, self.types[0])


_COUNTS = (torch.float32, torch.float64)


def find_state_fault(optimizer: Optimizer, parameter: Tensor, saved: Mapping[str, Tensor]) -> str:
    """Describes the first fault in the saved state of one parameter, or returns an empty string.

    The states of an optimizer that Headway does not know are compared with those that it has already.
    """
    # Which states there are depends on the options of the parameter's group.
    group = next(one for one in optimizer.param_groups if any(mine is parameter for mine in one["params"]))
    # An optimizer that Headway does not know is described by the states that it has now.
    present = {name: value for name, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
    known = _list_known_states(optimizer, parameter, group)
    wanted = (
        known if known is not None else {name: _StateForm(one.shape, (one.dtype,)) for name, one in present.items()}
    )
    for name, value in saved.items():
        if name not in wanted:
            if known is None:
                continue
            return f"{name!r} is not a state of {type(optimizer).__name__}"
        if value.shape != wanted[name].shape or value.dtype not in wanted[name].types:
            return f"{name!r} is {describe_tensor(value.shape, value.dtype)}, and should be {wanted[name]}"
    # A parameter that was never trained has no state at all. A partial state is an error.
    if (saved or present) and (lacking := sorted((known or present).keys() - saved.keys())):
        return f"{lacking[0]!r} is missing"
    return ""


def _list_known_states(
    optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, _StateForm] | None:
    same = _StateForm(parameter.shape, (parameter.dtype,))
    if type(optimizer) is SGD:
        return {"momentum_buffer": same} if group["momentum"] else {}
    # AdamW is a subclass of Adam.
    if isinstance(optimizer, Adam):
        found = {"step": _StateForm(SCALAR, _COUNTS), "exp_avg": same, "exp_avg_sq": same}
        return found | ({"max_exp_avg_sq": same} if group["amsgrad"] else {})
    if isinstance(optimizer, FusedOptimizer):
        return {
            name: _StateForm(SCALAR if number else parameter.shape, (kind,))
            for name, (number, kind) in optimizer.list_states(parameter, group).items()
        }
    return None


def describe_tensor(shape: torch.Size, kind: torch.dtype) -> str:
    """Names a shape and a type in a sentence: `64x3x7x7 of float32`."""
    form = "x".join(map(str, shape)) or "a number"
    return f"{form} of {str(kind).removeprefix('torch.')}"
