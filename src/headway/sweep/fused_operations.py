"""Operations of a FusedNetwork: each function of torch that a network calls, computed for all members."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.sweep.fused_activations import Activations, CannotFuseError, Run

# One function for each kind of operation. Each takes the pass, torch's function, and its arguments.


def _convolve(
    run: Run,
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Activations:
    weights, biases = run.find(weight), run.find(bias)
    if isinstance(input, Activations) or groups != 1:
        input, groups = run.spread(input), groups * run.members
    if input.ndim != weight.ndim:
        raise CannotFuseError("their networks convolve single images")
    # Of shared input it is an ordinary convolution, whose outputs are those of all members.
    return run.build(func(input, weights, biases, stride, padding, dilation, groups), is_fresh=True)


def _multiply_weights(run: Run, func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Activations:
    weights, biases, members, outputs = run.find(weight), run.find(bias), run.members, weight.shape[0]
    if isinstance(input, Tensor):
        if input.ndim != 2:
            raise CannotFuseError("their networks have linear layers on more than rows of features")
        return run.build(F.linear(input, weights, biases), is_fresh=True)
    if input.ndim != 2:
        raise CannotFuseError("their networks have linear layers on more than rows of features")
    data = input.data
    weights = weights.unflatten(0, (members, outputs))
    if input.layout == "flat" and data.ndim == 4 and data.is_contiguous(memory_format=torch.channels_last):
        # Weights in the order of the activations' memory: they are smaller, so they are what is copied.
        n, channels, height, width = data.shape
        pixels = data.permute(0, 2, 3, 1).reshape(n, height * width, members, channels // members)
        rows = pixels.permute(2, 0, 1, 3).flatten(2)
        places = weights.unflatten(2, (channels // members, height * width))
        columns = places.permute(0, 3, 2, 1).flatten(1, 2)
    else:
        rows, columns = input.to_members(), weights.transpose(1, 2)
    if biases is None:
        found = torch.bmm(rows, columns)
    else:
        found = torch.baddbmm(biases.view(members, 1, outputs), rows, columns)
    return run.build(found, "members", is_fresh=True)


def _normalise(
    run: Run,
    func: Any,
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Activations:
    mean, variance, scale, shift = (run.find(one) for one in (running_mean, running_var, weight, bias))
    return run.build(
        F.batch_norm(run.spread(input), mean, variance, scale, shift, training, momentum, eps), is_fresh=True
    )


def _count(run: Run, func: Any, counter: Any, amount: Any) -> Tensor:
    """Counts the batches of batch norm, which each member has by itself."""
    stack = run.stacks.get(id(counter))
    if stack is None or stack.together is not None or not isinstance(amount, int):
        raise CannotFuseError("their networks change tensors in place")
    torch._foreach_add_(list(stack.own), amount)
    return stack.own[0]


def _rectify(run: Run, func: Any, input: Activations, inplace: bool = False) -> Activations:
    if inplace or run.may_overwrite(input):
        input.is_overwritten = not inplace
        return run.build(torch.relu_(input.data), input.layout)
    return run.build(torch.relu(input.data), input.layout)


def _apply(run: Run, func: Any, input: Activations, *args: Any, **kwargs: Any) -> Activations:
    """Applies a function to each number."""
    return run.build(func(input.data, *args, **kwargs), input.layout)


def _pool(run: Run, func: Any, input: Activations, *args: Any, **kwargs: Any) -> Activations:
    if input.layout != "channels" or input.ndim < 3 or kwargs.get("return_indices"):
        raise CannotFuseError("their networks pool in an unusual way")
    return run.build(func(input.data, *args, **kwargs))


def _average(run: Run, func: Any, input: Activations, dim: Any, keepdim: bool = False) -> Activations:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if input.layout != "channels" or any(one % input.ndim < 2 for one in dims):
        raise CannotFuseError("their networks average over channels")
    return run.build(input.data.mean(dims, keepdim))


def _flatten(run: Run, func: Any, input: Activations, start_dim: int = 0, end_dim: int = -1) -> Activations:
    if start_dim != 1 or end_dim % input.ndim != input.ndim - 1:
        raise CannotFuseError("their networks flatten the samples of a batch together")
    if input.layout != "channels" or input.ndim == 2:
        return run.build(input.data, input.layout, is_fresh=input.is_fresh)
    return run.build(input.data, "flat", is_fresh=input.is_fresh)


def _reshape(run: Run, func: Any, input: Activations, *shape: Any) -> Activations:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    n, features = input.shape[0], math.prod(input.shape[1:])
    if sizes not in ((n, -1), (n, features), (-1, features)):
        raise CannotFuseError("their networks reshape activations")
    return _flatten(run, func, input, 1)


def _slice(run: Run, func: Any, input: Activations, index: Any) -> Activations:
    whole = slice(None)
    is_of_sides = isinstance(index, tuple) and index[:2] == (whole, whole) and input.layout == "channels"
    if not is_of_sides or not all(isinstance(one, slice) for one in index):
        raise CannotFuseError("their networks select samples or channels")
    return run.build(input.data[index])


def _pad(run: Run, func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Activations:
    data, pad = run.spread(input), tuple(pad)
    sides = 2 * (data.ndim - 2)
    if len(pad) <= sides or not any(pad[sides:]):
        return run.build(F.pad(data, pad[:sides], mode, value))
    if len(pad) > sides + 2 or mode != "constant":
        raise CannotFuseError("their networks pad the samples of a batch")
    if any(pad[:sides]):
        data = F.pad(data, pad[:sides], mode, value)
    # Each member's channels get their own.
    last = data.movedim(1, -1).unflatten(-1, (run.members, -1))
    return run.build(F.pad(last, pad[sides:], mode, value).flatten(-2).movedim(-1, 1))


def _combine(run: Run, func: Any, input: Any, other: Any, **kwargs: Any) -> Activations:
    operate, numbers = COMBINE[run.names[-1]], (int, float)
    if kwargs:
        raise CannotFuseError("their networks add in an unusual way")
    if isinstance(input, Activations) and isinstance(other, numbers):
        return run.build(operate(input.data, other), input.layout)
    if isinstance(other, Activations) and isinstance(input, numbers):
        return run.build(operate(input, other.data), other.layout)
    if not all(isinstance(one, Activations) or id(one) not in run.stacks for one in (input, other)):
        raise CannotFuseError("their networks compute with weights in an unusual way")
    if tuple(input.shape) != tuple(other.shape):
        raise CannotFuseError("their networks combine activations of different shapes")
    if isinstance(input, Activations) and isinstance(other, Activations) and input.layout == other.layout:
        return run.build(operate(input.data, other.data), input.layout, is_fresh=operate is torch.add)
    return run.build(operate(run.spread(input), run.spread(other)), is_fresh=operate is torch.add)


def _drop(run: Run, func: Any, input: Activations, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p and training:
        raise CannotFuseError("their networks use dropout, whose random numbers each trial draws by itself")
    return input


COMBINE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}

_BY_NUMBER = "gelu silu tanh sigmoid leaky_relu elu hardtanh hardswish hardsigmoid softplus selu mish relu6 clamp"
_POOLS = "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d _adaptive_max_pool2d"

OPERATIONS: dict[str, Callable[..., Any]] = {
    "conv1d": _convolve,
    "conv2d": _convolve,
    "linear": _multiply_weights,
    "batch_norm": _normalise,
    "add_": _count,
    "relu": _rectify,
    "relu_": lambda run, func, input: _rectify(run, func, input, inplace=True),
    **dict.fromkeys(_BY_NUMBER.split(), _apply),
    **dict.fromkeys(_POOLS.split(), _pool),
    "mean": _average,
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "contiguous": lambda run, func, input, **kwargs: input,
    "__getitem__": _slice,
    "pad": _pad,
    **dict.fromkeys(COMBINE, _combine),
    **dict.fromkeys(("dropout", "dropout2d"), _drop),
}
"""The function of this file that computes each function of torch, by its name. A network may call no others."""
