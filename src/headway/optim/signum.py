"""Signum: the sign of the momentum (Bernstein et al. 2018, arXiv 1802.04434)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges
from headway.optim.groups import Group
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule


@final
class Signum(FusedOptimizer):
    """Steps along the sign of the momentum: every weight moves by lr, so the rates of Adam are suitable.

    m = momentum * m + (1 - momentum) * (g + weight_decay * w); w = (1 - lr * decoupled_decay) * w - lr * sign(m).
    Algorithm 2 of the paper, with both weight decays of MXNet's optimizer of that name. With momentum 0 it is signSGD.

    Args:
        lr: a number, or a scalar tensor.
        decoupled_decay: decoupled weight decay, as in AdamW.
        fused: use the native core if possible.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decoupled_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "decoupled_decay": decoupled_decay}
        super().__init__(params, options | {"fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges("Signum", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf), decoupled_decay=(0, inf))

    def _build_update_rule(self, group: Group) -> UpdateRule:
        momentum, decay, decoupled_decay = group["momentum"], group["weight_decay"], group["decoupled_decay"]

        def apply(inputs: StepInputs) -> None:
            # m = momentum * m + (1 - momentum) * (g + weight_decay * w)
            lr = inputs.gate_lr()
            grad_factor = inputs.gate_update(1 - momentum)
            buffers = inputs.get_states("momentum_buffer")
            ops.scale_(buffers, inputs.gate_decay(momentum))
            ops.add_(
                buffers, ops.combine(inputs.grads, grad_factor, inputs.weights, grad_factor * decay if decay else 0)
            )
            # The decoupled decay acts before the step, on the old weights, as in AdamW.
            if decoupled_decay:
                ops.scale_(inputs.weights, 1 - lr * decoupled_decay)
            # Every weight moves by lr, in the direction of its momentum.
            ops.subtract_(inputs.weights, ops.multiply(list(torch._foreach_sign(buffers)), lr))

        options = (momentum, decay, decoupled_decay)
        return UpdateRule(
            apply=apply, first_state="momentum_buffer", native_rule=NativeRule.SIGNUM, native_options=options
        )
