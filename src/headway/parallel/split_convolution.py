"""A convolution of split maps whose exchange runs beside it, and which keeps no padded copy for the backward pass.

The outputs that need a rank's own rows alone, nearly all of them, are computed while the rows of the neighbours come;
two thin convolutions at the edges follow. Backward, the edges come first: their gradients travel while the rest is
computed. Kept are the rank's own rows, which other layers keep too, and the rows of the neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.group import Group
from headway.core.rows import Range, Window, list_pieces
from headway.parallel.fetch import cut_pieces, list_shapes, start_exchange


@final
@dataclass(frozen=True)
class SplitConvolution:
    """Settings of a convolution whose maps are split along one dimension.

    Attributes:
        axis: 2 for rows, 3 for columns.
        window: along that axis.
        strides, dilations, groups: of the convolution.
        padding: along the other axis.
        owned: rows of the input that each rank of `line` owns. outputs: rows of the output.
    """

    axis: int
    window: Window
    strides: tuple[int, int]
    dilations: tuple[int, int]
    groups: int
    padding: int
    owned: tuple[Range, ...]
    outputs: tuple[Range, ...]
    line: Group

    @property
    def length(self) -> int:
        """Rows of the whole input."""
        return self.owned[-1].stop

    @property
    def needed(self) -> list[Range]:
        """Rows that each rank needs."""
        return [self.window.find_need(one, self.length).rows for one in self.outputs]

    @property
    def paddings(self) -> tuple[int, int]:
        """Padding of each dimension: none along the axis, where rows are there or are put there."""
        return (0, self.padding) if self.axis == 2 else (self.padding, 0)

    def split_outputs(self) -> tuple[Range, Range, Range]:
        """Splits this rank's outputs into those before, in and after the range that needs its own rows alone."""
        mine, own, window = self.outputs[self.line.rank], self.owned[self.line.rank], self.window
        first = -((own.start + window.padding) // -window.stride)
        last = (own.stop - 1 + window.padding - window.reach) // window.stride
        start = min(max(first, mine.start), mine.stop)
        stop = max(start, min(last + 1, mine.stop))
        if start == stop:
            # All outputs need rows of others: they are one edge.
            return mine, Range(mine.stop, mine.stop), Range(mine.stop, mine.stop)
        return Range(mine.start, start), Range(start, stop), Range(stop, mine.stop)

    def find_rows(self, outputs: Range) -> Range:
        """Finds the rows under the windows of these outputs, padding among them."""
        start = outputs.start * self.window.stride - self.window.padding
        stop = (outputs.stop - 1) * self.window.stride - self.window.padding + self.window.reach + 1
        return Range(start, stop)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolves rows that are all there."""
        return F.conv2d(x, weight, None, self.strides, self.paddings, self.dilations, self.groups)

    def convolve_backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs_input: bool) -> tuple[Tensor, Tensor]:
        """Returns the gradients of rows and weight."""
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.strides, self.paddings, self.dilations, False, [0, 0], self.groups,
            [needs_input, True, False],
        )  # fmt: skip
        return found[0], found[1]


def convolve_split(x: Tensor, weight: Tensor, bias: Tensor | None, settings: SplitConvolution) -> Tensor:
    """Convolves split maps. Every rank of the line has outputs and calls it.

    Args:
        x: this rank's own rows.
    """
    out: Tensor = _ConvolveSplit.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return out


class _ConvolveSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: SplitConvolution) -> Tensor:
        one, line = settings, settings.line
        own = one.owned[line.rank]
        sent, got = list_pieces(one.owned, one.needed, line.rank)
        pending = start_exchange(cut_pieces(x, one.axis, own, sent), list_shapes(x, one.axis, got), x, line)
        before, inside, after = one.split_outputs()
        parts = []
        if inside.length:
            rows = one.find_rows(inside)
            parts.append(one.convolve(x.narrow(one.axis, rows.start - own.start, rows.length), weight))
        pieces = pending.wait()
        # Rows of the neighbours above and below, in their order.
        above = [piece for piece, rows in zip(pieces, got, strict=True) if rows.length and rows.stop <= own.start]
        below = [piece for piece, rows in zip(pieces, got, strict=True) if rows.length and rows.start >= own.stop]
        halos = tuple(torch.cat(side, one.axis) if side else None for side in (above, below))
        if before.length:
            parts.insert(0, one.convolve(_gather(x, halos, one.find_rows(before), one), weight))
        if after.length:
            parts.append(one.convolve(_gather(x, halos, one.find_rows(after), one), weight))
        out = torch.cat(parts, one.axis) if len(parts) > 1 else parts[0]
        ctx.settings, ctx.has_bias = one, bias is not None
        ctx.save_for_backward(x, weight, *halos)
        return out if bias is None else out.add_(bias.view(1, -1, 1, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight, *halos = ctx.saved_tensors
        one: SplitConvolution = ctx.settings
        line, own, mine = one.line, one.owned[one.line.rank], one.outputs[one.line.rank]
        needs_input = ctx.needs_input_grad[0]
        sent, got = list_pieces(one.owned, one.needed, line.rank)
        grad_x = torch.zeros_like(x) if needs_input else x
        grad_weight = torch.zeros_like(weight)
        # Gradients of the rows of others, which go back to them.
        given = [x.new_zeros(shape) for shape in list_shapes(x, one.axis, got)] if needs_input else []
        before, inside, after = one.split_outputs()

        def cut_grad(outputs: Range) -> Tensor:
            return grad.narrow(one.axis, outputs.start - mine.start, outputs.length)

        for outputs in (before, after):
            if not outputs.length:
                continue
            rows = one.find_rows(outputs)
            found = one.convolve_backward(cut_grad(outputs), _gather(x, halos, rows, one), weight, needs_input)
            grad_weight += found[1]
            if not needs_input:
                continue
            for rank, piece in enumerate(got):
                here = rows.intersect(piece)
                if here.length:
                    target = grad_x if rank == line.rank else given[rank]
                    start = own.start if rank == line.rank else piece.start
                    part = found[0].narrow(one.axis, here.start - rows.start, here.length)
                    target.narrow(one.axis, here.start - start, here.length).add_(part)
        pending = None
        if needs_input:
            pending = start_exchange(given, list_shapes(x, one.axis, sent), x, line)
        if inside.length:
            rows = one.find_rows(inside)
            cut = x.narrow(one.axis, rows.start - own.start, rows.length)
            found = one.convolve_backward(cut_grad(inside), cut, weight, needs_input)
            grad_weight += found[1]
            if needs_input:
                grad_x.narrow(one.axis, rows.start - own.start, rows.length).add_(found[0])
        if pending is not None:
            # In the order of the ranks, so that the sums are the same in every run.
            for rank, (theirs, came) in enumerate(zip(sent, pending.wait(), strict=True)):
                if theirs.length and rank != line.rank:
                    grad_x.narrow(one.axis, theirs.start - own.start, theirs.length).add_(came)
        grad_bias = grad.sum((0, 2, 3)) if ctx.has_bias else None
        return grad_x if needs_input else None, grad_weight, grad_bias, None


def _gather(x: Tensor, halos: Sequence[Tensor | None], rows: Range, one: SplitConvolution) -> Tensor:
    """Gathers rows from the neighbours above, this rank, the neighbours below, and the padding beyond the map."""
    own, need = one.owned[one.line.rank], one.needed[one.line.rank]
    above, below = halos
    sources = []
    if above is not None:
        sources.append((Range(need.start, need.start + above.shape[one.axis]), above))
    sources.append((own, x))
    if below is not None:
        sources.append((Range(need.stop - below.shape[one.axis], need.stop), below))
    parts = [
        tensor.narrow(one.axis, here.start - have.start, here.length)
        for have, tensor in sources
        if (here := have.intersect(rows)).length
    ]
    # Some outputs may see the padding alone.
    inside = torch.cat(parts or [x.narrow(one.axis, 0, 0)], one.axis) if len(parts) != 1 else parts[0]
    before = max(0, min(0, rows.stop) - rows.start)
    after = max(0, rows.stop - max(one.length, rows.start))
    if not (before or after):
        return inside
    return F.pad(inside, (0, 0, before, after) if one.axis == 2 else (before, after, 0, 0))
