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
from headway.core.group import Group
from headway.core.modules import convert_module, replace_modules

# Statistics per rank are the default (torch's own BatchNorm): they cost no communication, and their extra noise
# regularises (ghost batches: Hoffer et al. 2017, "Train longer, generalize better"). Statistics over all ranks pay off
# when each rank has fewer than about 16 samples, as in detection, segmentation and 3-d images (Wu and He 2018, "Group
# Normalization", figure 1).

HALF_DTYPES = (torch.float16, torch.bfloat16)


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
        clone = memo[id(self)] = SyncBatchNorm.__new__(SyncBatchNorm)
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1 or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        out, mean, var, count = normalise_batch(x, self.weight, self.bias, self.eps, self.group)
        self._update_running_statistics(mean, var, count)
        return out

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"a batch norm of {self.num_features} channels was given an input of shape {list(input.shape)}"
            raise UsageError(what, fix=f"Give it [samples, {self.num_features}, ...].")

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        # As torch does: with the unbiased variance, and by a plain average if momentum is None.
        running_mean, running_var, num_batches = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.track_running_stats or running_mean is None or running_var is None or num_batches is None:
            return
        # 0 in a step without a sample on any rank, which must change nothing. A tensor: no host-device sync.
        has_samples = (count > 0).to(mean.dtype)
        num_batches.add_(has_samples.to(num_batches.dtype))
        momentum = 1 / num_batches.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        update_running_statistics(running_mean, running_var, mean, var, count, momentum)


def normalise_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalises a batch by the statistics of all ranks of a group, with gradients.

    Returns (outputs, mean [C], biased variance [C], number of values per channel []).
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _SyncBatchNormFunction.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, eps, group
    )
    return found


@torch.no_grad()
def update_running_statistics(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, count: Tensor, momentum: float | Tensor
) -> None:
    """Updates running statistics as torch does: with the unbiased variance, and not by a batch without values."""
    share = momentum * (count > 0).to(mean.dtype)
    unbiased_var = var * (count / (count - 1).clamp(min=1))
    for running, current in ((running_mean, mean), (running_var, unbiased_var)):
        running.copy_(torch.lerp(running.to(current.dtype), current, share))


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
        x, weight, mean, inv_std, count = ctx.saved_tensors
        sums = torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
        if x.numel():
            # torch's own kernel gives the sums of dy * xhat and of dy over this rank's samples. They do not depend on
            # the weight, but without one the CUDA kernel gives no sums (torch 2.11).
            mask = [False, True, True]
            _, sums[0], sums[1] = torch.ops.aten.native_batch_norm_backward(
                grad, x, torch.ones_like(mean), None, None, mean, inv_std, True, 0.0, mask
            )
        grad_weight, grad_bias = (None if weight is None else row.to(weight.dtype, copy=True) for row in sums)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None
        ctx.group.all_reduce(sums.view(-1)).wait("statistics")
        mean_dy_xhat, mean_dy = sums / count.clamp(min=1)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), as one linear function of dy and x per channel.
        shape = (1, -1) + (1,) * (x.dim() - 2)
        dy_factor = inv_std if weight is None else inv_std * weight.to(inv_std.dtype)
        x_factor = -dy_factor * inv_std * mean_dy_xhat
        offset = -dy_factor * mean_dy - x_factor * mean
        grad_x = torch.addcmul(offset.view(shape), x, x_factor.view(shape)).addcmul_(grad, dy_factor.view(shape))
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


def _compute_local_statistics(x: Tensor) -> Tensor:
    """Returns mean and sum of squared deviations per channel, and the number of values per channel: [2 C + 1]."""
    x = x.float() if x.dtype in HALF_DTYPES else x
    count = x.numel() // x.shape[1]
    if count == 0:
        return x.new_zeros(2 * x.shape[1] + 1)
    var, mean = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=0)
    return torch.cat([mean, var * count, x.new_full((1,), count)])


def _combine_statistics(local_stats: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean [C], biased variance [C] and count over the group, by one all-gather of `local_stats`."""
    all_stats = local_stats.new_empty(group.size, len(local_stats))
    group.all_gather(all_stats.view(-1), local_stats).wait("statistics")
    channels = len(local_stats) // 2
    # Means and squared deviations do not cancel as raw squares would (Chan, Golub and LeVeque 1979, "Updating Formulae
    # and a Pairwise Algorithm", eq. 2.1).
    means, squares, counts = all_stats[:, :channels], all_stats[:, channels:-1], all_stats[:, -1:]
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (means * counts).sum(0) / divisor
    var = (squares + counts * (means - mean).square()).sum(0) / divisor
    return mean, var, count


def convert_sync_batchnorm(module: nn.Module, group: Group) -> nn.Module:
    """Replaces every BatchNorm1d, 2d, 3d and SyncBatchNorm of a network by a SyncBatchNorm over `group`.

    Parameters, buffers, hooks, the training flag and memory formats are kept, and existing optimizers keep working.
    Layers that are already Headway's SyncBatchNorm change their group: call this again after ranks were lost.

    Returns:
        the same network; a new module only if the network itself is a batch norm.

    Raises:
        UsageError: a batch norm has its own forward pass, or is a LazyBatchNorm that has seen no batch yet.
    """
    return replace_modules(
        module, lambda child, name: _convert_batch_norm(child, group, name) if isinstance(child, _BatchNorm) else child
    )


def _convert_batch_norm(module: _BatchNorm, group: Group, name: str) -> SyncBatchNorm:
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
    converted = convert_module(module, SyncBatchNorm)
    converted.group = group
    return converted
