"""FTML: follow the moving leader (Zheng and Kwok 2017, ICML, proceedings.mlr.press/v70/zheng17a.html)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

from torch import Tensor

from headway.optim import work as passes
from headway.optim.lamb import refuse_betas
from headway.optim.layerwise import LayerWise, refuse
from headway.optim.work import Group, Rule, Work


@final
class FTML(LayerWise):
    """v = beta2 * v + (1 - beta2) * d^2 with d = g + weight_decay * w; w -= lr * (1 - beta1) / (1 - beta1^t) * d /
    (sqrt(v / (1 - beta2^t)) + eps).

    Algorithm 1 of the paper keeps z and d_t, with w = -z / d_t. As z is -d_t * w after each step, both fall out of its
    next one, and this is what is left. It is exact, takes a third of the memory, and can take a learning rate of 0.

    Args:
        lr: a number, or a tensor of one.
        fused: the native core does the step where it can.

    Raises:
        UsageError: an option out of range.
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

    def _check(self, group: Group) -> None:
        refuse("FTML", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        refuse_betas("FTML", group)

    def _rule(self, group: Group) -> Rule:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]

        def apply(work: Work) -> None:
            steps = work.count()
            moments = work.state("exp_avg_sq")
            addends = passes.with_decay(work, 1.0, work.added(decay) if decay else 0)
            passes.square_moment_(moments, work.kept(beta2), 1 - beta2, addends)
            moved = passes.over_root(addends, moments, work.vector(passes.whole(beta2, steps)), eps)
            rate = passes.whole(beta1, steps) * (1 - beta1) * work.lr()
            passes.minus_(work.weights, passes.times(moved, work.vector(rate)))

        options = (beta1, beta2, eps, decay)
        return Rule(apply=apply, first="exp_avg_sq", counted=True, number=4, options=options)
