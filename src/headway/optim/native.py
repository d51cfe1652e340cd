"""Calls the native core (native/headway.h) for optimizer steps; the only file of this room that uses ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from headway.core import native
from headway.core.errors import UsageError
from headway.optim.update_rule import NativeRule

NATIVE_TYPE_BY_DTYPE = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Numbers of the types that the core supports: HW_FP32, HW_FP64, HW_BF16; the last one with keys only."""


NUM_OPTIONS_BY_RULE = {
    NativeRule.LARS: 7,
    NativeRule.LAMB: 4,
    NativeRule.NOVOGRAD: 5,
    NativeRule.SIGNUM: 3,
    NativeRule.FTML: 4,
    NativeRule.RMSPROP_SGD: 7,
    NativeRule.LBSGD: 6,
}
"""Length of `options` by rule."""


@final
@dataclass(frozen=True, kw_only=True)
class NativeTensors:
    """The tensors of one step: each list has one entry for each parameter.

    Attributes:
        weights: the parameters, of one type out of NATIVE_TYPE_BY_DTYPE; changed in place.
        grads: their gradients, of the same type.
        keys: 64-bit keys of the random bits of stochastic rounding; `first` and `second` are then bfloat16. None:
            nothing is rounded.
        first: first states, with the parameter's shape, changed in place; None: the rule has none.
        second: second states, likewise.
        count: numbers of steps, float32 scalars, changed in place; None: the rule has none.
        norm: states that are scalars, changed in place; None: the rule has none.
        adapt: True if the parameter has a trust ratio; None: all or none have, as the rule says.
    """

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    keys: Sequence[int] | None = None
    first: Sequence[Tensor] | None = None
    second: Sequence[Tensor] | None = None
    count: Sequence[Tensor] | None = None
    norm: Sequence[Tensor] | None = None
    adapt: Sequence[bool] | None = None


@final
class _NativeStep(ctypes.Structure):
    # The layout of `hw_step` in native/headway.h; `size` lets the core refuse a caller with another layout.
    _fields_ = [
        *((name, c_uint32) for name in ("size", "rule", "type", "threads")),
        ("n", c_int64),
        *((name, c_void_p) for name in ("weight", "grad", "first", "second", "count", "norm", "elements", "adapt")),
        *((name, c_void_p) for name in ("options", "lr", "grad_scale", "found_inf", "team", "key")),
    ]


# Printed once, if the library is missing.
_MISSING_LIBRARY_LOSS = "LARS, LAMB and their like take several times as long on a CPU"


@cache
def _load_library() -> ctypes.CDLL | None:
    """Returns the core, which the first call loads; None if it is not built."""
    return native.load_library({"hw_optimize": (c_int32, [ctypes.POINTER(_NativeStep)])}, loss=_MISSING_LIBRARY_LOSS)


def is_available() -> bool:
    """Returns True if the native core can be used here. The first call logs a warning if it cannot."""
    return _load_library() is not None


