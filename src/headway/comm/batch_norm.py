"""Batch norm whose statistics are those of all ranks of a group.

Per-rank statistics are what torch's own BatchNorm computes; they are the default, cost no communication, and their
extra noise regularises (ghost batches: Hoffer et al. 2017, "Train longer, generalize better"). Statistics over ranks
pay where a rank has few samples: detection, segmentation, 3-d images; below 16 or so per rank (Wu and He 2018, "Group
Normalization", figure 1).
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from headway.core.errors import UsageError
from headway.core.modules import replace_modules
from headway.core.world import Group

HALVES = (torch.float16, torch.bfloat16)


@final
class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks of a group, for inputs [N, C, ...] on CPU or CUDA.

    N ranks give what one rank gives on the joined batch: outputs, input gradients, running statistics. Batches may
    differ in size from rank to rank, and be empty on some. Gradients of weight and bias are of the rank's own samples:
    the reducer adds them up like all others. Parameters, buffers and state dict are those of torch.nn.BatchNorm*. In
    evaluation, and in a group of one, it is torch's batch norm and exchanges nothing.

    A forward pass costs one all-gather of 2 C + 1 numbers a rank, in float32 (float64 for such input), and a backward
    pass one all-reduce of 2 C. Half-precision inputs keep their type, with float32 statistics. There is no second
    derivative.

    Args:
        num_features: C; and so on, as in torch.
        group: the ranks; best one of its own, since its collectives come between those of the gradients.

    Raises:
        UsageError: an input of fewer than two dimensions, or with another number of channels.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy that shares the group: connections have no copies."""
        other = memo[id(self)] = SyncBatchNorm.__new__(SyncBatchNorm)
        memo[id(self.group)] = self.group
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1 or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        arguments = (x, self.weight, self.bias, self.eps, self.group)
        out, mean, var, count = _Synchronised.apply(*arguments)  # type: ignore[no-untyped-call]
        self._track(mean, var, count)
        return out  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"a batch norm of {self.num_features} channels was given an input of shape {list(input.shape)}"
            raise UsageError(what, fix="It takes [samples, channels, ...].")

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """As torch does: the unbiased variance, and a plain average where momentum is None. A step without a sample
        on any rank changes nothing."""
        running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.track_running_stats or running_mean is None or running_var is None or batches is None:
            return
        some = (count > 0).to(mean.dtype)
        batches.add_(some.to(batches.dtype))
        rate = 1 / batches.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            running.copy_(torch.lerp(running.to(now.dtype), now, rate * some))


class _Synchronised(torch.autograd.Function):
    """(x, weight, bias, eps, group) -> (y, mean [C], biased variance [C], number of values a channel [])."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _combined(_local(x), group)
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        out = F.batch_norm(x, mean, var, scale, shift, training=False, eps=eps)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return out, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        sums = torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
        if x.numel():  # torch's own reduction: sums of dy * xhat and of dy
            mask = [False, True, True]
            found = torch.ops.aten.native_batch_norm_backward(grad, x, None, None, None, mean, inverse, True, 0.0, mask)
            sums[0], sums[1] = found[1], found[2]
        own = [None, None] if weight is None else [row.to(weight.dtype, copy=True) for row in sums]
        if not ctx.needs_input_grad[0]:
            return None, own[0], own[1], None, None
        ctx.group.all_reduce(sums.view(-1)).wait()
        along, level = sums / count.clamp(min=1)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), as one line in dy and x for each channel.
        shape = (1, -1) + (1,) * (x.dim() - 2)
        by_grad = inverse if weight is None else inverse * weight.to(inverse.dtype)
        by_x = -by_grad * inverse * along
        rest = -by_grad * level - by_x * mean
        out = torch.addcmul(rest.view(shape), x, by_x.view(shape)).addcmul_(grad, by_grad.view(shape))
        return out.to(x.dtype), own[0], own[1], None, None


def _local(x: Tensor) -> Tensor:
    """This rank's mean of each channel, sum of squared distances from it, and number of values: [2 C + 1]."""
    wide = x.float() if x.dtype in HALVES else x
    count = x.numel() // x.shape[1]
    if count == 0:
        return wide.new_zeros(2 * x.shape[1] + 1)
    var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat([mean, var * count, wide.new_full((1,), count)])


def _combined(mine: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count over the group, from means and squared distances, which do not cancel as raw
    squares would (Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm", eq. 2.1)."""
    everyone = mine.new_empty(group.size * len(mine))
    group.all_gather(everyone, mine).wait()
    rows, channels = everyone.view(group.size, -1), len(mine) // 2
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    some = count.clamp(min=1)
    mean = (means * counts).sum(0) / some
    var = (squares + counts * (means - mean).square()).sum(0) / some
    return mean, var, count


def convert_sync(module: nn.Module, group: Group) -> nn.Module:
    """Puts a SyncBatchNorm over `group` in the place of every BatchNorm1d, 2d, 3d and SyncBatchNorm of a network.

    Parameters, buffers, hooks, the training flag and memory formats stay what they are; an optimizer made before keeps
    working. A SyncBatchNorm of ours changes its group: after members were lost, call it again with the new one.

    Returns:
        the network; another object only where it is itself a batch norm.

    Raises:
        UsageError: a batch norm with a forward pass of its own, or a LazyBatchNorm that has seen no batch yet.
    """
    return replace_modules(
        module, lambda one, name: _synchronised(one, group, name) if isinstance(one, _BatchNorm) else one
    )


def _synchronised(module: _BatchNorm, group: Group, name: str) -> SyncBatchNorm:
    kind = type(module)
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        what = f"{kind.__name__} is a batch norm with a forward pass of its own, which would be lost"
        raise UsageError(what, where=name, fix="Replace it by torch.nn.BatchNorm and what it adds, or leave it out.")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        what = f"{kind.__name__} does not know its number of channels yet"
        raise UsageError(what, where=name, fix="Run one batch through the network before.")
    if isinstance(module, SyncBatchNorm):
        module.group = group
        return module
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    made.__dict__.update(module.__dict__)
    made.group = group
    return made
