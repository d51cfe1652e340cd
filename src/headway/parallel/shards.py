"""Division of a network's weights over the servers of asynchronous training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from headway.core.owner_shares import assign_largest_first
from headway.parallel.compensate import Compensation


def divide_tensors(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """Divides tensors over servers, whole ones, so that the largest share is small; each keeps the tensors' order.

    Args:
        sizes: bytes of each tensor by name.
    """
    owners = assign_largest_first(list(sizes.values()), servers)
    return [[name for name, owner in zip(sizes, owners, strict=True) if owner == server] for server in range(servers)]


@final
class WeightShard:
    """The weights of one server. Its methods are called by one thread at a time.

    Args:
        weights: name and tensor of each weight, which require gradients; stepped in place.
        step: sets the learning rate and steps the optimizer over the weights that have a gradient.
        compensation: corrects gradients of older weights.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], step: Callable[[float], None], compensation: Compensation
    ) -> None:
        self.names, self.weights = tuple(weights), list(weights.values())
        self.compensation, self._step = compensation, step

    def apply(self, worker: int, gradients: Sequence[Tensor | None], lr: float, *, is_stale: bool) -> float:
        """Applies a worker's gradients.

        Args:
            is_stale: the weights have changed since the worker read them.

        Returns:
            Relative size of the compensation.
        """
        with torch.no_grad():
            corrected = list(gradients)
            ratio = self.compensation.correct(worker, corrected, self.weights, is_stale=is_stale)
        for weight, gradient in zip(self.weights, corrected, strict=True):
            weight.grad = gradient
        self._step(lr)
        for weight in self.weights:
            weight.grad = None
        return ratio

    @torch.no_grad()
    def note_read(self, worker: int) -> None:
        """Remembers the weights as those that a worker reads now."""
        self.compensation.note_read(worker, self.weights)

    def forget(self, worker: int) -> None:
        """Forgets a worker that is gone."""
        self.compensation.forget(worker)