def step_native(
    rule: NativeRule,
    tensors: NativeTensors,
    *,
    options: Sequence[float],
    lr: float | Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Calls `hw_optimize` for one step over dense tensors on the CPU, which are changed in place; see native/headway.h.

    Args:
        rule: the update rule.
        tensors: parameters, gradients and states.
        options: the numbers that the rule needs, NUM_OPTIONS_BY_RULE of them.
        lr: learning rate; a tensor is read.
        grad_scale: loss scale by which the gradients are divided; None: 1.
        found_inf: nonzero if the step is to be skipped; None: it is not.

    Raises:
        UsageError: a tensor has another type, shape, memory format or device than the core expects.
    """
    # The order of the fields in `hw_step` is that of the arguments below.
    library = _load_library()
    assert library is not None
    weights, adapt = tensors.weights, tensors.adapt
    n = len(weights)
    dtype = weights[0].dtype
    # Scalars may be tensors: the core reads them through pointers.
    lr_tensor = lr.double() if isinstance(lr, Tensor) else None
    scalars = [None if tensor is None else tensor.float() for tensor in (grad_scale, found_inf)]
    # The core walks flat memory: with a wrong shape or type it would read and write beyond the end of a tensor.
    for name, tensor in (("lr", lr_tensor), ("grad_scale", scalars[0]), ("found_inf", scalars[1])):
        if tensor is not None and (tensor.numel() != 1 or not tensor.is_cpu):
            raise _build_error(
                f"{name} is of shape {tuple(tensor.shape)} on {tensor.device}, not one number on the CPU"
            )
    # The core trusts these lengths.
    if (
        len(options) != NUM_OPTIONS_BY_RULE[rule]
        or any(values is not None and len(values) != n for values in (adapt, tensors.keys))
        or dtype not in NATIVE_TYPE_BY_DTYPE
    ):
        raise _build_error(f"{rule.name} is given {len(options)} options and {n} parameters of {dtype}")
    for weight in weights:
        # Without gaps and overlaps, the last element lies `numel` elements from the first.
        last_offset = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
        if weight.numel() and last_offset + 1 != weight.numel():
            raise _build_error("a parameter is not dense in memory")
    state_dtype = dtype if tensors.keys is None else torch.bfloat16
    arrays = [_list_pointers(tensor, weights, dtype) for tensor in (weights, tensors.grads)]
    arrays += [_list_pointers(tensor, weights, state_dtype) for tensor in (tensors.first, tensors.second)]
    arrays += [_list_pointers(tensors.count, weights, torch.float32, is_scalar=True)]
    arrays += [_list_pointers(tensors.norm, weights, torch.promote_types(dtype, torch.float32), is_scalar=True)]
    num_elements = (c_int64 * n)(*[weight.numel() for weight in weights])
    # These arrays must live until the call returns, as the structure only holds pointers to them.
    adapt_array = None if adapt is None else (c_uint8 * n)(*adapt)
    key_array = None if tensors.keys is None else (c_uint64 * n)(*tensors.keys)
    options_array = (c_double * len(options))(*options)
    lr_value = c_double(0.0 if isinstance(lr, Tensor) else lr)
    request = _NativeStep(
        ctypes.sizeof(_NativeStep),
        rule,
        NATIVE_TYPE_BY_DTYPE[dtype],
        torch.get_num_threads(),
        n,
        *(
            None if array is None else ctypes.addressof(array)
            for array in (*arrays, num_elements, adapt_array, options_array)
        ),
        ctypes.addressof(lr_value) if lr_tensor is None else lr_tensor.data_ptr(),
        *(None if tensor is None else tensor.data_ptr() for tensor in scalars),
        native.find_gomp(),
        None if key_array is None else ctypes.addressof(key_array),
    )
    if library.hw_optimize(request):
        raise _build_error(f"{rule.name}, {n} parameters")


def _list_pointers(
    tensors: Sequence[Tensor] | None, weights: Sequence[Tensor], dtype: torch.dtype, *, is_scalar: bool = False
) -> ctypes.Array[c_uint64] | None:
    """Returns the pointers to tensors, or None if there are none.

    Args:
        dtype: their type.
        is_scalar: each tensor is one number, and has not the shape and strides of its parameter.

    Raises:
        UsageError: a tensor has another shape, type, memory format or device.
    """
    if tensors is None:
        return None
    if len(tensors) != len(weights):
        raise _build_error(f"{len(tensors)} tensors are given for {len(weights)} parameters")
    for tensor, weight in zip(tensors, weights, strict=True):
        # Equal strides: element i of state and gradient belongs to element i of the weight.
        same_layout = tensor.shape == weight.shape and tensor.stride() == weight.stride()
        fits = tensor.numel() == 1 if is_scalar else same_layout
        if not fits or tensor.dtype != dtype or not tensor.is_cpu:
            what = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device} does not fit"
            raise _build_error(f"{what} a parameter of shape {tuple(weight.shape)} and {weights[0].dtype}")
    return (c_uint64 * len(weights))(*[tensor.data_ptr() for tensor in tensors])


def _build_error(reason: str) -> UsageError:
    return UsageError(f"the native core cannot do this step ({reason})", fix="Set fused=False.")
