"""The collectives that autograd sees: their gradients are collectives too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.comm.hvd import context, ops
from headway.comm.hvd.compression import Compression, Compressor
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.comm.hvd.reduce_op import Average, ReduceOp, Sum, resolve_op


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over the ranks; arguments and errors are those of allreduce_async.

    Args:
        compression: how it travels.

    Returns:
        a tensor of the same shape and type.
    """
    packed, form = compression.compress(tensor)
    reduced: Tensor = _Allreduce.apply(
        packed, name, resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, form)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As allreduce, for several tensors."""
    packed, forms = zip(*map(compression.compress, tensors), strict=True)
    options = name, resolve_op(op, average), prescale_factor, postscale_factor, process_set
    reduced = _GroupedAllreduce.apply(*options, *packed)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, form) for one, form in zip(reduced, forms, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Joins the tensors of all ranks along the first dimension, in which they may differ."""
    gathered: Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    return gathered


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As allgather, for several tensors."""
    return list(_GroupedAllgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of one rank of the job; arguments and errors are those of broadcast_async."""
    found: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return found


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows to each rank and joins what comes; arguments and errors are those of alltoall_async.

    Returns:
        the rows received; with `splits` also how many came from each rank.
    """
    rows, counts = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return rows if splits is None else (rows, counts)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over the ranks and gives this one its rows; see reducescatter_async."""
    packed, form = compression.compress(tensor)
    options = name, op, process_set, prescale_factor, postscale_factor
    reduced: Tensor = _Reducescatter.apply(packed, *options)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, form)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As reducescatter, for several tensors."""
    packed, forms = zip(*map(compression.compress, tensors), strict=True)
    options = name, op, process_set, prescale_factor, postscale_factor
    reduced = _GroupedReducescatter.apply(*options, *packed)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, form) for one, form in zip(reduced, forms, strict=True)]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, *options: Any) -> Any:
        ctx.options = options
        return ops.synchronize(ops.allreduce_async(tensor, None, name, *options))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        reduced = allreduce(
            grad.contiguous(), op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return reduced, None, None, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, pre: float, post: float, process_set: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.options = op, pre, post, process_set
        return ops.synchronize(ops.grouped_allreduce_async(tensors, None, name, op, pre, post, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, pre, post, process_set = ctx.options
        reduced = grouped_allreduce(
            _make_contiguous(grads), op=op, prescale_factor=pre, postscale_factor=post, process_set=process_set
        )
        return None, None, None, None, None, *reduced


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Any:
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return ops.synchronize(ops.allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _select_own_rows([grad], [ctx.rows], ctx.process_set)[0], None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return ops.synchronize(ops.grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_select_own_rows(grads, ctx.rows, ctx.process_set)


def _select_own_rows(grads: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet) -> list[Tensor]:
    """The average over ranks of the gradients of gathered tensors, at the rows that came from this rank."""
    averaged = grouped_allreduce(_make_contiguous(grads), op=Average, process_set=process_set)
    table = allgather(torch.tensor([rows]), process_set=process_set)
    mine = process_set.rank() or 0
    firsts = table[:mine].sum(0).tolist()
    return [grad.narrow(0, first, count) for grad, first, count in zip(averaged, firsts, rows, strict=True)]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return ops.synchronize(ops.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = allreduce(grad.contiguous(), op=Average, process_set=ctx.process_set)
        return averaged if context.rank() == ctx.root else torch.zeros_like(averaged), None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> Any:
        rows, counts = ops.synchronize(ops.alltoall_async(tensor, splits, name, process_set))
        ctx.counts, ctx.rows, ctx.process_set = counts, tensor.shape[0], process_set
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        back, _ = alltoall(grad.contiguous(), ctx.counts, process_set=ctx.process_set)
        unsent = ctx.rows - len(back)  # rows that no split took have no gradient
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, *options: Any) -> Any:
        ctx.options = options
        return ops.synchronize(ops.reducescatter_async(tensor, name, *options))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather_gradients([grad], ctx.options)[0], None, None, None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, process_set: ProcessSet, pre: float, post: float, *tensors: Tensor
    ) -> Any:
        ctx.options = op, process_set, pre, post
        return ops.synchronize(ops.grouped_reducescatter_async(tensors, name, op, process_set, pre, post))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, None, *_gather_gradients(grads, ctx.options)


def _gather_gradients(grads: Sequence[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    """As Horovod has it: the gradient of the average is gathered, that of the sum is that times the ranks."""
    op, process_set, pre, post = options
    factor = (process_set.size() if op == Sum else 1) * pre * post
    return grouped_allgather([(grad * factor).contiguous() for grad in grads], process_set=process_set)


def _make_contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]
