"""SyncBatchNorm under Horovod's name: its exchanges are named operations like all others."""

from __future__ import annotations

from typing import cast, final

from torch import Tensor

from headway.comm import batch_norm
from headway.comm.hvd import context, ops
from headway.comm.hvd.reduce_op import Sum
from headway.core.world import Group


def SyncBatchNorm(  # noqa: N802 - Horovod's name
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> batch_norm.SyncBatchNorm:
    """A batch norm over the samples of all ranks, on CPU or CUDA; arguments are those of torch.nn.BatchNorm2d.

    It follows the job through `shutdown` and `init`, and through changes of the workers.
    """
    ranks = cast(Group, _NamedCollectives())
    return batch_norm.SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats, group=ranks)


@final
class _NamedCollectives:
    """What a batch norm needs of a Group, as operations that the ranks agree on before."""

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
    def wait(self) -> None:
        """It has ended."""
