"""LARS: layer-wise rates for large batches (You, Gitman, Ginsburg 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges
from headway.optim.groups import Group
from headway.optim.update_rule import NativeRule, StepInputs, UpdateRule


@final
class LARS(FusedOptimizer):
    """SGD with momentum, in which the step of each layer is scaled by its trust ratio.

    With d = g + weight_decay * w, the ratio is r = trust * |w| / (|g| + weight_decay * |w| + eps), and 1 if a norm
    is 0. The learning rate acts in one of two places, which differ while it changes:

    - `lr_in_momentum`: m = momentum * m + lr * r * d; w -= m. The paper's algorithm, and MLPerf's. A step that was made
      with a small rate stays small.
    - otherwise m = momentum * m + r * d; w -= lr * m, as in torch's SGD and timm.

    Parameters of at most one dimension (biases, batch norm) have a ratio of 1. Put them into a group with weight_decay
    0 (`headway.optim.split_decay` does).

    Args:
        lr: a number, or a scalar tensor.
        trust: the trust coefficient, the paper's eta. None: a ratio of 1 everywhere, which is SGD.
        lr_in_momentum: scale by the learning rate before the momentum buffer, not behind it.
        clip: limit each layer's rate lr * r to lr: LARC. The paper's value of `trust` is then 0.02.
        nesterov: look ahead by one more momentum step, as torch's SGD does.
        fused: use the native core if possible. Same formulas; sums are rounded differently.

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
        trust: float | None = 0.001,
        eps: float = 0.0,
        lr_in_momentum: bool = True,
        clip: bool = False,
        nesterov: bool = False,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        switches = {"lr_in_momentum": lr_in_momentum, "clip": clip, "nesterov": nesterov, "fused": fused}
        super().__init__(params, options | switches)

    def _check_options(self, group: Group) -> None:
        check_ranges("LARS", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf), eps=(0, inf))
        if not isinstance(group["lr_in_momentum"], bool):
            raise UsageError(f"LARS has lr_in_momentum={group['lr_in_momentum']!r}", fix="Set it to True or False.")
        # True and False are numbers in Python, and no trust coefficients.
        if isinstance(group["trust"], bool):
            fix = "Give it the trust coefficient, for example 0.001, or None for SGD."
            raise UsageError(f"LARS has trust={group['trust']}", fix=fix)
        if group["trust"] is not None:
            check_ranges("LARS", group, trust=(0, inf))

    def _build_update_rule(self, group: Group) -> UpdateRule:
        return build_lars_rule(group, trust=group["trust"], lr_in_momentum=group["lr_in_momentum"])


def build_lars_rule(group: Group, *, trust: float | None, lr_in_momentum: bool) -> UpdateRule:
    """Builds the update rule of LARS from the options of a group; with trust None that of SGD with momentum."""
    # A group of Muon has neither eps nor clip.
    coefficient, eps = (0.0, 0.0) if trust is None else (trust, group["eps"])
    clip = group.get("clip", False)

    def has_trust_ratio(parameter: Tensor) -> bool:
        return trust is not None and parameter.ndim > 1

    # Native and torch steps use the same formula; `layer_rates` calls this one to report the rates.
    def compute_ratio(w: Tensor, g: Tensor) -> Tensor:
        ratio: Tensor = coefficient * w / (g + group["weight_decay"] * w + eps)
        return (ratio / group["lr"]).clamp(max=1) if clip else ratio

    def apply(inputs: StepInputs) -> None:
        lr = inputs.gate_lr()
        decay = group["weight_decay"]
        # The factor on d: one number, or a list of the layers' own if there are trust ratios.
        grad_factor: Any = lr if lr_in_momentum else inputs.gate_update(1.0)
        if adapted := [index for index, weight in enumerate(inputs.weights) if has_trust_ratio(weight)]:
            w, g = inputs.compute_norms(adapted, inputs.weights, inputs.grads)
            grad_factor = inputs.scale_layers(adapted, compute_ratio(w, g), (w > 0) & (g > 0), grad_factor)
        # Weight decay has the same factor as the gradient.
        decay_factor: Any = (
            [factor * decay for factor in grad_factor] if isinstance(grad_factor, list) else grad_factor * decay
        )
        addends = ops.combine(inputs.grads, grad_factor, inputs.weights, decay_factor if decay else 0)
        apply_momentum_(inputs, addends, inputs.gate_update(1.0) if lr_in_momentum else lr)

    return UpdateRule(
        apply=apply,
        first_state="momentum_buffer" if group["momentum"] > 0 else None,
        native_rule=NativeRule.LARS,
        native_options=(
            group["momentum"],
            group["weight_decay"],
            coefficient,
            eps,
            group["nesterov"],
            lr_in_momentum,
            clip,
        ),
        has_trust_ratio=has_trust_ratio,
        trust_ratio=None if trust is None else compute_ratio,
    )


def apply_momentum_(inputs: StepInputs, addends: list[Tensor], lr: ops.Coefficient) -> None:
    """Steps in place: m = momentum * m + addend; w -= lr * m, or with `nesterov` lr * (addend + momentum * m).

    Args:
        inputs: its weights and momentum buffers are changed.
        addends: one for each parameter; their memory is overwritten.
        lr: one number, or one for each parameter.
    """
    # Without momentum there is no buffer, and the addend is the step.
    momentum = inputs.group["momentum"]
    if momentum > 0:
        buffers = inputs.get_states("momentum_buffer")
        ops.scale_(buffers, inputs.gate_decay(momentum))
        ops.add_(buffers, addends)
        # The addend becomes the step: it is not needed any more.
        if inputs.group.get("nesterov"):
            ops.add_(addends, ops.multiply(buffers, inputs.gate_update(momentum)))
        else:
            addends = buffers
    ops.subtract_(inputs.weights, addends if isinstance(lr, float) and lr == 1 else ops.multiply(addends, lr))
