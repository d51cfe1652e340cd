"""Rules of functions with windows: convolution, transposed convolution, pooling.

Each fetches the rows that it needs beyond its own, and pads at the border of the map only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.rows import Need, Pair, Range, TransposedWindow, Window, count_moved, make_pair
from headway.parallel.fetch import fetch_rows
from headway.parallel.maps import Part, SplitMap, expect_map, refuse
from headway.parallel.split_convolution import SplitConvolution, convolve_split
from headway.parallel.values import cast_to_autocast


def _fetch(x: SplitMap, windows: Sequence[Window]) -> tuple[Tensor, tuple[Need, Need], Part]:
    """Fetches the rows and then the columns that windows need. Returns (values, own needs, part of the output)."""
    own, rows = _fetch_along(x.own, x.part, 0, windows[0])
    own, columns = _fetch_along(own, x.part, 1, windows[1])
    return own, (rows, columns), x.part.resize(*_count_outputs(x.part, windows))


def _fetch_along(own: Tensor, part: Part, dimension: int, window: Window) -> tuple[Tensor, Need]:
    """Fetches the rows (dimension 0) or columns (1) that a window needs. Returns them, and which they are."""
    length, line = part.lengths[dimension], part.place.lines[dimension]
    outputs = part.place.divide(window.count_outputs(length), dimension)
    needs = [window.find_need(one, length) for one in outputs]
    owned = part.place.divide(length, dimension)
    return fetch_rows(own, 2 + dimension, owned, [need.rows for need in needs], line), needs[line.rank]


def _count_outputs(part: Part, windows: Sequence[Window]) -> tuple[int, int]:
    rows, columns = (window.count_outputs(length) for window, length in zip(windows, part.lengths, strict=True))
    return rows, columns


def _pad(x: Tensor, needs: tuple[Need, Need], value: float) -> Tensor:
    rows, columns = needs
    amounts = (columns.before, columns.after, rows.before, rows.after)
    return F.pad(x, amounts, value=value) if any(amounts) else x


def _make_empty(part: Part, channels: int, *inputs: Tensor | None) -> SplitMap:
    """The strip of a rank without rows: no values, but the same graph, so that it takes part in every exchange."""
    first = inputs[0]
    assert first is not None
    link = sum((one.sum() for one in inputs if one is not None), first.new_zeros(())) * 0
    shape = (len(first), channels, part.get_own(0).length, part.get_own(1).length)
    return SplitMap(first.new_zeros(shape) + link, part)


def _plan_split(x: SplitMap, windows: Sequence[Window], groups: int) -> SplitConvolution | None:
    """Plans a convolution beside its exchange of rows, or of columns if only these are split.

    If both are split, the columns are there before, padded. None: without an exchange, or with idle ranks.
    """
    place, lengths = x.part.place, x.part.lengths
    outputs = _count_outputs(x.part, windows)
    if not all(one.length for sizes in (lengths, outputs) for d in (0, 1) for one in place.divide(sizes[d], d)):
        return None
    dimension = 0 if place.grid[0] > 1 else 1
    window, other = windows[dimension], windows[1 - dimension]
    owned, made = (place.divide(sizes[dimension], dimension) for sizes in (lengths, outputs))
    if count_moved(owned, [window.find_need(one, lengths[dimension]).rows for one in made]) == 0:
        return None
    padding = 0 if min(place.grid) > 1 else other.padding
    strides = (windows[0].stride, windows[1].stride)
    dilations = (windows[0].dilation, windows[1].dilation)
    return SplitConvolution(
        2 + dimension, window, strides, dilations, groups, padding, owned, made, place.lines[dimension]
    )


def convolve(
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> SplitMap:
    x = expect_map(input, "torch.conv2d")
    kernels, strides, dilations = tuple(weight.shape[2:]), make_pair(stride), make_pair(dilation)
    own, weight, bias = cast_to_autocast(x.own, weight, bias)
    x = SplitMap(own, x.part)
    if isinstance(padding, str):
        reach = [d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        if padding == "same" and any(one % 2 for one in reach):
            raise refuse("a convolution with padding 'same' and an even kernel", "Pad by a number.")
        paddings = tuple(one // 2 if padding == "same" else 0 for one in reach)
    else:
        paddings = make_pair(padding)
    windows = [Window(*one) for one in zip(kernels, strides, paddings, dilations, strict=True)]
    if (settings := _plan_split(x, windows, groups)) is not None:
        if min(x.part.place.grid) > 1:
            own, columns = _fetch_along(own, x.part, 1, windows[1])
            own = F.pad(own, (columns.before, columns.after)) if columns.before or columns.after else own
        part = x.part.resize(*_count_outputs(x.part, windows))
        return SplitMap(convolve_split(own, weight, bias, settings), part)
    own, needs, part = _fetch(x, windows)
    if part.is_empty:
        return _make_empty(part, len(weight), own, weight, bias)
    return SplitMap(F.conv2d(_pad(own, needs, 0.0), weight, bias, strides, 0, dilations, groups), part)


def pool_maximum(
    func: Any,
    input: Any,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> SplitMap:
    x = expect_map(input, "max_pool2d")
    if return_indices:
        raise refuse("max_pool2d with return_indices")
    kernels, strides, dilations = make_pair(kernel_size), make_pair(stride or kernel_size), make_pair(dilation)
    windows = [
        Window(k, s, p, d, ceil_mode)
        for k, s, p, d in zip(kernels, strides, make_pair(padding), dilations, strict=True)
    ]
    own, needs, part = _fetch(x, windows)
    if part.is_empty:
        return _make_empty(part, own.shape[1], own)
    return SplitMap(F.max_pool2d(_pad(own, needs, -math.inf), kernels, strides, 0, dilations), part)


def pool_average(
    func: Any,
    input: Any,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> SplitMap:
    x = expect_map(input, "avg_pool2d")
    kernels, strides, paddings = make_pair(kernel_size), make_pair(stride or kernel_size), make_pair(padding)
    windows = [Window(k, s, p, 1, ceil_mode) for k, s, p in zip(kernels, strides, paddings, strict=True)]
    own, needs, part = _fetch(x, windows)
    if part.is_empty:
        return _make_empty(part, own.shape[1], own)
    sums = F.avg_pool2d(_pad(own, needs, 0.0), kernels, strides, 0, divisor_override=1)
    if divisor_override is not None:
        return SplitMap(sums / divisor_override, part)
    counts = [
        _count_values(window, part.get_own(dimension), x.part.lengths[dimension], count_include_pad)
        for dimension, window in enumerate(windows)
    ]
    rows, columns = (torch.tensor(one, dtype=sums.dtype, device=sums.device) for one in counts)
    return SplitMap(sums / (rows[:, None] * columns), part)


def _count_values(window: Window, outputs: Range, length: int, with_padding: bool) -> list[int]:
    """Counts the rows under the window of each output. What ceil_mode adds beyond the padding never counts."""
    low, high = (-window.padding, length + window.padding) if with_padding else (0, length)
    starts = [one * window.stride - window.padding for one in range(*outputs)]
    return [min(start + window.kernel, high) - max(start, low) for start in starts]


def convolve_transposed(
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> SplitMap:
    x = expect_map(input, "torch.conv_transpose2d")
    strides, dilations = make_pair(stride), make_pair(dilation)
    own, weight, bias = cast_to_autocast(x.own, weight, bias)
    kernels = tuple(weight.shape[2:])
    settings = zip(kernels, strides, make_pair(padding), make_pair(output_padding), dilations, strict=True)
    windows = [TransposedWindow(*one) for one in settings]
    place, lengths = x.part.place, x.part.lengths
    outputs = tuple(window.count_outputs(length) for window, length in zip(windows, lengths, strict=True))
    part = x.part.resize(*outputs)
    firsts = []
    for dimension, window in enumerate(windows):
        owned, line = place.divide(lengths[dimension], dimension), place.lines[dimension]
        needed = [window.find_rows(one, lengths[dimension]) for one in place.divide(outputs[dimension], dimension)]
        own = fetch_rows(own, 2 + dimension, owned, needed, line)
        firsts.append(needed[line.rank].start)
    channels = weight.shape[1] * groups
    if part.is_empty:
        return _make_empty(part, channels, own, weight, bias)
    if own.numel():
        full = F.conv_transpose2d(own, weight, None, strides, 0, 0, groups, dilations)
    else:
        # No input reaches these outputs: a kernel smaller than its stride leaves gaps.
        full = own.new_zeros(len(own), channels, 1, 1) + (own.sum() + weight.sum()) * 0
    for dimension, window in enumerate(windows):
        outs = part.get_own(dimension)
        begin = outs.start + window.padding - firsts[dimension] * window.stride
        # Outputs in the gaps between the taps get nothing: before the first input row, or after the last.
        before, after = max(0, -begin), max(0, begin + outs.length - full.shape[2 + dimension])
        if before or after:
            full = F.pad(full, (before, after, 0, 0) if dimension else (0, 0, before, after))
        full = full.narrow(2 + dimension, begin + before, outs.length)
    return SplitMap(full if bias is None else full + bias.view(1, -1, 1, 1), part)
