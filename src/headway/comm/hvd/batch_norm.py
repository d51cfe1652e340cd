"""SyncBatchNorm under Horovod's name: its collectives are named operations like all others."""

from __future__ import annotations

from typing import cast, final

from torch import Tensor

from headway.comm import batch_norm
from headway.comm.hvd import context, ops
from headway.comm.hvd.reduce_op import Sum
from headway.core.group import Group


# The function has Horovod's name.
def SyncBatchNorm(  # noqa: N802
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> batch_norm.SyncBatchNorm:
    """Returns a batch norm over the samples of all ranks, on CPU or CUDA; arguments as for torch.nn.BatchNorm2d.

    It keeps working through `shutdown` and `init`, and through changes of the workers.
    """
    # Not a group of the world: that ends with the job, and the ranks would have to agree on the order of operations.
    group = cast(Group, _NamedCollectives())
    return batch_norm.SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats, group=group)


@final
class _NamedCollectives:
    """The part of Group that a batch norm uses, as operations that the ranks match by name."""

    @property
    def size(self) -> int:
        return context.size()

    def all_gather(self, out: Tensor, piece: Tensor) -> _FinishedWork:
        out.copy_(ops.synchronize(ops.allgather_async(piece, "sync_batch_norm.forward")))
        return _FinishedWork()

    def all_reduce(self, tensor: Tensor) -> _FinishedWork:
        ops.allreduce_(tensor, name="sync_batch_norm.backward", op=Sum)
        return _FinishedWork()


@final
class _FinishedWork:
    def wait(self, *_: object) -> None:
        """Returns at once: the collective has completed."""
