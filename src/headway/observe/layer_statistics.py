"""Norms of each layer's weights, gradient and step, measured around one step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

# For each layer: |w| before the step, |g| as the optimizer got it, |dw|, and the local learning rate.
COLUMNS = ("weight", "gradient", "step", "local_rate")

LocalRates = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]
"""(parameters after the step, before the step, norms of gradients [n]) -> one local learning rate each, [n]."""


class StepOwners(Protocol):
    """Says which rank steps a parameter, where each rank steps only some."""

    def is_elsewhere(self, name: str) -> bool:
        """Returns True if another rank steps a parameter."""

    def add_up(self, values: Tensor, tag: str) -> None:
        """Adds up a tensor over all ranks, in place."""


@final
class LayerStatistics:
    """Measures the layers of a network: trained parameters of two or more dimensions, as for LARS.

    `arm` registers hooks for the next optimizer step, which remove themselves; all other steps cost nothing. The
    measured step keeps a copy of the weights, and reads weights and gradients twice. There is no host-device sync
    before `read`.

    Args:
        named_parameters: (name, parameter) pairs, as the optimizer has them: the masters of a 16-bit network.
        optimizer: Steps the parameters.
        compute_local_rates: Computes local learning rates of the optimizer; see `headway.optim.layer_rates`.
        owners: Owners of the parameters, if each rank steps its own only; then every rank measures.

    Attributes:
        names: Names of the layers.
        sizes: Number of weights of each layer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        optimizer: Optimizer,
        compute_local_rates: LocalRates,
        *,
        owners: StepOwners | None = None,
    ) -> None:
        stepped_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [
            (name, parameter)
            for name, parameter in named_parameters
            if parameter.requires_grad and id(parameter) in stepped_ids
        ]
        self.names = tuple(name for name, parameter in trained if parameter.ndim > 1)
        self._layers = [parameter for _, parameter in trained if parameter.ndim > 1]
        self.sizes = tuple(layer.numel() for layer in self._layers)
        self._parameters = [parameter for _, parameter in trained]
        self._layer_indices = [index for index, parameter in enumerate(self._parameters) if parameter.ndim > 1]
        self._optimizer = optimizer
        self._compute_local_rates = compute_local_rates
        self._owners = owners
        self._weights_before: list[Tensor] = []
        self._gradient_norms = self._total_gradient_norm = torch.empty(0)
        self._statistics: Tensor | None = None
        self._handles: list[Any] = []

    def measure_weights(self) -> list[float]:
        """Returns the present |w| of each layer. This is a host-device sync."""
        norms: list[float] = (
            torch.stack(torch._foreach_norm([layer.detach() for layer in self._layers])).tolist()
            if self._layers
            else []
        )
        return norms

    def arm(self) -> None:
        """Prepares to measure the next optimizer step."""
        # A step that was armed for may not have come, and two pairs of hooks would measure twice.
        self.disarm()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    def disarm(self) -> None:
        """Removes the hooks if the step did not happen."""
        for handle in self._handles:
            handle.remove()
        # Before the step for weights and gradient, after it for the change.
        self._handles = []
        self._weights_before = []

    def read(self) -> tuple[NDArray[np.float32], float] | None:
        """Returns ([layers, COLUMNS], norm of the whole gradient) of the measured step; None if none was measured.

        If loss scaling skipped the step, the gradient is not finite and |dw| is 0. This is a host-device sync. A second
        call returns None.
        """
        # Forgotten once read, so that an old measurement is never logged for a later step.
        statistics, self._statistics = self._statistics, None
        if statistics is None:
            return None
        *rows, total = statistics.cpu().numpy().astype(np.float32)
        return np.stack(rows).reshape(-1, len(COLUMNS)) if rows else np.empty((0, 4), np.float32), float(total[0])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._layers:
            return
        gradient_norms = _compute_gradient_norms(self._parameters)
        # In fp16 a fused optimizer removes the loss scale itself, after this hook.
        if (grad_scale := getattr(optimizer, "grad_scale", None)) is not None:
            gradient_norms = gradient_norms / grad_scale.to(gradient_norms.device, gradient_norms.dtype).reshape(())
        if self._owners is not None:
            # Gradients are with their owners; the others added zeros.
            self._owners.add_up(gradient_norms, "norms of the layers' gradients")
        self._total_gradient_norm = torch.linalg.vector_norm(gradient_norms)
        self._gradient_norms = gradient_norms[self._layer_indices]
        # The step changes the weights in place.
        self._weights_before = [layer.detach().clone() for layer in self._layers]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        weights_before = self._weights_before
        layers = [layer.detach() for layer in self._layers]
        if weights_before:
            w = torch.stack(torch._foreach_norm(weights_before)).double()
            dw = torch.stack(torch._foreach_norm(torch._foreach_sub(layers, weights_before))).double()
            rates = self._compute_local_rates(self._layers, weights_before, self._gradient_norms)
            if self._owners is not None:
                dw, rates = self._share_steps(dw, rates)
            table = torch.stack([w, self._gradient_norms, dw, rates], 1)
            # The norm of the whole gradient is one more row, so that there is a single copy to the host.
            total = torch.full_like(table[:1], torch.nan)
            total[0, 0] = self._total_gradient_norm
            self._statistics = torch.cat([table, total])
        self.disarm()

    def _share_steps(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Returns numbers of each layer's step, [n], as the rank that made the step has them."""
        assert self._owners is not None
        is_elsewhere = torch.tensor([self._owners.is_elsewhere(name) for name in self.names], device=columns[0].device)
        # Weights of the others have not come yet, and rates may need the optimizer's state.
        table = torch.stack(columns).masked_fill(is_elsewhere, 0)
        self._owners.add_up(table, "steps of the layers")
        return table.unbind()


def _compute_gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Returns gradient norms, float64 [n], summed in at least float32; 0 for a parameter without a gradient."""
    grads = [parameter.new_zeros(1) if parameter.grad is None else parameter.grad for parameter in parameters]
    dtype = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    return torch.stack(torch._foreach_norm(grads, 2.0, dtype)).double()
