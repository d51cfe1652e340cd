"""NovoGrad: gradients normalised layer by layer (Ginsburg et al. 2019, arXiv 1905.11286)."""

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
class NovoGrad(FusedOptimizer):
    """Momentum of gradients that are normalised layer by layer; its state is half of Adam's.

    v = beta2 * v + (1 - beta2) |g|^2, one number for each parameter, and |g|^2 at its first step; m = beta1 * m +
    (g / (sqrt(v) + eps) + weight_decay * w); w -= lr * m. This is algorithm 1 of the paper.

    Args:
        lr: a number, or a scalar tensor.
        averaging: multiply the term that is added to m by 1 - beta1, so that m is a running mean.
        fused: use the native core if possible. Same formulas; sums are rounded differently.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        averaging: bool = False,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "averaging": averaging}
        super().__init__(params, options | {"fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges("NovoGrad", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        check_betas("NovoGrad", group)

    def _build_update_rule(self, group: Group) -> UpdateRule:
        beta1, beta2 = group["betas"]
        eps, decay = group["eps"], group["weight_decay"]

        # The norm of the weights is ignored: only the gradient is normalised.
        def compute_ratio(w: Tensor, root: Tensor) -> Tensor:
            divisor = root + eps
            # With eps 0, a moment of 0 gives a rate of 0, not infinity.
            ratio: Tensor = (1 / divisor).masked_fill(divisor == 0, 0.0)
            return ratio

        def apply(inputs: StepInputs) -> None:
            # v is one number for each parameter. It begins at |g|^2, and does not change in a skipped step.
            steps = inputs.count_step()
            states = inputs.get_states("norm_sq")
            squared_norms = ops.compute_norms(inputs.grads).square()
            new_moments = torch.where(
                steps == 1, squared_norms, beta2 * torch.stack(states) + (1 - beta2) * squared_norms
            )
            if inputs.live is not None:
                new_moments = torch.where(inputs.live > 0, new_moments, torch.stack(states))
            torch._foreach_copy_(states, list(new_moments.unbind()))
            factor = inputs.gate_update(1 - beta1 if group["averaging"] else 1.0)
            # m = beta1 * m + factor * (g / (sqrt(v) + eps) + weight_decay * w)
            grad_factor = inputs.to_coefficients(compute_ratio(new_moments, new_moments.sqrt()) * factor)
            buffers = inputs.get_states("exp_avg")
            ops.scale_(buffers, inputs.gate_decay(beta1))
            ops.add_(buffers, ops.combine(inputs.grads, grad_factor, inputs.weights, factor * decay))
            ops.subtract_(inputs.weights, ops.multiply(buffers, inputs.gate_lr()))

        return UpdateRule(
            apply=apply,
            first_state="exp_avg",
            has_step_count=True,
            norm_state="norm_sq",
            trust_ratio=compute_ratio,
            native_rule=NativeRule.NOVOGRAD,
            native_options=(beta1, beta2, eps, decay, group["averaging"]),
        )
