"""Delay compensation of asynchronous SGD (Zheng et al. 2017, DC-ASGD, arXiv 1609.08326).

A worker's gradient g was computed at older weights, `backup`. To first order, the gradient at today's weights w is
g + H (w - backup). DC-ASGD takes strength * g * g, elementwise, for the Hessian H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from headway.parallel.parallel_recipe import Compensate

EPSILON = 1e-7
"""Added to the mean square under the root (section 5 of the paper)."""


def compensate_constant(gradient: Tensor, weight: Tensor, backup: Tensor, strength: float) -> Tensor:
    """Returns g + strength * g * g * (w - backup): DC-ASGD-c. All tensors have one shape."""
    return gradient + strength * gradient * gradient * (weight - backup)


def compensate_adaptive(
    gradient: Tensor, weight: Tensor, backup: Tensor, mean_square: Tensor, strength: float
) -> Tensor:
    """Returns the gradient of DC-ASGD-a, whose strength is divided by the root of the gradient's mean square."""
    scale = strength / torch.sqrt(mean_square + EPSILON)
    return gradient + scale * gradient * gradient * (weight - backup)


def update_mean_square(mean_square: Tensor, gradient: Tensor, decay: float) -> None:
    """Moves the mean square of the gradients towards this one's, in place: decay * ms + (1 - decay) * g * g."""
    mean_square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)


class Compensation(Protocol):
    """A rule that corrects gradients of older weights."""

    def note_read(self, worker: int, weights: Sequence[Tensor]) -> None:
        """Remembers the weights that a worker has just read."""

    def forget(self, worker: int) -> None:
        """Forgets a worker that is gone."""

    def correct(
        self, worker: int, gradients: list[Tensor | None], weights: Sequence[Tensor], *, is_stale: bool
    ) -> float:
        """Corrects the gradients of a push in place of the list, before they are applied.

        Args:
            gradients: None for a weight without a gradient.
            is_stale: the weights have changed since the worker read them.

        Returns:
            The norm of what was added over the norm of the gradients.
        """

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint needs, by name."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores them."""


@final
class DelayCompensation:
    """One of the rules of DC-ASGD, or none, with one backup for each worker.

    The mean square is one for all workers, as the paper reads; the authors' code keeps one for each.

    Args:
        names: names of the weights.
        strength: lambda_0 of the paper, 0.04 for `constant` and 2 for `adaptive` there.
        decay: of the mean square; used by `adaptive`.
    """

    def __init__(
        self, rule: Compensate, names: Sequence[str], weights: Sequence[Tensor], *, strength: float, decay: float
    ) -> None:
        self._rule, self._names, self._strength, self._decay = rule, tuple(names), strength, decay
        self._backups: dict[int, list[Tensor]] = {}
        is_adaptive = rule == "adaptive"
        self._mean_squares = [torch.zeros_like(weight) for weight in weights] if is_adaptive else []

    def note_read(self, worker: int, weights: Sequence[Tensor]) -> None:
        """Keeps a copy of the weights that a worker has just read."""
        if self._rule == "none":
            return
        if worker not in self._backups:
            self._backups[worker] = [weight.clone() for weight in weights]
        else:
            torch._foreach_copy_(self._backups[worker], list(weights))

    def forget(self, worker: int) -> None:
        """Drops the copy of a worker that is gone."""
        self._backups.pop(worker, None)

    def correct(
        self, worker: int, gradients: list[Tensor | None], weights: Sequence[Tensor], *, is_stale: bool
    ) -> float:
        """Corrects the gradients of a push; see `Compensation.correct`."""
        added = total = 0.0
        for place, gradient in enumerate(gradients):
            if gradient is None or self._rule == "none":
                continue
            if self._mean_squares:
                update_mean_square(self._mean_squares[place], gradient, self._decay)
            # Without delay w = backup: skipped, so that one worker is SGD to the last bit, the sign of zeros included.
            if not is_stale:
                continue
            weight, backup = weights[place], self._backups[worker][place]
            if self._rule == "constant":
                corrected = compensate_constant(gradient, weight, backup, self._strength)
            else:
                mean_square = self._mean_squares[place]
                corrected = compensate_adaptive(gradient, weight, backup, mean_square, self._strength)
            added += float((corrected - gradient).double().square().sum())
            total += float(gradient.double().square().sum())
            gradients[place] = corrected
        return (added / total) ** 0.5 if total else 0.0

    def state(self) -> dict[str, Tensor]:
        """Returns the mean squares by the name of their weight. Backups are not needed: a drained worker reads anew."""
        return dict(zip(self._names, self._mean_squares, strict=True)) if self._mean_squares else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the mean squares, or sets them to zero if there are none, and drops all backups."""
        self._backups.clear()
        for name, mean_square in zip(self._names, self._mean_squares, strict=False):
            if name in tensors:
                mean_square.copy_(tensors[name])
            else:
                mean_square.zero_()
