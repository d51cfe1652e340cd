"""OuterOptimizer: one step of all ranks together, by the mean of the changes that each of them made alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import CheckpointError

PREFIX = "outer/"
"""Prefix of the momentum's names in a checkpoint."""


@final
class OuterOptimizer:
    """Steps the weights that all ranks had at the beginning of a round by the mean of the ranks' changes.

    The outer gradient of a rank is its weights then minus its weights now: against the direction of its steps, as a
    gradient is. SGD with Nesterov's momentum steps the weights of then by the mean of these gradients. With `lr` 1 and
    no momentum, the new weights are the mean of the ranks' weights: local SGD (Stich 2018, arXiv 1805.09767). With 0.7
    and 0.9 it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    In each round: `begin_round`; each rank's own steps; `put_gradients`; sum the gradients over the ranks, for example
    by `Reducer.finish`; `step`. A failed sum changes nothing: put the gradients again.

    Args:
        parameters: (name, parameter) of the network, or of its fp32 masters; the trained ones count. Differences are
            computed in their type. One that is frozen when `put_gradients` is called has no gradient, and stays.
        lr, momentum: of the outer optimizer.

    Memory: a copy of the weights, and with momentum a second one.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], *, lr: float = 1.0, momentum: float = 0.0) -> None:
        self._lr, self._momentum = lr, momentum
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._starts = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._buffers = {name: torch.zeros_like(start) for name, start in self._starts.items() if momentum}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self._parameters)

    @property
    def takes_mean(self) -> bool:
        """True if the new weights are the mean of the ranks' weights."""
        return self._lr == 1 and not self._momentum

    @torch.no_grad()
    def begin_round(self) -> None:
        """Keeps a copy of the weights, which all ranks have now."""
        torch._foreach_copy_(list(self._starts.values()), list(self._parameters.values()))

    @torch.no_grad()
    def put_gradients(self, share: float) -> None:
        """Puts this rank's part of the outer gradient into `grad` of each parameter.

        Args:
            share: samples that this rank trained in the round over those of all ranks; 0 if it has just joined.
        """
        for name, parameter in self._parameters.items():
            parameter.grad = (self._starts[name] - parameter).mul_(share) if parameter.requires_grad else None

    @torch.no_grad()
    def measure_gradients(self) -> Tensor:
        """Measures the squared length of the gradients together, a scalar on their device."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not gradients:
            return torch.zeros(())
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    @torch.no_grad()
    def step(self, total: float = 1.0) -> None:
        """Steps by the summed gradients, and removes them.

        Args:
            total: sum of the ranks' shares; below 1 if a rank was lost in the round.
        """
        names = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        starts, parameters = [self._starts[name] for name in names], [self._parameters[name] for name in names]
        put: list[Any] = [parameter.grad for parameter in parameters]
        gradients = list(torch._foreach_div(put, total))
        if self._momentum:
            buffers = [self._buffers[name] for name in names]
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, gradients)
            # Nesterov's momentum, as torch.optim.SGD has it.
            torch._foreach_add_(gradients, buffers, alpha=self._momentum)
        torch._foreach_add_(starts, gradients, alpha=-self._lr)
        torch._foreach_copy_(parameters, starts)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Removes the gradients, and leaves the weights as they are."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Gives the network the weights of the round's beginning for the duration of the block."""
        with torch.no_grad():
            now = {name: parameter.clone() for name, parameter in self._parameters.items()}
            for name, parameter in self._parameters.items():
                parameter.copy_(self._starts[name])
            try:
                yield
            finally:
                for name, parameter in self._parameters.items():
                    parameter.copy_(now[name])

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint, saved between two rounds: the momentum, not copied."""
        return {PREFIX + name: buffer for name, buffer in self._buffers.items()}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restores the result of `state`, in place. Raises CheckpointError: it belongs to another network.

        Args:
            where: the checkpoint, for the error.
        """
        for name, buffer in self._buffers.items():
            if PREFIX + name not in tensors or tensors[PREFIX + name].shape != buffer.shape:
                what = f"its outer momentum of {name!r} is missing or has another shape"
                raise CheckpointError(what, where=where)
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[PREFIX + name])
