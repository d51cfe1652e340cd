"""Rules of norms: their statistics are those of the whole maps, over all ranks of the place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.comm.batch_norm import HALF_DTYPES, normalise_batch, update_running_statistics
from headway.core.group import Group
from headway.parallel.maps import SampleValues, SplitMap, expect_map, refuse


def normalise_batches(
    func: Any,
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SplitMap | SampleValues:
    """Also of samples: without their place's statistics they would be normalised as in a smaller batch."""
    x = input if isinstance(input, SampleValues) else expect_map(input, "batch_norm")
    own, part = x.own, x.part
    if not training:
        return replace(x, own=F.batch_norm(own, running_mean, running_var, weight, bias, False, momentum, eps))
    out, mean, var, count = normalise_batch(own, weight, bias, eps, part.place.ranks)
    if running_mean is not None and running_var is not None:
        update_running_statistics(running_mean, running_var, mean, var, count, momentum)
    return replace(x, own=out)


class _SumOverRanks(torch.autograd.Function):
    """Sums over the ranks; each rank's gradient is the sum of all, since all of them use the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(out.view(-1)).wait("statistics")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(out.view(-1)).wait("statistics")
        return out, None


def _sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    out: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _standardise(x: Tensor, count: int, eps: float, group: Group) -> Tensor:
    """Standardises each row of [rows, values], of which other ranks hold further values: `count` in all."""
    # As autocast does: sums of 16-bit numbers would lose too much.
    x = x.float() if x.dtype in HALF_DTYPES else x
    mean = _sum_over_ranks(x.sum(1), group)[:, None] / count
    far = x - mean
    # A second pass over the values: sums of squares alone would cancel.
    var = _sum_over_ranks(far.square().sum(1), group)[:, None] / count
    return far * (var + eps).rsqrt()


def normalise_groups(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> SplitMap:
    x = expect_map(input, "group_norm")
    own, part = x.own, x.part
    count = own.shape[1] // num_groups * part.lengths[0] * part.lengths[1]
    out = _standardise(own.reshape(len(own) * num_groups, -1), count, eps, part.place.ranks).view(own.shape)
    return SplitMap(_scale(out, weight, bias), part)


def normalise_instances(
    func: Any,
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SplitMap:
    if running_mean is not None or not use_input_stats:
        raise refuse("instance_norm with running statistics")
    return normalise_groups(func, input, expect_map(input, "instance_norm").own.shape[1], weight, bias, eps)


def normalise_layers(
    func: Any,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> SplitMap:
    x = expect_map(input, "layer_norm")
    own, part = x.own, x.part
    shape = tuple(normalized_shape)
    if shape not in (part.lengths, (own.shape[1], *part.lengths)):
        raise refuse("a layer_norm over other dimensions than the map, with or without its channels")
    values = math.prod(shape)
    leading = len(own) if len(shape) == 3 else len(own) * own.shape[1]
    out = _standardise(own.reshape(leading, -1), values, eps, part.place.ranks).view(own.shape)
    rows, columns = part.get_own(0), part.get_own(1)
    cut = (..., slice(*rows), slice(*columns))
    out = out if weight is None else out * weight[cut]
    return SplitMap(out if bias is None else out + bias[cut], part)


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight.view(1, -1, 1, 1)
    return x if bias is None else x + bias.view(1, -1, 1, 1)
