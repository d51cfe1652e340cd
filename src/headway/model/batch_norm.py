"""Batch norm: ghost batches, momentum, and recomputed statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from headway.core.errors import UsageError
from headway.core.modules import replace_modules, switch_to_evaluation


@final
class GhostBatchNorm(_BatchNorm):
    """Batch norm over groups of a batch's samples, for inputs [N, C, ...] (Hoffer et al. 2017, arXiv 1705.08741).

    In training, the batch is divided in its order into the fewest groups of at most `group` samples. Sizes differ by at
    most one, as a rest of one sample would have no statistics. Each group is normalised by its own mean and variance.
    The running statistics move towards the mean of the groups, weighted by their samples (in Hoffer's version the
    groups count one after the other, which differs by the order of momentum squared). With a group no smaller than the
    batch, and in evaluation, it is torch's batch norm, to the last bit.

    Args:
        num_features: C; this and the other arguments are torch's.
        group: largest number of samples in a group.

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
        group: int,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) <= self.group:
            return super().forward(x)
        self._check_input_dim(x)
        least, larger = divmod(len(x), groups := -(-len(x) // self.group))
        # One call of torch's kernels for each slice. On two CPU cores, channels last, 128 x 64 x 32 x 32 and groups of
        # 32, that takes 1.2 times as long as torch's batch norm; one call on a copy with groups as channels 3.8 times,
        # and `var_mean` 2.4 times. With 64 groups (8,192 x 8 x 16 x 16) it takes 0.9 times as long. Not tensor_split:
        # its backward pass makes a gradient of the whole input for each part, 16 times as slow with 64.
        parts = x.split([least + 1] * larger + [least] * (groups - larger))
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return torch.cat([self._normalise(part, None, None) for part in parts])
        means = self.running_mean.new_zeros(len(parts), self.num_features)
        variances = torch.zeros_like(means)
        out = torch.cat(
            [self._normalise(part, mean, var) for part, mean, var in zip(parts, means, variances, strict=True)]
        )
        self._update_running_statistics(least, larger, means, variances)
        return out

    def _normalise(self, part: Tensor, mean: Tensor | None, var: Tensor | None) -> Tensor:
        """Normalises one group, and writes its mean and unbiased variance into `mean` and `var`."""
        return F.batch_norm(part, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)

    @torch.no_grad()
    def _update_running_statistics(self, least: int, larger: int, means: Tensor, variances: Tensor) -> None:
        """Moves the running statistics. The groups have `least` samples, the first `larger` of them one more."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # One batch, however many groups it has.
        self.num_batches_tracked.add_(1)
        # Weighted by samples, as groups may differ by one.
        samples = least * len(means) + larger
        batches = self.num_batches_tracked.to(means.dtype)
        for running, found in ((self.running_mean, means), (self.running_var, variances)):
            now = (found.sum(0) * least + found[:larger].sum(0)) / samples
            running.copy_(torch.lerp(running, now, 1 / batches if self.momentum is None else self.momentum))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"a batch norm of {self.num_features} channels was given an input of shape {list(input.shape)}"
            raise UsageError(what, fix="It takes [samples, channels, ...].")


def convert_to_ghost(module: nn.Module, group: int) -> nn.Module:
    """Replaces every BatchNorm1d, 2d and 3d of a network by a GhostBatchNorm with groups of `group` samples.

    Parameters, buffers, their names, hooks and memory formats stay the same; an existing optimizer keeps working.

    Returns:
        the network; another object only if it is itself a batch norm.

    Raises:
        UsageError: a batch norm has a forward pass of its own, or the network has no batch norm.
    """
    list_batch_norms(module)
    return replace_modules(
        module, lambda one, name: _to_ghost(one, group, name) if isinstance(one, _BatchNorm) else one
    )


def set_momentum(module: nn.Module, kept: float) -> None:
    """Sets the share of the running statistics that every batch norm of a network keeps in a step.

    Raises:
        UsageError: the network has no batch norm.
    """
    for norm in list_batch_norms(module):
        norm.momentum = 1 - kept


def list_batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Lists the batch norms of a network. Raises UsageError if it has none."""
    found = [one for one in module.modules() if isinstance(one, _BatchNorm)]
    if not found:
        raise UsageError("the network has no batch norm", fix="Remove it, or take a network that has.")
    return found


def list_running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Lists mean and variance of every batch norm, which each step averages over the ranks."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [value for norm in norms for value in norm.buffers(recurse=False) if value.is_floating_point()]


@contextmanager
def recompute_statistics(module: nn.Module) -> Iterator[None]:
    """Recomputes running statistics within the block: they become plain means over the batches that the network gets.

    Batch norms in evaluation mode keep theirs. All other modules are in evaluation mode, so no random number is drawn.
    Afterwards modes, momenta and counts of batches are as before.
    """
    active = [one for one in list_batch_norms(module) if one.training and one.track_running_stats]
    kept = [(one, one.momentum, one.num_batches_tracked) for one in active]
    with switch_to_evaluation(module):
        try:
            for norm in active:
                norm.train()
                # Without a momentum torch computes a plain mean, which starts over at a count of 0.
                norm.momentum, norm.num_batches_tracked = None, torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
            yield
        finally:
            for norm, momentum, count in kept:
                norm.momentum, norm.num_batches_tracked = momentum, count


def _to_ghost(module: _BatchNorm, group: int, name: str) -> GhostBatchNorm:
    kind = type(module)
    if kind.forward not in (_BatchNorm.forward, GhostBatchNorm.forward):
        what = f"{kind.__name__} is a batch norm with a forward pass of its own, which would be lost"
        raise UsageError(what, where=name, fix="Replace it by torch.nn.BatchNorm and what it adds, or leave it out.")
    # Sharing the dictionary keeps parameters, buffers and hooks the same objects.
    new = GhostBatchNorm.__new__(GhostBatchNorm)
    new.__dict__.update(module.__dict__)
    new.group = group
    return new
