"""Signum: the sign of the momentum (Bernstein et al. 2018, arXiv 1802.04434)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import work as passes
from headway.optim.layerwise import LayerWise, refuse
from headway.optim.work import Group, Rule, Work


@final
class Signum(LayerWise):
    """m = momentum * m + (1 - momentum) * (g + weight_decay * w); w = (1 - lr * decoupled_decay) * w - lr * sign(m).

    Algorithm 2 of the paper, with both weight decays of MXNet's optimizer of that name. Every weight moves by lr, so
    a fitting rate is that of Adam. With momentum 0 it is signSGD.

    Args:
        lr: a number, or a tensor of one.
        decoupled_decay: weight decay apart from the gradient, as AdamW's.
        fused: the native core does the step where it can.

    Raises:
        UsageError: an option out of range.
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

    def _check(self, group: Group) -> None:
        refuse("Signum", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf), decoupled_decay=(0, inf))

    def _rule(self, group: Group) -> Rule:
        momentum, decay, apart = group["momentum"], group["weight_decay"], group["decoupled_decay"]

        def apply(work: Work) -> None:
            lr, rest = work.lr(), work.added(1 - momentum)
            buffers = work.state("momentum_buffer")
            passes.scale_(buffers, work.kept(momentum))
            passes.plus_(buffers, passes.with_decay(work, rest, rest * decay if decay else 0))
            if apart:
                passes.scale_(work.weights, 1 - lr * apart)
            passes.minus_(work.weights, passes.times(list(torch._foreach_sign(buffers)), lr))

        options = (momentum, decay, apart)
        return Rule(apply=apply, first="momentum_buffer", number=3, options=options)
