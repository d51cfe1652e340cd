"""LBSGD: SGD for large batches, as MXNet's optimizer of that name: a macro-batch of several steps, and its warm-ups."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final, get_args

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges, check_whole_numbers, require_steps_per_epoch
from headway.optim.groups import Group
from headway.optim.internal_schedule import WARMUP_POWERS, LbsgdWarmup
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule

WARMUP_NAMES = get_args(LbsgdWarmup)


@final
class LBSGD(FusedOptimizer):
    """SGD with macro-batches: the gradients of `batch_scale` steps are summed, and the last step uses their mean.

    m = momentum * m + lr * f * (g + weight_decay * w); w -= m. The factor f rises from 1 to batch_scale, so lr suits
    the batch of one step. With s, the share of `warmup_epochs` that is done, f = 1 + (batch_scale - 1) * s (`linear`),
    s^2 (`power2`) or sqrt(s) (`sqrt`). `lars` has no warm-up: f is sqrt(|w|^2 / (|g|^2 + weight_decay |w|^2)) for each
    layer, in [0.01, 100].

    Steps at the end of a run that fill no macro-batch move nothing: their gradients stay in the sum.

    Args:
        lr: learning rate for the batch of one step; a number, or a scalar tensor.
        batch_scale: steps of a macro-batch.
        steps_per_epoch: calls of `step` in one epoch, not macro-batches; required.
        begin_epoch: epochs that were done before the first step.
        fused: use the native core if possible. Same formulas; sums are rounded differently.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        steps_per_epoch: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        batch_scale: int = 1,
        warmup: LbsgdWarmup = "linear",
        warmup_epochs: float = 5.0,
        begin_epoch: float = 0.0,
        fused: bool = True,
    ) -> None:
        require_steps_per_epoch("LBSGD", steps_per_epoch)
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "batch_scale": batch_scale}
        warmup_options = {"warmup": warmup, "warmup_epochs": warmup_epochs, "begin_epoch": begin_epoch}
        super().__init__(params, options | warmup_options | {"steps_per_epoch": steps_per_epoch, "fused": fused})

    def _check_options(self, group: Group) -> None:
        check_ranges("LBSGD", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf))
        check_whole_numbers("LBSGD", group, batch_scale=1)
        check_ranges("LBSGD", group, warmup_epochs=(0, inf), begin_epoch=(0, inf), steps_per_epoch=(0, inf))
        if group["warmup"] not in WARMUP_NAMES:
            raise UsageError(
                f"LBSGD has warmup={group['warmup']!r}", fix=f"Set it to one of {', '.join(WARMUP_NAMES)}."
            )

    def _build_update_rule(self, group: Group) -> UpdateRule:
        batch_scale, warmup = group["batch_scale"], group["warmup"]
        decay = group["weight_decay"]
        warmup_steps = group["warmup_epochs"] * group["steps_per_epoch"]
        begin_step = round(group["begin_epoch"] * group["steps_per_epoch"])
        has_momentum = group["momentum"] > 0
        is_accumulating = batch_scale > 1

        def compute_ratio(w: Tensor, g: Tensor) -> Tensor:
            # 1e-18 keeps a layer without gradient and decay finite.
            ratio: Tensor = (w.square() / (g.square() + decay * w.square() + 1e-18)).sqrt().clamp(0.01, 100)
            return ratio

        def apply(inputs: StepInputs) -> None:
            # On the device: `is_update` is 1 if this step ends a macro-batch, else 0.
            steps = inputs.count_step() + begin_step
            grads = inputs.grads
            is_update = torch.ones_like(steps)
            if is_accumulating:
                sums = inputs.get_states("grad_sum")
                ops.add_(sums, grads)
                is_update = (steps % batch_scale == 0).double()
                grads = ops.multiply(sums, 1 / batch_scale)
            if inputs.live is not None:
                is_update = is_update * inputs.live
            # The factor on the learning rate: of each layer, or the same for all as the warm-up rises.
            if warmup == "lars":
                factor = compute_ratio(*inputs.compute_norms(range(len(grads)), inputs.weights, grads))
            else:
                progress = (steps / warmup_steps).clamp(max=1) if warmup_steps > 0 else torch.ones_like(steps)
                factor = 1 + (batch_scale - 1) * progress ** WARMUP_POWERS[warmup]
            rate = inputs.to_coefficients(factor * group["lr"] * is_update)
            # m = momentum * m + lr * f * (g + weight_decay * w)
            addends = ops.multiply(grads, rate)
            if decay:
                ops.add_(addends, ops.multiply(ops.multiply(inputs.weights, decay), rate))
            if has_momentum:
                buffers = inputs.get_states("momentum_buffer")
                # The momentum decays once in a macro-batch.
                ops.scale_(buffers, inputs.to_coefficients(1 - is_update * (1 - group["momentum"])))
                ops.add_(buffers, addends)
                addends = ops.multiply(buffers, inputs.to_coefficients(is_update))
            ops.subtract_(inputs.weights, addends)
            if is_accumulating:
                # The sum begins again after a macro-batch.
                ops.scale_(sums, inputs.to_coefficients(1 - is_update))

        return UpdateRule(
            apply=apply,
            first_state="momentum_buffer" if has_momentum else None,
            second_state="grad_sum" if is_accumulating else None,
            has_step_count=True,
            trust_ratio=compute_ratio if warmup == "lars" else None,
            native_rule=NativeRule.LBSGD,
            native_options=(
                group["momentum"],
                decay,
                batch_scale,
                WARMUP_NAMES.index(warmup),
                warmup_steps,
                begin_step,
            ),
        )
