"""The collectives that return a handle, or fill a tensor in place; those that autograd sees are in `differentiable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.comm.hvd import context
from headway.comm.hvd.errors import HorovodInternalError
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.comm.hvd.reduce_op import Adasum, Average, ReduceOp, Sum, resolve_op
from headway.comm.hvd.requests import ITEM_BYTES, SUMMABLE, Kind, Op, Request

OPS: tuple[Op, ...] = ("average", "sum", "adasum", "min", "max", "product")
"""By the numbers of ReduceOp."""


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce a tensor over the ranks; returns a handle for `poll` and `synchronize`.

    Ranks are matched by `name`, whatever the order in which they come; without one, by their count of nameless ones.

    Args:
        tensor: contiguous; not changed, and not to be changed before the end.
        average: deprecated; `op` says it.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: multiply each rank's tensor before, and the result.

    Raises:
        ValueError: a type that cannot be reduced, a tensor that is not contiguous, a name under way already, or a
            process set without this rank. HorovodInternalError: before `init`, or after the job was shut down.
    """
    outputs = [torch.empty_like(tensor, requires_grad=False)]
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", [tensor], outputs, name, resolve_op(op, average), factors, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_async, in place."""
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", [tensor], [tensor], name, resolve_op(op, average), factors, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As allreduce_async_, and waits for it."""
    result: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_async, for several tensors that are reduced when all ranks have all of them."""
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", tensors, outputs, name, resolve_op(op, average), factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_async, in place."""
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", tensors, tensors, name, resolve_op(op, average), factors, process_set, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """As grouped_allreduce_async_, and waits for it."""
    result: tuple[Tensor, ...] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begins to add up sparse tensors, by gathering indices and values; returns a function that waits for the result.

    Args:
        op: Average, or anything else for the sum.
    """
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / len(process_set.ranks or ())
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins to join the tensors of all ranks along the first dimension, in which they may differ; returns a handle.

    Raises:
        ValueError, HorovodInternalError: see allreduce_async.
    """
    return _submit("allgather", [tensor], [], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As allgather_async, for several tensors."""
    return _submit("allgather", tensors, [], name, process_set, grouped=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins to give all ranks the tensor of one; returns a handle.

    Args:
        root_rank: a rank of the job, not of the process set.

    Raises:
        ValueError, HorovodInternalError: see allreduce_async; the root is not in the process set.
    """
    return _broadcast(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async, in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As broadcast_async_, and waits for it."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to send rows of a tensor to each rank, and to join what comes from each; returns a handle.

    `synchronize` gives (rows received, how many came from each rank).

    Args:
        splits: int32; how many rows go to each rank of the set. Default: equally many.

    Raises:
        ValueError: splits of another type or number, more rows than there are, or rows that cannot be split equally;
            and see allreduce_async.
    """
    ranks = len(context.get_engine().sets.get(_get_id(process_set), ()))
    counts = splits if isinstance(splits, Tensor) else torch.tensor([] if splits is None else splits, dtype=torch.int32)
    rows = tensor.shape[0] if tensor.dim() else 0
    if counts.dtype != torch.int32 or counts.dim() > 1:
        raise ValueError("alltoall: splits are 32-bit integers, one for each rank")
    if splits is None or not len(counts):
        if rows % ranks:
            raise ValueError(f"alltoall: {rows} rows cannot be split equally over {ranks} ranks; say splits=")
        each = [rows // ranks] * ranks
    else:
        each = counts.tolist()
        if len(each) != ranks:
            raise ValueError(f"alltoall: {len(each)} splits for {ranks} ranks")
        if sum(each) > rows or min(each) < 0:
            raise ValueError(f"alltoall: splits {each} of a tensor of {rows} rows")
    return _submit("alltoall", [tensor], [counts], name, process_set, splits=tuple(each), grouped=True)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins to reduce a tensor over the ranks, and to give each rank its part of the rows; returns a handle.

    The first ranks get one row more where they cannot all get as many.

    Raises:
        HorovodInternalError: op is not Average or Sum. ValueError, HorovodInternalError: see allreduce_async.
    """
    factors = prescale_factor, postscale_factor
    return _reduce("reducescatter", [tensor], [], name, op, factors, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter_async, for several tensors."""
    factors = prescale_factor, postscale_factor
    return _reduce("reducescatter", tensors, [], name, op, factors, process_set, grouped=True)


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once.

    Raises:
        ValueError: there is no such handle, or it was waited for already.
    """
    return context.get_engine().poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an operation; its tensor or tensors, or None where the handle was waited for already.

    Raises:
        HorovodInternalError: it failed on all ranks, which disagree about it or have lost one of them.
    """
    return context.get_engine().wait(handle)


def join(device: int = -1) -> int:
    """Waits until all ranks have called it; meanwhile this one takes part in the others' allreduces with zeros.

    Args:
        device: where zeros for CUDA tensors are made; default: where this rank's latest ones were.

    Returns:
        the rank that came last.
    """
    engine = context.get_engine()
    if device >= 0:
        engine.cuda = torch.device("cuda", device)
    last: int = engine.wait(engine.submit(Request(0, "join", "join")))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have called it."""
    engine, number = context.get_engine(), _get_id(process_set)
    engine.wait(engine.submit(Request(number, "barrier", "barrier")))


def _reduce(
    kind: Kind,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool = False,
) -> int:
    if kind == "reducescatter" and op not in (Average, Sum):
        raise HorovodInternalError("reducescatter knows Average and Sum")
    if op == Adasum:
        _check_adasum(tensors, process_set)
    fields: dict[str, Any] = {"op": OPS[op], "prescale": float(factors[0]), "postscale": float(factors[1])}
    return _submit(kind, tensors, outputs, name, process_set, grouped=grouped, **fields)


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum is done over all ranks, not over a process set")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Adasum is for floating-point tensors")
    by_host = tensors[0].is_cuda and context.nccl_built()
    if by_host and not context.is_homogeneous():
        raise NotImplementedError("Adasum on NCCL wants as many processes on each host as on the others")
    number, what = (context.cross_size(), "hosts") if by_host else (context.size(), "ranks")
    if number & (number - 1):
        raise NotImplementedError(f"Adasum wants a power of two of {what}, not {number}")


def _broadcast(tensor: Tensor, output: Tensor, root: int, name: str | None, process_set: ProcessSet) -> int:
    members = context.get_engine().sets.get(_get_id(process_set), ())
    if members and root not in members:
        raise ValueError(f"broadcast: root rank {root} is not one of {list(members)}")
    return _submit("broadcast", [tensor], [output], name, process_set, root=int(root))


def _submit(
    kind: Kind,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    **fields: Any,
) -> int:
    engine, number = context.get_engine(), _get_id(process_set)
    known = SUMMABLE if kind in ("allreduce", "reducescatter") else ITEM_BYTES
    types = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    for tensor, kind_of in zip(tensors, types, strict=True):
        if kind_of not in known or tensor.layout != torch.strided:
            raise ValueError(f"{kind}: tensors of type {tensor.type()} are not supported")
        if not tensor.is_contiguous():
            raise ValueError(f"{kind}: the tensor is not contiguous; call .contiguous() on it")
    if len({tensor.device for tensor in tensors}) != 1:
        raise ValueError(f"{kind}: wants at least one tensor, and all on one device")
    label = f"grouped_{kind}" if grouped and kind != "alltoall" else kind
    request = Request(
        number,
        engine.name(label, number, name),
        kind,
        types,
        tuple(tuple(tensor.shape) for tensor in tensors),
        tensors[0].device.type,
        **fields,
    )
    sources = [tensor.detach() for tensor in tensors]
    return engine.submit(request, sources, [output.detach() for output in outputs], single=not grouped)


def _get_id(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; call add_process_set first")
    return process_set.process_set_id
