"""The native core (native/headway.h) as optimizers see it: the only file of this room that knows ctypes.

Threads are those of torch: the core is given GOMP_parallel of the very OpenMP that torch's own loops run on. Threads of
its own would share cores with torch's, which spin for milliseconds after every loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from headway.core import native
from headway.core.errors import UsageError

TYPES = {torch.float32: 0, torch.float64: 1}
"""Of the tensors that the core takes: HW_FP32, HW_FP64."""


@final
class Number(IntEnum):
    """HW_LARS and so on."""

    LARS = 0
    LAMB = 1
    NOVOGRAD = 2
    SIGNUM = 3
    FTML = 4
    TRANSITION = 5
    LBSGD = 6


OPTIONS = {
    Number.LARS: 7,
    Number.LAMB: 4,
    Number.NOVOGRAD: 5,
    Number.SIGNUM: 3,
    Number.FTML: 4,
    Number.TRANSITION: 7,
    Number.LBSGD: 6,
}
"""How many numbers the core reads of `options`, by rule."""


@final
class _Step(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("size", "rule", "type", "threads")),
        ("n", c_int64),
        *((name, c_void_p) for name in ("weight", "grad", "first", "second", "count", "norm", "elements", "adapt")),
        *((name, c_void_p) for name in ("options", "lr", "grad_scale", "found_inf", "team")),
    ]


_LOSS = "LARS, LAMB and their like take several times as long on a CPU"


@cache
def _library() -> ctypes.CDLL | None:
    """Loads it at first use."""
    return native.load_library({"hw_optimize": (c_int32, [ctypes.POINTER(_Step)])}, loss=_LOSS)


def available() -> bool:
    """Whether the native core can be used here. The first call says so in the log where it cannot."""
    return _library() is not None


@cache
def _team() -> int | None:
    """The address of GOMP_parallel among the libraries that torch was linked with; None where it has another OpenMP."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


def step(
    rule: Number,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    first: Sequence[Tensor] | None,
    second: Sequence[Tensor] | None,
    count: Sequence[Tensor] | None,
    norm: Sequence[Tensor] | None,
    adapt: Sequence[bool] | None,
    options: Sequence[float],
    lr: float | Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step of `hw_optimize` over dense tensors on the CPU, of one type out of TYPES, each parameter's alike in
    memory; see native/headway.h.

    Raises UsageError: a tensor is not so, and its memory would be read or written beyond its end.
    """
    library = _library()
    assert library is not None
    n, kind = len(weights), weights[0].dtype
    rate = lr.double() if isinstance(lr, Tensor) else None
    scalars = [None if one is None else one.float() for one in (grad_scale, found_inf)]
    for name, one in (("lr", rate), ("grad_scale", scalars[0]), ("found_inf", scalars[1])):
        if one is not None and (one.numel() != 1 or not one.is_cpu):
            raise _refusal(f"{name} is of shape {tuple(one.shape)} on {one.device}, not one number on the CPU")
    if len(options) != OPTIONS[rule] or (adapt is not None and len(adapt) != n) or kind not in TYPES:
        raise _refusal(f"{rule.name} is given {len(options)} options and {n} parameters of {kind}")
    for weight in weights:
        # No gaps and no overlaps: the last element lies `numel` elements from the first.
        last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
        if weight.numel() and last + 1 != weight.numel():
            raise _refusal("a parameter is not dense in memory")

    def addresses(tensors: Sequence[Tensor] | None, *, numbers: torch.dtype | None) -> ctypes.Array[c_uint64] | None:
        """`numbers`: the type of one number for each parameter; None: they are as the parameters."""
        if tensors is None:
            return None
        if len(tensors) != n:
            raise _refusal(f"{len(tensors)} tensors are given for {n} parameters")
        for tensor, weight in zip(tensors, weights, strict=True):
            fits = (
                tensor.dtype == kind and tensor.shape == weight.shape and tensor.stride() == weight.stride()
                if numbers is None
                else tensor.dtype == numbers and tensor.numel() == 1
            )
            if not fits or not tensor.is_cpu:
                what = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device} does not fit"
                raise _refusal(f"{what} a parameter of shape {tuple(weight.shape)} and {kind}")
        return (c_uint64 * n)(*[tensor.data_ptr() for tensor in tensors])

    arrays = [addresses(tensors, numbers=None) for tensors in (weights, grads, first, second)]
    arrays += [addresses(count, numbers=torch.float32), addresses(norm, numbers=kind)]
    elements = (c_int64 * n)(*[weight.numel() for weight in weights])
    adapting = None if adapt is None else (c_uint8 * n)(*adapt)
    numbers = (c_double * len(options))(*options)
    plain = c_double(0.0 if isinstance(lr, Tensor) else lr)
    asked = _Step(
        ctypes.sizeof(_Step),
        rule,
        TYPES[kind],
        torch.get_num_threads(),
        n,
        *(None if array is None else ctypes.addressof(array) for array in (*arrays, elements, adapting, numbers)),
        ctypes.addressof(plain) if rate is None else rate.data_ptr(),
        *(None if one is None else one.data_ptr() for one in scalars),
        _team(),
    )
    if library.hw_optimize(asked):
        raise _refusal(f"{rule.name}, {n} parameters")


def _refusal(why: str) -> UsageError:
    return UsageError(f"the native core cannot do this step ({why})", fix="Set fused=False.")
