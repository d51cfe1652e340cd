"""Rules of functions that change the size of maps: interpolation, pooling to a size, and the end of the maps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.rows import Range, make_pair
from headway.parallel.fetch import exchange, fetch_rows
from headway.parallel.maps import SampleValues, SplitMap, expect_map, refuse, to_samples


def interpolate(
    func: Any,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> SplitMap:
    x = expect_map(input, "interpolate")
    if mode not in ("nearest", "nearest-exact", "bilinear") or antialias:
        raise refuse(f"interpolation of mode {mode}{' with antialiasing' if antialias else ''}")
    place, lengths, own = x.part.place, x.part.lengths, x.own
    factors = None if scale_factor is None else [float(one) for one in _pair_of_numbers(scale_factor)]
    if size is not None:
        outputs = make_pair(size)
    else:
        assert factors is not None
        outputs = (math.floor(lengths[0] * factors[0]), math.floor(lengths[1] * factors[1]))
    part = x.part.resize(*outputs)
    for dimension in (0, 1):
        length, out = lengths[dimension], outputs[dimension]
        # A given factor counts as it is, not as the sizes would give it.
        factor = None if factors is None or recompute_scale_factor else factors[dimension]
        owned, line = place.divide(length, dimension), place.lines[dimension]
        sources = [_find_sources(one, length, out, factor, mode, align_corners) for one in place.divide(out, dimension)]
        needed = [Range(int(low[0]), int(high[-1]) + 1) if len(low) else Range(0, 0) for low, high, _ in sources]
        own = fetch_rows(own, 2 + dimension, owned, needed, line)
        low, high, weight = sources[line.rank]
        if not len(low):
            own = own.narrow(2 + dimension, 0, 0)
            continue
        first = needed[line.rank].start
        below = own.index_select(2 + dimension, (low - first).to(own.device))
        if mode == "bilinear":
            above = own.index_select(2 + dimension, (high - first).to(own.device))
            shape = (-1, 1) if dimension == 0 else (-1,)
            below = below + (above - below) * weight.to(own).view(shape)
        own = below
    return SplitMap(own, part)


def _pair_of_numbers(value: Any) -> tuple[float, float]:
    return (value, value) if isinstance(value, int | float) else (value[0], value[-1])


def _find_sources(
    outputs: Range, length: int, out: int, factor: float | None, mode: str, align_corners: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the row below and above each output's place, and the weight of the row above."""
    rows = torch.arange(*outputs, dtype=torch.float64)
    if mode != "bilinear":
        # torch rounds places to fp32, and differently in each of its functions: so it is asked for rows of such maps.
        numbers = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1)
        size, factors = ((out, 1), None) if factor is None else (None, (factor, 1.0))
        low = F.interpolate(numbers, size, factors, mode).flatten()[slice(*outputs)].long()
        return low, low, torch.zeros_like(rows)
    if align_corners:
        place = rows * ((length - 1) / (out - 1) if out > 1 else 0.0)
    else:
        scale = length / out if factor is None else 1 / factor
        place = ((rows + 0.5) * scale - 0.5).clamp(min=0)
    low = place.floor().long().clamp(max=length - 1)
    return low, (low + 1).clamp(max=length - 1), place - low


def pool_adaptively(func: Any, input: Any, output_size: Any) -> SampleValues:
    x = expect_map(input, "adaptive_avg_pool2d")
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    if tuple(sizes) == (1, 1):
        return _average(x, keep=True)
    return SampleValues(F.adaptive_avg_pool2d(to_samples(x), output_size), x.part)


def pool_maximum_adaptively(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> SampleValues:
    if return_indices:
        raise refuse("adaptive_max_pool2d with return_indices")
    x = expect_map(input, "adaptive_max_pool2d")
    return SampleValues(F.adaptive_max_pool2d(to_samples(x), output_size), x.part)


def average(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> SampleValues:
    x = expect_map(input, "mean")
    dims = sorted(one % 4 for one in ((dim,) if isinstance(dim, int) else tuple(dim or ())))
    if dims != [2, 3] or options:
        raise refuse("a mean over other dimensions than rows and columns")
    return _average(x, keep=keepdim)


def _average(x: SplitMap, keep: bool) -> SampleValues:
    """Averages over the map, for this rank's samples: each rank sends its sums of a sample to the sample's rank."""
    part, own = x.part, x.own
    sums = own.sum((2, 3)) / (part.lengths[0] * part.lengths[1])
    group = part.place.ranks
    mine, size = part.samples[group.rank], group.size
    sent = [(slice(None), slice(*one)) for one in part.samples]
    got = [(slice(rank, rank + 1),) for rank in range(size)]
    parts = exchange(sums[None], sent, (size, mine.length, own.shape[1]), got, group)
    mean = parts.sum(0)
    return SampleValues(mean[:, :, None, None] if keep else mean, part)


def flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> SampleValues:
    x = expect_map(input, "flatten")
    if start_dim % 4 == 0:
        raise refuse("flattening samples into one another")
    return SampleValues(to_samples(x).flatten(start_dim, end_dim), x.part)
