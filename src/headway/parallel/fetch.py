"""Exchanges between the ranks of a place, with gradients: rows of neighbours, strips to samples and back.

Each is one uneven all-to-all. Gradients go back the same way, and are added in the order of the ranks: the sums are the
same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from headway.core.exchange_waits import Exchange
from headway.core.group import CollectiveWork, Group
from headway.core.rows import Range, count_moved, list_pieces


def fetch_rows(x: Tensor, axis: int, owned: Sequence[Range], needed: Sequence[Range], group: Group) -> Tensor:
    """Returns the rows that this rank needs, of which it owns some and gets the others from the ranks of `group`.

    Args:
        x: own rows along `axis`.
        owned, needed: rows of each rank of the group, in its order; owned rows are consecutive.
    """
    if count_moved(owned, needed) == 0:
        mine, need = owned[group.rank], needed[group.rank]
        # Every rank comes to the same conclusion, so none waits for the others.
        return x if mine == need else x.narrow(axis, need.start - mine.start if need.length else 0, need.length)
    out: Tensor = _FetchRows.apply(x, axis, tuple(owned), tuple(needed), group)  # type: ignore[no-untyped-call]
    return out


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: int, owned: tuple[Range, ...], needed: tuple[Range, ...], group: Group
    ) -> Tensor:
        ctx.axis, ctx.owned, ctx.needed, ctx.group = axis, owned, needed, group
        sent, got = list_pieces(owned, needed, group.rank)
        pieces = exchange_pieces(cut_pieces(x, axis, owned[group.rank], sent), list_shapes(x, axis, got), x, group)
        return torch.cat(pieces, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, owned, needed, group = ctx.axis, ctx.owned, ctx.needed, ctx.group
        sent, got = list_pieces(owned, needed, group.rank)
        pieces = exchange_pieces(
            cut_pieces(grad, axis, needed[group.rank], got), list_shapes(grad, axis, sent), grad, group
        )
        mine = owned[group.rank]
        shape = list(grad.shape)
        shape[axis] = mine.length
        total = grad.new_zeros(shape)
        for rows, piece in zip(sent, pieces, strict=True):
            if rows.length:
                total.narrow(axis, rows.start - mine.start, rows.length).add_(piece)
        return total, None, None, None, None


def cut_pieces(x: Tensor, axis: int, mine: Range, pieces: Sequence[Range]) -> list[Tensor]:
    """Cuts rows out of a tensor whose rows along `axis` are `mine`."""
    return [x.narrow(axis, rows.start - mine.start if rows.length else 0, rows.length) for rows in pieces]


def list_shapes(x: Tensor, axis: int, pieces: Sequence[Range]) -> list[tuple[int, ...]]:
    """Lists the shapes of such pieces."""
    return [(*x.shape[:axis], rows.length, *x.shape[axis + 1 :]) for rows in pieces]


def exchange_pieces(
    sent: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    like: Tensor,
    group: Group,
    exchange: Exchange | None = None,
) -> list[Tensor]:
    """Sends a piece to each rank and returns the pieces that came, of these shapes. Its own piece never moves.

    Args:
        like: gives dtype and device.
        exchange: what the wait counts as; default: as the group says.
    """
    return start_exchange(sent, shapes, like, group).wait(exchange)


@final
class PendingExchange:
    """An exchange of pieces on its way."""

    def __init__(
        self, work: CollectiveWork, out: Tensor, shapes: Sequence[tuple[int, ...]], own: Tensor, rank: int
    ) -> None:
        self._work, self._out, self._shapes, self._own, self._rank = work, out, shapes, own, rank

    def wait(self, exchange: Exchange | None = None) -> list[Tensor]:
        """Waits for the pieces of all ranks, and returns them in their order. Args: see `exchange_pieces`."""
        self._work.wait(exchange)
        sizes = [0 if one == self._rank else math.prod(shape) for one, shape in enumerate(self._shapes)]
        pieces = self._out.split(sizes)
        return [
            self._own if one == self._rank else piece.view(shape)
            for one, (piece, shape) in enumerate(zip(pieces, self._shapes, strict=True))
        ]


def start_exchange(
    sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], like: Tensor, group: Group
) -> PendingExchange:
    """Begins what `exchange_pieces` does, and returns at once."""
    rank = group.rank
    flat = [like.new_empty(0) if one == rank else piece.reshape(-1) for one, piece in enumerate(sent)]
    sizes = [0 if one == rank else math.prod(shape) for one, shape in enumerate(shapes)]
    out = like.new_empty(sum(sizes))
    work = group.all_to_all(out, torch.cat(flat), sizes, [len(piece) for piece in flat])
    return PendingExchange(work, out, shapes, sent[rank], rank)


def exchange(
    x: Tensor, sent: Sequence[tuple[slice, ...]], shape: tuple[int, ...], got: Sequence[tuple[slice, ...]], group: Group
) -> Tensor:
    """Sends a block of `x` to each rank, and puts the blocks that come into a tensor of `shape`, which they fill.

    Args:
        sent: the block of `x` for each rank; blocks may overlap. got: where the block of each rank goes.
    """
    out: Tensor = _Exchange.apply(x, tuple(sent), shape, tuple(got), group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sent: tuple[tuple[slice, ...], ...],
        shape: tuple[int, ...],
        got: tuple[tuple[slice, ...], ...],
        group: Group,
    ) -> Tensor:
        ctx.shape, ctx.sent, ctx.got, ctx.group = tuple(x.shape), sent, got, group
        return _exchange_blocks(x, sent, shape, got, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange_blocks(grad, ctx.got, ctx.shape, ctx.sent, ctx.group), None, None, None, None


def _exchange_blocks(
    x: Tensor, sent: Sequence[tuple[slice, ...]], shape: tuple[int, ...], got: Sequence[tuple[slice, ...]], group: Group
) -> Tensor:
    out = x.new_zeros(shape)
    shapes = [tuple(out[block].shape) for block in got]
    for block, piece in zip(got, exchange_pieces([x[block] for block in sent], shapes, x, group), strict=True):
        # Blocks of a backward pass can overlap: what was sent to several ranks gets the sum of their gradients.
        out[block] += piece
    return out


def sum_in_order(values: Tensor, group: Group) -> Tensor:
    """Adds a tensor of all ranks of a group, in their order: the sums have the same bits on each."""
    gathered = values.new_empty(group.size * values.numel())
    group.all_gather(gathered, values.reshape(-1)).wait()
    return gathered.view(group.size, *values.shape).sum(0)
