"""Python objects between ranks. They are pickled: between the processes of one job, and nobody else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from headway.comm.hvd import context, differentiable
from headway.comm.hvd.process_sets import ProcessSet, global_process_set

try:
    from cloudpickle import dumps  # type: ignore[import-not-found,import-untyped,unused-ignore] # lambdas too
except ImportError:
    from pickle import dumps


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of one rank on all; on that rank the object itself.

    Args:
        root_rank: a rank of the job, not of the process set.

    Raises:
        ValueError, HorovodInternalError: see allgather_async; the root is not in the process set.
    """
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast_object: root rank {root_rank} is not in {process_set}")
    is_root = context.rank() == root_rank
    gathered = differentiable.allgather(_packed(obj) if is_root else _packed(), name, process_set)
    return obj if is_root else pickle.loads(gathered.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in their order."""
    stream = io.BytesIO(differentiable.allgather(_packed(obj), name).numpy().tobytes())
    return [pickle.load(stream) for _ in range(context.size())]


def _packed(*objects: Any) -> torch.Tensor:
    data = bytearray(b"".join(map(dumps, objects)))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
