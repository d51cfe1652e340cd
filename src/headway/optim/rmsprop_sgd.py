"""From RMSprop to SGD: the warm-up of ResNet-50 in 15 minutes (Akiba, Suzuki, Fukuda 2017, arXiv 1711.04325)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges, require_steps_per_epoch
from headway.optim.groups import Group
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule


@final
class RMSpropSGD(FusedOptimizer):
    """A smooth transition from RMSprop to SGD: the first steps are RMSprop's, the last ones SGD's.

    With d = g + weight_decay * w: v = smoothing * v + (1 - smoothing) * d^2; m = momentum * m + (a + b / (sqrt(v) +
    eps)) * d; w -= lr * m. The share a of SGD rises from 0 to 1 as ELU does: with x = (epoch - center_epochs) /
    period_epochs it is exp(2 x) / 2 for x < 0, then 1/2 + x up to 1. b = (1 - a) * rmsprop. (Section 3.1 of the paper,
    which writes m with the other sign.)

    Args:
        lr: learning rate of SGD; a number, or a scalar tensor.
        rmsprop: the learning rate of RMSprop over that of SGD; the paper's are 3e-4 and 0.1 * batch / 256.
        smoothing: decay of the running second moment.
        center_epochs: time at which SGD's share is one half.
        period_epochs: length of the transition.
        steps_per_epoch: samples of the data set / batch; required.
        fused: use the native core if possible.

    Raises:
        UsageError: an option is out of range, or `rmsprop` or `steps_per_epoch` is missing.
    """

    # Options are keyword arguments, as in every torch optimizer: eleven arguments in all.
    def __init__(  # noqa: PLR0913
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        rmsprop: float | None = None,
        steps_per_epoch: float | None = None,
        momentum: float = 0.9,
        smoothing: float = 0.99,
        eps: float = 1e-8,
        center_epochs: float = 10.0,
        period_epochs: float = 5.0,
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        # No default: the ratio depends on lr, which the caller chooses.
        if rmsprop is None:
            fix = "Give it rmsprop, for example 3e-4 / lr: the learning rate it begins with over that of SGD."
            raise UsageError("RMSpropSGD does not know the learning rate of RMSprop", fix=fix)
        require_steps_per_epoch("RMSpropSGD", steps_per_epoch)
        options = {"lr": lr, "rmsprop": rmsprop, "momentum": momentum, "smoothing": smoothing, "eps": eps}
        transition_options = {
            "center_epochs": center_epochs,
            "period_epochs": period_epochs,
            "steps_per_epoch": steps_per_epoch,
        }
        super().__init__(params, options | transition_options | {"weight_decay": weight_decay, "fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges(
            "RMSpropSGD", group, lr=(0, inf), rmsprop=(0, inf), momentum=(0, 1), smoothing=(0, 1), eps=(0, inf)
        )
        check_ranges("RMSpropSGD", group, center_epochs=(0, inf), weight_decay=(0, inf))
        check_ranges("RMSpropSGD", group, period_epochs=(0, inf), steps_per_epoch=(0, inf))
        # Both are divisors.
        for option in ("period_epochs", "steps_per_epoch"):
            if group[option] == 0:
                raise UsageError(f"RMSpropSGD has {option}=0", fix="Give it a number above 0.")

    def _build_update_rule(self, group: Group) -> UpdateRule:
        momentum, smoothing, eps, decay = (group[name] for name in ("momentum", "smoothing", "eps", "weight_decay"))
        center, period = (group[name] * group["steps_per_epoch"] for name in ("center_epochs", "period_epochs"))

        def apply(inputs: StepInputs) -> None:
            # The same as `internal_schedule.build_rmsprop_sgd_schedule`, for a step count that lies on the device.
            distance = (inputs.count_step() - 1 - center) / period
            sgd_share = torch.where(distance < 0, torch.exp(2 * distance) / 2, (0.5 + distance).clamp(max=1))
            moments, buffers = inputs.get_states("square_avg"), inputs.get_states("momentum_buffer")
            # v = smoothing * v + (1 - smoothing) * d^2, with the decayed gradient d
            addends = ops.combine(inputs.grads, 1.0, inputs.weights, inputs.gate_update(decay) if decay else 0)
            ops.update_square_moment_(moments, inputs.gate_decay(smoothing), 1 - smoothing, addends)
            # m = momentum * m + (a + b / (sqrt(v) + eps)) * d, where a is SGD's share
            updates = ops.divide_by_root(addends, moments, 1.0, eps)
            ops.scale_(updates, inputs.to_coefficients((1 - sgd_share) * group["rmsprop"]))
            ops.add_(updates, ops.multiply(addends, inputs.to_coefficients(sgd_share)))
            ops.scale_(buffers, inputs.gate_decay(momentum))
            ops.add_(buffers, updates)
            ops.subtract_(inputs.weights, ops.multiply(buffers, inputs.gate_lr()))

        return UpdateRule(
            apply=apply,
            first_state="momentum_buffer",
            second_state="square_avg",
            has_step_count=True,
            native_rule=NativeRule.RMSPROP_SGD,
            native_options=(momentum, smoothing, eps, decay, group["rmsprop"], center, period),
        )
