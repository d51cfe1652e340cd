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
from headway.core.modules import convert_module, replace_modules, switch_to_evaluation


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
        min_samples, num_larger = divmod(len(x), num_groups := -(-len(x) // self.group))
        # One call of torch's kernels for each slice. On two CPU cores, channels last, 128 x 64 x 32 x 32 and groups of
        # 32, that takes 1.2 times as long as torch's batch norm; one call on a copy with groups as channels 3.8 times,
        # and `var_mean` 2.4 times. With 64 groups (8,192 x 8 x 16 x 16) it takes 0.9 times as long. Not tensor_split:
        # its backward pass makes a gradient of the whole input for each part, 16 times as slow with 64.
        groups = x.split([min_samples + 1] * num_larger + [min_samples] * (num_groups - num_larger))
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return torch.cat([self._normalise(group, None, None) for group in groups])
        means = self.running_mean.new_zeros(len(groups), self.num_features)
        variances = torch.zeros_like(means)
        output = torch.cat(
            [self._normalise(group, mean, var) for group, mean, var in zip(groups, means, variances, strict=True)]
        )
        self._update_running_statistics(min_samples, num_larger, means, variances)
        return output

    def _normalise(self, group_input: Tensor, mean: Tensor | None, var: Tensor | None) -> Tensor:
        """Returns one group normalised, and writes its mean and unbiased variance into `mean` and `var`."""
        return F.batch_norm(group_input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)

    @torch.no_grad()
    def _update_running_statistics(self, min_samples: int, num_larger: int, means: Tensor, variances: Tensor) -> None:
        """Updates the running statistics in place from those of the groups, [groups, C].

        A group has `min_samples` samples; each of the first `num_larger` groups has one more.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # One batch, however many groups it has.
        self.num_batches_tracked.add_(1)
        # Weighted by samples, as groups may differ by one.
        samples = min_samples * len(means) + num_larger
        batches = self.num_batches_tracked.to(means.dtype)
        for running, statistics in ((self.running_mean, means), (self.running_var, variances)):
            batch_statistic = (statistics.sum(0) * min_samples + statistics[:num_larger].sum(0)) / samples
            running.copy_(torch.lerp(running, batch_statistic, 1 / batches if self.momentum is None else self.momentum))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"a batch norm of {self.num_features} channels was given an input of shape {list(input.shape)}"
            raise UsageError(what, fix="It takes [samples, channels, ...].")


def convert_to_ghost(module: nn.Module, group: int) -> nn.Module:
    """Replaces every BatchNorm1d, 2d and 3d of a network in place by a GhostBatchNorm with groups of `group` samples.

    Parameters, buffers, their names, hooks and memory formats stay the same; an existing optimizer keeps working.

    Returns:
        The network. It is another object only if it is itself a batch norm.

    Raises:
        UsageError: a batch norm overrides `forward`, or the network has no batch norm.
    """
    list_batch_norms(module)
    return replace_modules(
        module,
        lambda submodule, name: (
            _convert_module(submodule, group, name) if isinstance(submodule, _BatchNorm) else submodule
        ),
    )


def set_momentum(module: nn.Module, kept_fraction: float) -> None:
    """Sets the momentum of every batch norm of a network to 1 - `kept_fraction`.

    Args:
        kept_fraction: fraction of the running statistics that a step keeps, as in a recipe.

    Raises:
        UsageError: the network has no batch norm.
    """
    for norm in list_batch_norms(module):
        norm.momentum = 1 - kept_fraction


def list_batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Returns the batch norms of a network. Raises UsageError if it has none."""
    norms = [submodule for submodule in module.modules() if isinstance(submodule, _BatchNorm)]
    if not norms:
        raise UsageError("the network has no batch norm", fix="Remove it, or take a network that has.")
    return norms


def list_running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Lists mean and variance of every batch norm, which each step averages over the ranks."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [value for norm in norms for value in norm.buffers(recurse=False) if value.is_floating_point()]


@contextmanager
def recompute_statistics(module: nn.Module) -> Iterator[None]:
    """Recomputes running statistics within the block, as means over all batches that the network gets there.

    Batch norms in evaluation mode keep theirs. All other modules are in evaluation mode, so no random number is drawn.
    Afterwards modes, momenta and counts of batches are as before.
    """
    active = [norm for norm in list_batch_norms(module) if norm.training and norm.track_running_stats]
    saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in active]
    with switch_to_evaluation(module):
        try:
            for norm in active:
                norm.train()
                # Without a momentum torch computes a plain mean, which starts over at a count of 0.
                norm.momentum, norm.num_batches_tracked = None, torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
            yield
        finally:
            for norm, momentum, count in saved:
                norm.momentum, norm.num_batches_tracked = momentum, count


def _convert_module(module: _BatchNorm, group: int, name: str) -> GhostBatchNorm:
    class_ = type(module)
    if class_.forward not in (_BatchNorm.forward, GhostBatchNorm.forward):
        what = f"{class_.__name__} is a batch norm with a forward pass of its own, which would be lost"
        raise UsageError(what, where=name, fix="Replace it by torch.nn.BatchNorm and what it adds, or leave it out.")
    ghost = convert_module(module, GhostBatchNorm)
    ghost.group = group
    return ghost
