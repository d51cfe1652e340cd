"""Norms of each layer's weights, gradient and step, measured around one step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

# For each layer: |w| before the step, |g| as the optimizer got it, |dw|, and the result of `local`.
COLUMNS = ("weight", "gradient", "step", "local_rate")

# (parameters after the step, before the step, norms of gradients [n]) -> one local learning rate each, [n].
LocalRates = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]


@final
class LayerStatistics:
    """Measures the layers of a network: trained parameters of two or more dimensions, as for LARS.

    `arm` registers hooks for the next optimizer step, which remove themselves; all other steps cost nothing. The
    measured step keeps a copy of the weights, and reads weights and gradients twice. There is no host-device sync
    before `read`.

    Args:
        named: Parameters as the optimizer has them: the masters of a 16-bit network.
        local: Local learning rates of the optimizer; see `headway.optim.layer_rates`.

    Attributes:
        names: Names of the layers.
        sizes: Number of weights of each layer.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], optimizer: Optimizer, local: LocalRates) -> None:
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        pairs = [(name, one) for name, one in named if one.requires_grad and id(one) in trained]
        self.names = tuple(name for name, one in pairs if one.ndim > 1)
        self._layers = [one for _, one in pairs if one.ndim > 1]
        self.sizes = tuple(one.numel() for one in self._layers)
        self._all = [one for _, one in pairs]
        self._places = [place for place, one in enumerate(self._all) if one.ndim > 1]
        self._optimizer, self._local = optimizer, local
        self._before: list[Tensor] = []
        self._g = self._total = torch.empty(0)
        self._statistics: Tensor | None = None
        self._handles: list[Any] = []

    def measure_weights(self) -> list[float]:
        """Measures |w| of each layer now; waits for the device."""
        norms: list[float] = (
            torch.stack(torch._foreach_norm([one.detach() for one in self._layers])).tolist() if self._layers else []
        )
        return norms

    def arm(self) -> None:
        """Prepares to measure the next optimizer step."""
        self.disarm()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    def disarm(self) -> None:
        """Removes the hooks if the step did not happen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._before = []

    def read(self) -> tuple[NDArray[np.float32], float] | None:
        """Returns ([n, 4] by COLUMNS, norm of the whole gradient) of the measured step, once; waits for the device.

        None if no step was measured. If loss scaling skipped the step, the gradient is not finite and |dw| is 0.
        """
        statistics, self._statistics = self._statistics, None
        if statistics is None:
            return None
        *rows, total = statistics.cpu().numpy().astype(np.float32)
        return np.stack(rows).reshape(-1, len(COLUMNS)) if rows else np.empty((0, 4), np.float32), float(total[0])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._layers:
            return
        every = _compute_gradient_norms(self._all)
        # In fp16 a fused optimizer removes the loss scale itself, after this hook.
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:
            every = every / scale.to(every.device, every.dtype).reshape(())
        self._total = torch.linalg.vector_norm(every)
        self._g = every[self._places]
        self._before = [one.detach().clone() for one in self._layers]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        before, layers = self._before, [one.detach() for one in self._layers]
        if before:
            w = torch.stack(torch._foreach_norm(before)).double()
            dw = torch.stack(torch._foreach_norm(torch._foreach_sub(layers, before))).double()
            columns = torch.stack([w, self._g, dw, self._local(self._layers, before, self._g)], 1)
            # The norm of the whole gradient travels as one more row: a single copy to the host.
            total = torch.full_like(columns[:1], torch.nan)
            total[0, 0] = self._total
            self._statistics = torch.cat([columns, total])
        self.disarm()


def _compute_gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Computes gradient norms in float64, from sums in at least float32; 0 for a parameter without a gradient."""
    grads = [one.new_zeros(1) if one.grad is None else one.grad for one in parameters]
    kind = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    return torch.stack(torch._foreach_norm(grads, 2.0, kind)).double()
