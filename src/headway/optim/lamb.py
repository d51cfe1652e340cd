"""LAMB: Adam's update with layer-wise rates (You et al. 2019, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_betas, check_ranges
from headway.optim.groups import Group
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule


@final
class LAMB(FusedOptimizer):
    """Adam with decoupled weight decay, in which the step of each layer is scaled by its trust ratio.

    With Adam's unbiased moments m and v: u = m / (sqrt(v) + eps) + weight_decay * w; w -= lr * r * u. The ratio r is
    |w| / |u|, and 1 if a norm is 0 or the parameter has at most one dimension (biases, batch norm). This is algorithm 2
    of the paper with phi(x) = x.

    Args:
        lr: a number, or a scalar tensor.
        betas: decays of the running first and second moments.
        layerwise: False: a ratio of 1 everywhere, which is AdamW.
        fused: use the native core if possible. Same formulas; sums are rounded differently.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        layerwise: bool = True,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"layerwise": layerwise, "fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges("LAMB", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        check_betas("LAMB", group)

    def _build_update_rule(self, group: Group) -> UpdateRule:
        beta1, beta2 = group["betas"]
        eps, decay = group["eps"], group["weight_decay"]
        layerwise = group["layerwise"]

        def has_trust_ratio(parameter: Tensor) -> bool:
            return layerwise and parameter.ndim > 1

        def compute_ratio(w: Tensor, u: Tensor) -> Tensor:
            return w / u

        # Biases and batch norm have a ratio of 1: their norms say nothing about a good step size.
        def apply(inputs: StepInputs) -> None:
            first_moments, second_moments = inputs.get_states("exp_avg"), inputs.get_states("exp_avg_sq")
            # Adam: unbiased first and second moments, then their quotient.
            steps = inputs.count_step()
            ops.update_moment_(first_moments, inputs.gate_decay(beta1), 1 - beta1, inputs.grads)
            ops.update_square_moment_(second_moments, inputs.gate_decay(beta2), 1 - beta2, inputs.grads)
            unbiased = ops.multiply(first_moments, inputs.to_coefficients(ops.compute_bias_correction(beta1, steps)))
            update = ops.divide_by_root(
                unbiased, second_moments, inputs.to_coefficients(ops.compute_bias_correction(beta2, steps)), eps
            )
            # Weight decay is part of the update, so the trust ratio scales it too.
            if decay:
                torch._foreach_add_(update, inputs.weights, alpha=decay)
            lr: Any = inputs.gate_lr()
            if adapted := [index for index, weight in enumerate(inputs.weights) if has_trust_ratio(weight)]:
                w, u = inputs.compute_norms(adapted, inputs.weights, update)
                lr = inputs.scale_layers(adapted, compute_ratio(w, u), (w > 0) & (u > 0), lr)
            ops.subtract_(inputs.weights, ops.multiply(update, lr))

        return UpdateRule(
            apply=apply,
            first_state="exp_avg",
            second_state="exp_avg_sq",
            has_step_count=True,
            native_rule=NativeRule.LAMB,
            native_options=(beta1, beta2, eps, decay),
            has_trust_ratio=has_trust_ratio,
            trust_ratio=compute_ratio if layerwise else None,
        )
