"""Losses of a network's own layers, which training adds to the loss of the task."""

from __future__ import annotations

from typing import Protocol, final, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class HasAuxiliaryLoss(Protocol):
    """A module with a loss of its own, such as one that keeps the load of experts even.

    Training adds it to the task's loss as it is: not divided by the batch, and not multiplied by the number of
    processes. So it must be the loss of the whole batch. If micro-batches divide a step, their losses are averaged: the
    result is not the loss of all samples together where that is no mean over samples.
    """

    def pop_auxiliary_loss(self) -> Tensor | None:
        """Returns the loss of the newest forward pass, a scalar, and forgets it; None if that pass was evaluation."""


@final
class AuxiliaryLosses:
    """The modules of a network that have a loss of their own."""

    def __init__(self, network: nn.Module) -> None:
        self._modules = [module for module in network.modules() if isinstance(module, HasAuxiliaryLoss)]

    def pop(self, parts: int = 1) -> Tensor | None:
        """Returns the sum of their losses in the newest forward pass; None if there is none.

        Every process adds the whole of it to its loss: its gradient is that of the process's own samples.

        Args:
            parts: micro-batches of the step, over which the losses are averaged.
        """
        total = None
        for module in self._modules:
            loss = module.pop_auxiliary_loss()
            if loss is not None:
                total = loss if total is None else total + loss
        return None if total is None else total / parts
