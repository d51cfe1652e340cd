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

from headway.optim import eager_optimizer
from headway.optim.fused_optimizer import SCALAR_SHAPE, FusedOptimizer


class _StateForm(NamedTuple):
    """Shape of one state, and the types that it may have, of which the first is the usual one."""

    shape: torch.Size
    types: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return describe_tensor(self.shape, self.types[0])


# A subclass of the user's may have other states.
_SGD_CLASSES = (SGD, eager_optimizer.SGD)
_COUNT_TYPES = (torch.float32, torch.float64)


def find_state_fault(optimizer: Optimizer, parameter: Tensor, saved: Mapping[str, Tensor]) -> str:
    """Returns a description of the first fault in the saved state of one parameter; empty if there is none.

    The states of an optimizer that Headway does not know are compared with those that it has already.
    """
    # Which states there are depends on the options of the parameter's group.
    group = next(
        group
        for group in optimizer.param_groups
        if any(group_parameter is parameter for group_parameter in group["params"])
    )
    # An optimizer that Headway does not know is described by the states that it has now.
    current_states = {
        name: value for name, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)
    }
    known_forms = _list_known_states(optimizer, parameter, group)
    forms = (
        known_forms
        if known_forms is not None
        else {name: _StateForm(state.shape, (state.dtype,)) for name, state in current_states.items()}
    )
    for name, value in saved.items():
        if name not in forms:
            if known_forms is None:
                continue
            return f"{name!r} is not a state of {type(optimizer).__name__}"
        if value.shape != forms[name].shape or value.dtype not in forms[name].types:
            return f"{name!r} is {describe_tensor(value.shape, value.dtype)}, and should be {forms[name]}"
    # A parameter that was never trained has no state at all. A partial state is an error.
    if (saved or current_states) and (missing := sorted((known_forms or current_states).keys() - saved.keys())):
        return f"{missing[0]!r} is missing"
    return ""


def knows_states(optimizer: Optimizer) -> bool:
    """Tells whether Headway knows the states of an optimizer: SGD, Adam and AdamW of torch, and its own ones."""
    return type(optimizer) in _SGD_CLASSES or isinstance(optimizer, Adam | FusedOptimizer)


def _list_known_states(
    optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, _StateForm] | None:
    parameter_form = _StateForm(parameter.shape, (parameter.dtype,))
    if type(optimizer) in _SGD_CLASSES:
        return {"momentum_buffer": parameter_form} if group["momentum"] else {}
    # AdamW is a subclass of Adam.
    if isinstance(optimizer, Adam):
        forms = {
            "step": _StateForm(SCALAR_SHAPE, _COUNT_TYPES),
            "exp_avg": parameter_form,
            "exp_avg_sq": parameter_form,
        }
        return forms | ({"max_exp_avg_sq": parameter_form} if group["amsgrad"] else {})
    if isinstance(optimizer, FusedOptimizer):
        return {
            name: _StateForm(shape, (dtype,))
            for name, (shape, dtype) in optimizer.list_states(parameter, group).items()
        }
    return None


def describe_tensor(shape: torch.Size, dtype: torch.dtype) -> str:
    """Returns a shape and a type for a sentence: `64x3x7x7 of float32`."""
    shape_text = "x".join(map(str, shape)) or "a number"
    return f"{shape_text} of {str(dtype).removeprefix('torch.')}"
