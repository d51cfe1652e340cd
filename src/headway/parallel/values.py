"""Rules of functions that run on a part as on the whole: of each value alone, or of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.parallel.maps import SampleValues, SplitMap, expect_map, gather_samples, refuse

AFTER_POOLING = "Use it after the global pooling, where each rank has samples of its own."


def get_own(value: Any) -> Any:
    """Returns this rank's values of a split map, and anything else unchanged."""
    return value.own if isinstance(value, SplitMap) else value


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts tensors to the type in which autocast computes, if it is on. Gradients flow through."""
    kind = next(one for one in tensors if one is not None).device.type
    # `meta` has no autocast.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if one is None else one.to(dtype) for one in tensors)


def apply_to_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Each value alone, or together with those of the same place in other parts of the same maps."""
    for one in (*args, *kwargs.values()):
        # Random numbers of samples, as stochastic depth draws them, would differ in the parts of an image.
        if isinstance(one, Tensor) and one.dim() == 4 and len(one) > 1:
            raise refuse(
                f"{describe_function(func)} of a split map and a tensor with samples of its own", AFTER_POOLING
            )
    args = tuple(map(_spread_gate, args))
    given = (*args, *kwargs.values())
    parts = [one.part for one in given if isinstance(one, SplitMap)]
    if any(part != parts[0] for part in parts):
        raise UsageError(f"{describe_function(func)} joins parts of different maps")
    for one in given:
        if isinstance(one, Tensor) and any(size > 1 for size in one.shape[-2:]):
            # Weights [C, 1, 1] and scalars are the same everywhere.
            raise refuse(f"{describe_function(func)} of a split map and a tensor with rows and columns of its own")
    out = func(*map(get_own, args), **{name: get_own(one) for name, one in kwargs.items()})
    return SplitMap(out, parts[0]) if isinstance(out, Tensor) else out


def _spread_gate(value: Any) -> Any:
    """Returns the gates of all samples of the place, where `value` has a gate for each channel of this rank's samples.

    Squeeze-and-excitation multiplies maps by such gates.
    """
    if not isinstance(value, SampleValues):
        return value
    if value.own.dim() != 4 or value.own.shape[-2:] != (1, 1):
        raise refuse("a split map together with values of samples that are no [samples, channels, 1, 1],")
    return gather_samples(value)


def apply_to_channels(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Mixes channels alone."""
    x = expect_map(input, describe_function(func))
    return SplitMap(func(x.own, *args, **kwargs), x.part)


def divide_channels(func: Any, input: Any, number: Any, dim: int = 0) -> Any:
    x = expect_map(input, describe_function(func))
    if dim % 4 != 1:
        raise refuse(f"{describe_function(func)} of samples, rows or columns")
    return tuple(SplitMap(one, x.part) for one in func(x.own, number, dim))


def join_channels(func: Any, tensors: Sequence[Any], dim: int = 0) -> SplitMap:
    parts = {one.part.lengths if isinstance(one, SplitMap) else None for one in tensors}
    if dim % 4 != 1 or len(parts) > 1:
        raise refuse("joining parts along samples, rows or columns, or with whole maps")
    return SplitMap(torch.cat([one.own for one in tensors], dim), tensors[0].part)


def drop(func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> SplitMap:
    x = expect_map(input, describe_function(func))
    if training and p > 0:
        what = f"{describe_function(func)}, whose random values would differ from those of one process,"
        raise refuse(what, AFTER_POOLING)
    return x


def index(func: Any, input: Any, key: Any) -> SplitMap:
    x = expect_map(input, "indexing")
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) > 2 or keys[0] != slice(None) or not all(isinstance(one, slice) for one in keys):
        raise refuse("an index of samples, rows or columns")
    return SplitMap(x.own[keys], x.part)


def get_shape(func: Any, x: SplitMap, *_: Any) -> torch.Size:
    """Returns the shape of the whole maps: that is what a network computes with."""
    return torch.Size((*x.own.shape[:2], *x.part.lengths))


def get_length(func: Any, x: SplitMap) -> int:
    """Samples are not split."""
    return len(x.own)


def get_size(func: Any, x: SplitMap, dim: int | None = None) -> Any:
    shape = get_shape(func, x)
    return shape if dim is None else shape[dim]


def ask(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what is the same for a part and the whole: dtype, device, number of dimensions."""
    return func(*map(get_own, args), **kwargs)


def describe_function(func: Any) -> str:
    """Returns the name by which a reader knows a function: `torch.cumsum`, `Tensor.view`."""
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))
    owner = getattr(func, "__module__", None) or ""
    if name.startswith(("TensorBase.", "Tensor.", "_TensorBase.")):
        return f"Tensor.{name.rpartition('.')[2]}"
    short = name.rpartition(".")[2]
    if short == "__get__":
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
    return f"{owner.replace('torch._C._nn', 'torch.nn.functional')}.{short}" if owner else short
