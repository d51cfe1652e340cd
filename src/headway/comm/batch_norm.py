"""Batch norm with statistics over all ranks of a group."""

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

# Statistics per rank are the default (torch's own BatchNorm): they cost no communication, and their extra noise
# regularises (ghost batches: Hoffer et al. 2017, "Train longer, generalize better"). Statistics over all ranks pay off
# when each rank has fewer than about 16 samples, as in detection, segmentation and 3-d images (Wu and He 2018, "Group
# Normalization", figure 1).

HALF_TYPES = (torch.float16, torch.bfloat16)


@final
class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks of a group, for inputs [N, C, ...] on CPU or CUDA.

    N ranks give the outputs, input gradients and running statistics of one rank on the joined batch. Batch sizes may
    differ between ranks, and be 0 on some. The gradients of weight and bias cover the rank's own samples: the reducer
    sums them like all others. Parameters, buffers and state dict are those of torch.nn.BatchNorm*. In evaluation, and
    in a group of one rank, it is torch's batch norm without communication.

    A forward pass costs one all-gather of 2 C + 1 numbers per rank, in float32 (float64 for such input), and a
    backward pass one all-reduce of 2 C numbers. Half-precision inputs keep their type, with float32 statistics. There
    is no second derivative.

    Args:
        num_features: C. The arguments up to `dtype` are those of torch.nn.BatchNorm2d.
        group: the ranks. Give it a group of its own: its collectives run between those of the gradients.

    Raises:
        UsageError: the input has fewer than two dimensions, or another number of channels.
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
        # Everything but the group: connections cannot be copied.
        other = memo[id(self)] = SyncBatchNorm.__new__(SyncBatchNorm)
        memo[id(self.group)] = self.group
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1 or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        arguments = (x, self.weight, self.bias, self.eps, self.group)
        out, mean, var, count = _SyncBatchNormFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        self._update_running_statistics(mean, var, count)
        return out  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"a batch norm of {self.num_features} channels was given an input of shape {list(input.shape)}"
            raise UsageError(what, fix=f"Give it [samples, {self.num_features}, ...].")

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        # As torch does: with the unbiased variance, and by a plain average if momentum is None.
        running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.track_running_stats or running_mean is None or running_var is None or batches is None:
            return
        # 0 in a step without a sample on any rank, which must change nothing. A tensor: no host-device sync.
        has_samples = (count > 0).to(mean.dtype)
        batches.add_(has_samples.to(batches.dtype))
        rate = 1 / batches.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            running.copy_(torch.lerp(running.to(now.dtype), now, rate * has_samples))


class _SyncBatchNormFunction(torch.autograd.Function):
    """(x, weight, bias, eps, group) -> (y, mean [C], biased variance [C], number of values per channel [])."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _combine_statistics(_compute_local_statistics(x), group)
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
        if x.numel():
            # torch's own kernel gives the sums of dy * xhat and of dy over this rank's samples.
            mask = [False, True, True]
            gradients = torch.ops.aten.native_batch_norm_backward(
                grad, x, None, None, None, mean, inverse, True, 0.0, mask
            )
            sums[0], sums[1] = gradients[1], gradients[2]
        own = [None, None] if weight is None else [row.to(weight.dtype, copy=True) for row in sums]
        if not ctx.needs_input_grad[0]:
            return None, own[0], own[1], None, None
        ctx.group.all_reduce(sums.view(-1)).wait()
        mean_dy_xhat, mean_dy = sums / count.clamp(min=1)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), as one linear function of dy and x per channel.
        shape = (1, -1) + (1,) * (x.dim() - 2)
        by_grad = inverse if weight is None else inverse * weight.to(inverse.dtype)
        by_x = -by_grad * inverse * mean_dy_xhat
        constant = -by_grad * mean_dy - by_x * mean
        out = torch.addcmul(constant.view(shape), x, by_x.view(shape)).addcmul_(grad, by_grad.view(shape))
        return out.to(x.dtype), own[0], own[1], None, None


def _compute_local_statistics(x: Tensor) -> Tensor:
    # Mean and sum of squared distances from it per channel, and the number of values: [2 C + 1].
    wide = x.float() if x.dtype in HALF_TYPES else x
    count = x.numel() // x.shape[1]
    if count == 0:
        return wide.new_zeros(2 * x.shape[1] + 1)
    var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat([mean, var * count, wide.new_full((1,), count)])


def _combine_statistics(mine: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    # One all-gather for mean, biased variance and count over the group.
    everyone = mine.new_empty(group.size * len(mine))
    group.all_gather(everyone, mine).wait()
    rows, channels = everyone.view(group.size, -1), len(mine) // 2
    # Means and squared distances do not cancel as raw squares would (Chan, Golub and LeVeque 1979, "Updating Formulae
    # and a Pairwise Algorithm", eq. 2.1).
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (means * counts).sum(0) / divisor
    var = (squares + counts * (means - mean).square()).sum(0) / divisor
    return mean, var, count


def convert_sync(module: nn.Module, group: Group) -> nn.Module:
    """Replaces every BatchNorm1d, 2d, 3d and SyncBatchNorm of a network by a SyncBatchNorm over `group`.

    Parameters, buffers, hooks, the training flag and memory formats are kept, and existing optimizers keep working.
    Layers that are already Headway's SyncBatchNorm change their group: call this again after ranks were lost.

    Returns:
        the same network; a new module only if the network itself is a batch norm.

    Raises:
        UsageError: a batch norm has its own forward pass, or is a LazyBatchNorm that has seen no batch yet.
    """
    return replace_modules(
        module, lambda one, name: _convert_one(one, group, name) if isinstance(one, _BatchNorm) else one
    )


def _convert_one(module: _BatchNorm, group: Group, name: str) -> SyncBatchNorm:
    kind = type(module)
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        what = f"{kind.__name__} is a batch norm with a forward pass of its own, which conversion would drop"
        fix = "Split it into torch.nn.BatchNorm and a module for its addition, or exclude it from conversion."
        raise UsageError(what, where=name, fix=fix)
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        what = f"{kind.__name__} does not know its number of channels yet"
        raise UsageError(what, where=name, fix="Run one batch through the network first.")
    if isinstance(module, SyncBatchNorm):
        module.group = group
        return module
    # The new layer shares the dict entries of the old one: an optimizer or hook that holds them keeps working.
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    made.__dict__.update(module.__dict__)
    made.group = group
    return made
