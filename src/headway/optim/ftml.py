"""FTML: follow the moving leader (Zheng and Kwok 2017, ICML, proceedings.mlr.press/v70/zheng17a.html)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

from torch import Tensor

from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_betas, check_ranges
from headway.optim.groups import Group
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule


@final
class FTML(FusedOptimizer):
    """Follow the moving leader.

    With d = g + weight_decay * w: v = beta2 * v + (1 - beta2) * d^2; w -= lr * (1 - beta1) / (1 - beta1^t) * d /
    (sqrt(v / (1 - beta2^t)) + eps).

    Algorithm 1 of the paper keeps z and d_t, with w = -z / d_t. After each step z is -d_t * w, so both cancel out of
    the next step. This form is exact, needs a third of the memory, and allows a learning rate of 0.

    Args:
        lr: a number, or a scalar tensor.
        fused: use the native core if possible.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.6, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges("FTML", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        check_betas("FTML", group)

    def _build_update_rule(self, group: Group) -> UpdateRule:
        beta1, beta2 = group["betas"]
        eps, decay = group["eps"], group["weight_decay"]

        def apply(inputs: StepInputs) -> None:
            steps = inputs.count_step()
            moments = inputs.get_states("exp_avg_sq")
            # v = beta2 * v + (1 - beta2) * d^2, with the decayed gradient d
            addends = ops.combine(inputs.grads, 1.0, inputs.weights, inputs.gate_update(decay) if decay else 0)
            ops.update_square_moment_(moments, inputs.gate_decay(beta2), 1 - beta2, addends)
            # d / (sqrt(v / (1 - beta2^t)) + eps)
            updates = ops.divide_by_root(
                addends, moments, inputs.to_coefficients(ops.compute_bias_correction(beta2, steps)), eps
            )
            # beta1 only enters the rate, so there is no first moment.
            rate = ops.compute_bias_correction(beta1, steps) * (1 - beta1) * inputs.gate_lr()
            ops.subtract_(inputs.weights, ops.multiply(updates, inputs.to_coefficients(rate)))

        options = (beta1, beta2, eps, decay)
        return UpdateRule(
            apply=apply,
            first_state="exp_avg_sq",
            has_step_count=True,
            native_rule=NativeRule.FTML,
            native_options=options,
        )
