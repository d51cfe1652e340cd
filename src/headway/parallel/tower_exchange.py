"""Exchanges between the towers of a place, with gradients.

Towers give their channels to all ranks. If the network outside of towers uses them, every rank has the same gradient of
them, and takes its own part. If towers use them, the gradient is the sum of what the towers contribute, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.group import Group
from headway.parallel.fetch import exchange_pieces


@final
class JoinedTowers:
    """A part of each tower, joined along a dimension; the ranks exchange the parts when a function needs all of them.

    Args:
        parts: of each tower; those of other ranks have no numbers (they are on PyTorch's `meta` device).
        dim: the dimension along which they are joined.
        own: tower of this rank.
    """

    def __init__(self, parts: tuple[Tensor, ...], dim: int, own: int) -> None:
        self.parts, self.dim, self.own = parts, dim, own
        # All parts: without a gradient, for functions outside of towers, and for those of towers.
        self._whole: Tensor | None = None
        self._for_all: Tensor | None = None
        self._for_towers: Tensor | None = None

    @cached_property
    def whole_meta(self) -> Tensor:
        """All parts, without numbers. Raises what torch.cat raises if they do not fit together."""
        metas = [make_meta(part).detach() for part in self.parts]
        needs_gradient = any(part.requires_grad for part in self.parts)
        return torch.cat(metas, self.dim).to(self.parts[self.own].dtype).requires_grad_(needs_gradient)

    @property
    def is_gathered(self) -> bool:
        """True once the ranks have exchanged the parts."""
        return self._whole is not None

    @property
    def is_used_by_towers(self) -> bool:
        """True once a tower has got all parts."""
        return self._for_towers is not None

    def gather(self, group: Group) -> Tensor:
        """Returns all parts for a function outside of towers. The gradient of this rank's part is that part of it."""
        if self._for_all is None:
            self._for_all = _Join.apply(*self._exchange(group), self, None)  # type: ignore[no-untyped-call]
        return self._for_all

    def gather_for_towers(self, group: Group) -> Tensor:
        """Returns all parts for functions of towers. The gradient of a part is the sum over all ranks."""
        if self._for_towers is None:
            self._for_towers = _Join.apply(*self._exchange(group), self, group)  # type: ignore[no-untyped-call]
        return self._for_towers

    def _exchange(self, group: Group) -> tuple[Tensor, Tensor]:
        """Returns this rank's part, and all of them without a gradient."""
        own = self.parts[self.own]
        # Every rank has to take part in the backward exchange, also if its own tower is frozen.
        if torch.is_grad_enabled() and any(part.requires_grad for part in self.parts) and not own.requires_grad:
            own = own.detach().requires_grad_()
        if self._whole is None:
            shapes, sent = [tuple(part.shape) for part in self.parts], own.detach()
            # What autocast would do next: fewer bytes are sent, and all towers send one type.
            if own.is_floating_point() and torch.is_autocast_enabled(own.device.type):
                sent = sent.to(torch.get_autocast_dtype(own.device.type))
            elif len({part.dtype for part in self.parts}) > 1:
                raise UsageError("towers join values of different types", fix="Let all of them give one type.")
            pieces = exchange_pieces([sent] * group.size, shapes, sent, group)
            self._whole = restore_format(torch.cat(pieces, self.dim), own)
        return own, self._whole


def make_meta(value: Tensor) -> Tensor:
    """Returns a tensor without numbers, of the shape, strides and type of another; it needs a gradient if that does."""
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return meta.requires_grad_(value.requires_grad)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, whole: Tensor, joined: JoinedTowers, group: Group | None) -> Tensor:
        ctx.dim, ctx.own, ctx.group = joined.dim, joined.own, group
        ctx.lengths = [part.shape[joined.dim] for part in joined.parts]
        ctx.shape, ctx.dtype = tuple(own.shape), own.dtype
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, sent = ctx.group, grad.split(ctx.lengths, ctx.dim)
        if group is None:
            return sent[ctx.own].to(ctx.dtype), None, None, None
        pieces = exchange_pieces(sent, [ctx.shape] * group.size, grad, group)
        # As autocast's casts of one process do: 16 bits are sent, and the sum has the type of the towers' values.
        total = add_in_order([piece.to(ctx.dtype) for piece in pieces])
        return restore_format(total, grad), None, None, None


def enter_towers(x: Tensor, group: Group) -> Tensor:
    """Returns a value that all ranks have alike, for towers. Its gradient is the sum of those of all towers."""
    out: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        pieces = exchange_pieces([grad] * group.size, [tuple(grad.shape)] * group.size, grad, group)
        return restore_format(add_in_order(pieces), grad), None


def tie(outputs: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Returns the outputs, whose backward pass passes through all `values` too, with a gradient of zero.

    So all ranks take part in the exchange of each value's gradient, also those whose tower does not use it.
    """
    if not values or not outputs.requires_grad:
        return outputs
    out: Tensor = _Tie.apply(outputs, *values)  # type: ignore[no-untyped-call]
    return out


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, *values: Tensor) -> Tensor:
        ctx.number = len(values)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.number


def add_in_order(pieces: Sequence[Tensor]) -> Tensor:
    """Adds the pieces of all ranks in the order of the ranks: the sum has the same bits in every run."""
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def restore_format(x: Tensor, like: Tensor) -> Tensor:
    """Returns `x` in the memory format of another tensor."""
    if not _is_channels_last(like):
        return x.contiguous()
    # `contiguous` would leave the strides of images of one pixel, by which kernels choose, as they are.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last).copy_(x)


def _is_channels_last(x: Tensor) -> bool:
    """Returns True for images in channels-last order, also for a slice of their channels."""
    return x.dim() == 4 and x.stride(1) == 1 and x.stride(3) >= x.shape[1] > 1
