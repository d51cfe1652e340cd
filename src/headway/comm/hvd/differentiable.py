"""The collectives with gradients, which are collectives themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.comm.hvd import context, ops
from headway.comm.hvd.compression import Compression, Compressor
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.comm.hvd.reduce_op import Average, ReduceOp, Sum, resolve_op

ReductionOptions = tuple[ReduceOp, tuple[float, float], ProcessSet]
"""The reduction, (prescale, postscale), and the ranks."""


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
        compression: compression of the tensors that are sent.

    Returns:
        a tensor of the same shape and dtype.
    """
    options = resolve_op(op, average), (prescale_factor, postscale_factor), process_set
    return _apply(_Allreduce, False, [tensor], name, compression, options)[0]


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
    """Reduces several tensors, and returns them; see allreduce."""
    options = resolve_op(op, average), (prescale_factor, postscale_factor), process_set
    return _apply(_Allreduce, True, tensors, name, compression, options)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the tensors of all ranks joined along the first dimension, in which they may differ."""
    gathered: tuple[Tensor] = _Allgather.apply(False, name, process_set, tensor)  # type: ignore[no-untyped-call]
    return gathered[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Joins each of several tensors; see allgather."""
    return list(_Allgather.apply(True, name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensor of one rank of the job; arguments and errors are those of broadcast_async."""
    received: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return received


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows to each rank and joins the rows received; arguments and errors are those of alltoall_async.

    Returns:
        the rows received; with `splits` also the number of rows from each rank.
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
    """Reduces a tensor over the ranks and returns this rank's rows; see reducescatter_async."""
    options = op, (prescale_factor, postscale_factor), process_set
    return _apply(_Reducescatter, False, [tensor], name, compression, options)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduces and scatters several tensors; see reducescatter."""
    options = op, (prescale_factor, postscale_factor), process_set
    return _apply(_Reducescatter, True, tensors, name, compression, options)


# Each autograd function serves the single and the grouped form; `grouped` says which, since ranks match operations by
# names that differ between the two. Each returns a tuple.


def _apply(
    function: Any,
    grouped: bool,
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Compressor,
    options: ReductionOptions,
) -> list[Tensor]:
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = function.apply(grouped, name, options, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]


def _wait_for_tuple(handle: int, grouped: bool) -> tuple[Tensor, ...]:
    result = ops.synchronize(handle)
    return tuple(result) if grouped else (result,)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, options: ReductionOptions, *tensors: Tensor) -> Any:
        # No name: the backward pass runs under one of its own, because the forward's may be in use again.
        ctx.options = grouped, None, options
        handle = ops.submit_reduction("allreduce", tensors, name, *options, grouped=grouped)
        return _wait_for_tuple(handle, grouped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Each rank's tensor is part of all ranks' results, so its gradient is the same reduction of their gradients.
        reduced = _Allreduce.apply(*ctx.options, *_make_contiguous(grads))  # type: ignore[no-untyped-call]
        return None, None, None, *reduced


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return _wait_for_tuple(ops.submit("allgather", tensors, [], name, process_set, grouped=grouped), grouped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # As in Horovod: the average of the ranks' gradients, at the rows that came from this rank.
        averaged = grouped_allreduce(_make_contiguous(grads), op=Average, process_set=ctx.process_set)
        # The ranks may have sent different numbers of rows, so where a rank's own begin is known only together.
        all_rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        starts = all_rows[: ctx.process_set.rank() or 0].sum(0).tolist()
        own_grads = [grad.narrow(0, start, rows) for grad, start, rows in zip(averaged, starts, ctx.rows, strict=True)]
        return None, None, None, *own_grads


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return ops.synchronize(ops.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # As in Horovod: the average of the ranks' gradients, on the root alone.
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
        # The rows go back to the ranks that they came from.
        grad_input, _ = alltoall(grad.contiguous(), ctx.counts, process_set=ctx.process_set)
        # Rows that no split took have no gradient.
        unsent_rows = ctx.rows - len(grad_input)
        if unsent_rows:
            grad_input = torch.cat([grad_input, grad_input.new_zeros(unsent_rows, *grad_input.shape[1:])])
        return grad_input, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, options: ReductionOptions, *tensors: Tensor) -> Any:
        ctx.options = options
        handle = ops.submit_reduction("reducescatter", tensors, name, *options, grouped=grouped)
        return _wait_for_tuple(handle, grouped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # As in Horovod: the gradient of the average is gathered, that of the sum is that times the ranks.
        op, (prescale, postscale), process_set = ctx.options
        factor = (process_set.size() if op == Sum else 1) * prescale * postscale
        gathered = grouped_allgather(_make_contiguous([grad * factor for grad in grads]), process_set=process_set)
        return None, None, None, *gathered


def _make_contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Autograd hands over expanded gradients, such as those of `sum`, and a collective reads plain memory.
    return [tensor.contiguous() for tensor in tensors]
