"""Muon: momentum with its singular values made equal (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges
from headway.optim.groups import Group
from headway.optim.lars import build_lars_rule
from headway.optim.update_rule import StepInputs, UpdateRule

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial a x + b x^3 + c x^5, which brings singular values in (0, 1] near 1 in five steps."""


@final
class Muon(FusedOptimizer):
    """Momentum whose singular values are made equal, for filters; SGD with momentum for all other parameters.

    Filters: m = momentum * m + g; w = (1 - lr * weight_decay) * w - lr * sqrt(max(1, rows / columns)) * O. O is m (with
    `nesterov`, g + momentum * m), flattened to [out, in * height * width], with singular values near 1. It is computed
    by Newton-Schulz iteration, in bf16 on a GPU as its author does, in float32 elsewhere. The other parameters have the
    same `lr` and `momentum` unless their group has its own.

    Args:
        params: a group can set `filters`. True: Muon steps its parameters, of two dimensions or more. False: SGD does.
        lr: a number, or a scalar tensor. Filters need a rate far below SGD's, or far above it.
        filters: default of the groups; None: a parameter of three dimensions or more is a filter. The last layers of
            networks are matrices, and train worse with Muon.
        ns_steps: steps of the Newton-Schulz iteration.
        normalise: bring the weights of filters to the norm sqrt(out) before each step, as in Jordan's CIFAR-10 record.
            For networks with batch norm after each filter. Filters of zeros have no direction, and stay.

    Raises:
        UsageError: an option is out of range, or a filter has one dimension.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        filters: bool | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        normalise: bool = False,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        shape = {"filters": filters, "ns_steps": ns_steps, "normalise": normalise}
        super().__init__(params, options | shape | {"fused": fused})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as every torch optimizer does. A group without `filters` becomes two: filters, and the rest."""
        filters_option = param_group.get("filters", self.defaults["filters"])
        if filters_option is not None:
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for filters in (True, False):
            selected = [
                param for param in params if ((param[1] if isinstance(param, tuple) else param).ndim > 2) == filters
            ]
            if selected:
                super().add_param_group({**param_group, "params": selected, "filters": filters})

    def _check_options(self, group: Group) -> None:
        check_ranges("Muon", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf), ns_steps=(1, inf))
        if group["filters"] and (vectors := [param for param in group["params"] if param.ndim < 2]):
            what = f"Muon has a parameter of shape {tuple(vectors[0].shape)} among its filters"
            raise UsageError(what, fix="Put parameters of one dimension into a group with filters=False.")

    def _build_update_rule(self, group: Group) -> UpdateRule:
        if not group["filters"]:
            return build_lars_rule(group, trust=None, lr_in_momentum=False)
        momentum, decay = group["momentum"], group["weight_decay"]

        def apply(inputs: StepInputs) -> None:
            lr = inputs.gate_lr()
            direction = inputs.grads
            if momentum > 0:
                buffers = inputs.get_states("momentum_buffer")
                ops.scale_(buffers, inputs.gate_decay(momentum))
                ops.add_(buffers, inputs.grads)
                lookahead = ops.multiply(buffers, momentum)
                ops.add_(lookahead, inputs.grads)
                direction = lookahead if group["nesterov"] else list(buffers)
            # Without batch norm behind the filter this would change the function that the network computes.
            if group["normalise"]:
                norms = ops.compute_norms(inputs.weights)
                # Filters of zeros stay zeros.
                inverse = 1 / norms.masked_fill(norms == 0, 1.0)
                factors = ops.multiply(list(inverse.unbind()), [len(weight) ** 0.5 for weight in inputs.weights])
                ops.scale_(inputs.weights, inputs.to_coefficients(inputs.gate_decays(torch.stack(factors))))
            # The decay is decoupled: it acts on the weights, not on the gradient.
            if decay:
                ops.scale_(inputs.weights, 1 - lr * decay)
            ops.subtract_(inputs.weights, ops.multiply(orthogonalise(direction, group["ns_steps"]), lr))

        return UpdateRule(apply=apply, first_state="momentum_buffer" if momentum > 0 else None)


def orthogonalise(matrices: list[Tensor], ns_steps: int = 5) -> list[Tensor]:
    """Returns matrices with the same singular vectors, and singular values near sqrt(max(1, rows / columns)).

    Args:
        matrices: tensors of two dimensions or more, flattened to [rows, columns]; the results have their shapes.
        ns_steps: steps of the Newton-Schulz iteration X = a X + (b A + c A^2) X with A = X X^T.
    """
    results: list[Tensor | None] = [None] * len(matrices)
    # Matrices of one shape go through the iteration as one batch, with one kernel in place of many.
    indices_by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices_by_shape.setdefault((matrix.shape[0], matrix[0].numel()), []).append(index)
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for (rows, columns), indices in indices_by_shape.items():
        x = torch.stack([matrices[index].flatten(1) for index in indices])
        dtype = x.dtype
        if x.device.type == "cuda" and dtype == torch.float32:
            x = x.bfloat16()
        # X X^T is smaller if X is wide.
        if rows > columns:
            x = x.mT
        # The iteration converges for singular values up to 1, and the Frobenius norm is no less than the largest.
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(ns_steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        if rows > columns:
            x = x.mT
        x = x.to(dtype) * max(1, rows / columns) ** 0.5
        for index, matrix in zip(indices, x.unbind(), strict=True):
            results[index] = matrix.reshape(matrices[index].shape)
    return results  # type: ignore[return-value]
