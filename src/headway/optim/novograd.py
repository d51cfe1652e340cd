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
        lr: a number, or a tensor of one.
        averaging: multiply the term that is added to m by 1 - beta1, so that m is a running mean.
        fused: use the native core if possible. Same formulas; sums are rounded differently.

    Raises:
        UsageError: an option out of range.
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

    def _check(self, group: Group) -> None:
        check_ranges("NovoGrad", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        check_betas("NovoGrad", group)

    def _rule(self, group: Group) -> UpdateRule:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]

        # It ignores the norm of the weights: the gradient alone is normalised.
        def compute_ratio(w: Tensor, root: Tensor) -> Tensor:
            below = root + eps
            # With eps 0, a moment of 0 gives a rate of 0, not infinity.
            found: Tensor = (1 / below).masked_fill(below == 0, 0.0)
            return found

        def apply(inputs: StepInputs) -> None:
            # v is one number for each parameter. It begins at |g|^2, and stays as it is in a skipped step.
            steps, before = inputs.count_step(), inputs.get_states("norm_sq")
            square = ops.compute_norms(inputs.grads).square()
            moment = torch.where(steps == 1, square, beta2 * torch.stack(before) + (1 - beta2) * square)
            if inputs.live is not None:
                moment = torch.where(inputs.live > 0, moment, torch.stack(before))
            torch._foreach_copy_(before, list(moment.unbind()))
            share = inputs.gate_update(1 - beta1 if group["averaging"] else 1.0)
            # m = beta1 * m + share * (g / (sqrt(v) + eps) + weight_decay * w)
            from_g = inputs.to_coefficients(compute_ratio(moment, moment.sqrt()) * share)
            buffers = inputs.get_states("exp_avg")
            ops.scale_(buffers, inputs.gate_decay(beta1))
            ops.add_(buffers, ops.combine(inputs.grads, from_g, inputs.weights, share * decay))
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
