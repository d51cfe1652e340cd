"""The collectives that return a handle or work in place. Those with gradients are in `differentiable`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from headway.comm.hvd import context
from headway.comm.hvd.errors import HorovodInternalError
from headway.comm.hvd.negotiator import GLOBAL_SET_ID
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.comm.hvd.reduce_op import Adasum, Average, ReduceOp, Sum, resolve_op
from headway.comm.hvd.requests import ITEM_BYTES, REDUCIBLE_DTYPES, Kind, Op, Request

P = ParamSpec("P")

# Indexed by ReduceOp.
OP_NAMES: tuple[Op, ...] = ("average", "sum", "adasum", "min", "max", "product")


# The signatures are Horovod's, up to the names of the arguments.


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

    Ranks match operations by `name`, in any order of submission; without a name, by their count of nameless operations.

    Args:
        tensor: contiguous tensor; is not changed, and must not be changed before the end.
        average: deprecated; use `op`.
        name: name of the operation.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: multiply each rank's tensor before the reduction, and the result.
        process_set: ranks that take part.

    Raises:
        ValueError: the dtype cannot be reduced, the tensor is not contiguous, the name is under way already, or the
            process set lacks this rank.
        HorovodInternalError: `init` was not called, or the job was shut down.
    """
    factors = prescale_factor, postscale_factor
    return submit_reduction("allreduce", [tensor], name, resolve_op(op, average), factors, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce a tensor in place; see allreduce_async."""
    factors = prescale_factor, postscale_factor
    return submit_reduction("allreduce", [tensor], name, resolve_op(op, average), factors, process_set, in_place=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce several tensors, when all ranks have submitted all of them; see allreduce_async."""
    factors = prescale_factor, postscale_factor
    return submit_reduction("allreduce", tensors, name, resolve_op(op, average), factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce several tensors in place; see grouped_allreduce_async."""
    op, factors = resolve_op(op, average), (prescale_factor, postscale_factor)
    return submit_reduction("allreduce", tensors, name, op, factors, process_set, grouped=True, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begins to sum sparse tensors, or to average them; returns a function that waits for the result."""
    # Ranks have different indices, so values cannot be summed element by element; equal indices may come twice.
    indices_handle = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values_handle = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if op == Average:
            # Divided here, because a gather cannot average.
            values = values / len(process_set.ranks or ())
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins to join the tensors of all ranks along the first dimension, in which they may differ; returns a handle.

    Raises as allreduce_async does.
    """
    return submit("allgather", [tensor], [], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins to join several tensors; see allgather_async."""
    return submit("allgather", tensors, [], name, process_set, grouped=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins to send one rank's tensor to all ranks; returns a handle.

    Raises as allreduce_async does, and ValueError if the root is not in the process set.

    Args:
        root_rank: a rank of the job, not of the process set.
    """
    return _broadcast(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins to broadcast in place; see broadcast_async."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to send rows of a tensor to each rank, and to join the rows received; returns a handle.

    `synchronize` returns (rows received, number of rows from each rank).

    Args:
        splits: int32; number of rows for each rank of the set. Default: equal numbers.

    Raises:
        ValueError: the splits have another dtype or number, add up to more rows than there are, or are missing and the
            rows cannot be split equally; and see allreduce_async.
    """
    num_ranks = len(_get_members("alltoall", process_set))
    # Without splits the counts are an empty tensor, which gives the dtype of the received counts.
    counts = splits if isinstance(splits, Tensor) else torch.tensor([] if splits is None else splits, dtype=torch.int32)
    rows = tensor.shape[0] if tensor.dim() else 0
    if counts.dtype != torch.int32 or counts.dim() > 1:
        raise ValueError("alltoall: splits have to be 32-bit integers, one for each rank")
    if splits is None or not len(counts):
        if rows % num_ranks:
            raise ValueError(f"alltoall: {rows} rows cannot be split equally over {num_ranks} ranks; give splits=")
        row_counts = [rows // num_ranks] * num_ranks
    else:
        row_counts = counts.tolist()
        if len(row_counts) != num_ranks:
            raise ValueError(f"alltoall: {len(row_counts)} splits for {num_ranks} ranks; give one for each rank")
        if sum(row_counts) > rows or min(row_counts) < 0:
            raise ValueError(f"alltoall: splits {row_counts} of a tensor of {rows} rows; give at most {rows} in total")
    return submit("alltoall", [tensor], [counts], name, process_set, splits=tuple(row_counts), grouped=True)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins to reduce a tensor over the ranks, and to give each rank its part of the rows; returns a handle.

    If the rows cannot be split equally, the first ranks get one more.

    Raises as allreduce_async does, and HorovodInternalError if op is not Average or Sum.
    """
    factors = prescale_factor, postscale_factor
    return submit_reduction("reducescatter", [tensor], name, op, factors, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins to reduce and scatter several tensors; see reducescatter_async."""
    factors = prescale_factor, postscale_factor
    return submit_reduction("reducescatter", tensors, name, op, factors, process_set, grouped=True)


def poll(handle: int) -> bool:
    """Returns True if `synchronize` would return at once. Raises ValueError if the handle is unknown, or waited for."""
    return context.get_engine().poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an operation; returns its tensor or tensors, or None if the handle was waited for already.

    Raises HorovodInternalError if it failed on all ranks, because they disagree about it or have lost one of them.
    """
    return context.get_engine().wait(handle)


def join(device: int = -1) -> int:
    """Waits until all ranks have called it; meanwhile this rank adds zeros to the others' allreduces.

    Args:
        device: CUDA device of the zeros; default: that of this rank's latest CUDA tensor.

    Returns:
        the rank that came last.
    """
    engine = context.get_engine()
    # Horovod's -1 stands for no device.
    if device >= 0:
        engine.cuda = torch.device("cuda", device)
    last_rank: int = engine.execute(Request(GLOBAL_SET_ID, "join", "join"))
    return last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have called it."""
    context.get_engine().execute(Request(_get_set_id(process_set), "barrier", "barrier"))


def submit_reduction(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    in_place: bool = False,
) -> int:
    """Submits an allreduce or a reducescatter; returns its handle.

    Args:
        factors: prescale, postscale.
        grouped: if True, the result is a tuple, and ranks match it with grouped operations only.
        in_place: if True, an allreduce writes into `tensors`.
    """
    # Results of a reducescatter have other shapes than the tensors: the collective allocates them.
    outputs: Sequence[Tensor] = ()
    if kind == "reducescatter":
        if op not in (Average, Sum):
            raise HorovodInternalError("reducescatter supports Average and Sum only")
    else:
        outputs = tensors if in_place else [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    if op == Adasum:
        _check_adasum(tensors, process_set)
    fields: dict[str, Any] = {"op": OP_NAMES[op], "prescale": float(factors[0]), "postscale": float(factors[1])}
    return submit(kind, tensors, outputs, name, process_set, grouped=grouped, **fields)


def submit(
    kind: Kind,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    **fields: Any,
) -> int:
    """Checks the tensors of an operation and submits it; returns its handle. `fields` are those of the Request."""
    # Errors of this rank alone are raised here, before any other rank hears of the operation.
    engine, set_id = context.get_engine(), _get_set_id(process_set)
    supported = REDUCIBLE_DTYPES if kind in ("allreduce", "reducescatter") else ITEM_BYTES
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if dtype not in supported or tensor.layout != torch.strided:
            raise ValueError(f"{kind}: tensors of type {tensor.type()} are not supported")
        # An operation in place would otherwise write into a copy, and the tensor would stay as it was.
        if not tensor.is_contiguous():
            raise ValueError(f"{kind}: the tensor is not contiguous; call .contiguous() on it")
    if len({tensor.device for tensor in tensors}) != 1:
        raise ValueError(f"{kind}: give at least one tensor, and all on one device")
    # alltoall returns a tuple, yet has no grouped form.
    prefix = f"grouped_{kind}" if grouped and kind != "alltoall" else kind
    unique_name = engine.build_name(prefix, set_id, name)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    request = Request(set_id, unique_name, kind, dtypes, shapes, tensors[0].device.type, **fields)
    # Detached: autograd sees these operations in `differentiable` only.
    inputs = [tensor.detach() for tensor in tensors]
    return engine.submit(request, inputs, [output.detach() for output in outputs], single=not grouped)


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum works over all ranks, not over a process set")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Adasum supports floating-point tensors only")
    # On NCCL it averages inside hosts, and combines over hosts.
    is_hierarchical = tensors[0].is_cuda and context.nccl_built()
    if is_hierarchical and not context.is_homogeneous():
        raise NotImplementedError("Adasum on NCCL needs as many processes on each host as on the others")
    # Pairs of equal partners in every step.
    count, what = (context.cross_size(), "hosts") if is_hierarchical else (context.size(), "ranks")
    if count & (count - 1):
        raise NotImplementedError(f"Adasum needs a power of two of {what}, not {count}")


def _broadcast(tensor: Tensor, output: Tensor, root: int, name: str | None, process_set: ProcessSet) -> int:
    # Checked before submission: the other ranks would wait for a root that does not take part.
    members = _get_members("broadcast", process_set)
    if root not in members:
        raise ValueError(f"broadcast: root rank {root} is not one of {list(members)}")
    return submit("broadcast", [tensor], [output], name, process_set, root=int(root))


def _build_synchronous(submit_async: Callable[P, int]) -> Callable[P, Any]:
    @functools.wraps(submit_async)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(submit_async(*args, **kwargs))

    run.__name__ = submit_async.__name__.replace("_async", "")
    return run


# In place; they wait, and return the tensor or the tuple of tensors.
allreduce_ = _build_synchronous(allreduce_async_)
grouped_allreduce_ = _build_synchronous(grouped_allreduce_async_)
broadcast_ = _build_synchronous(broadcast_async_)


def _get_members(kind: str, process_set: ProcessSet) -> tuple[int, ...]:
    return context.get_engine().get_members(kind, _get_set_id(process_set))


def _get_set_id(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; call add_process_set first")
    return process_set.process_set_id
