"""NovoGrad: gradients normalised layer by layer (Ginsburg et al. 2019, arXiv 1905.11286)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import work as passes
from headway.optim.lamb import refuse_betas
from headway.optim.layerwise import LayerWise, refuse
from headway.optim.work import Group, Rule, Work


@final
class NovoGrad(LayerWise):
    """v = beta2 * v + (1 - beta2) |g|^2, one number a parameter, |g|^2 at its first step; m = beta1 * m +
    (g / (sqrt(v) + eps) + weight_decay * w); w -= lr * m.

    This is algorithm 1 of the paper. Its state is half that of Adam.

    Args:
        lr: a number, or a tensor of one.
        averaging: what is added to m is taken times 1 - beta1, so that m is a running mean.
        fused: the native core does the step where it can. Same formulas; sums are rounded otherwise.

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
        refuse("NovoGrad", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        refuse_betas("NovoGrad", group)

    def _rule(self, group: Group) -> Rule:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]

        def ratio(w: Tensor, root: Tensor) -> Tensor:
            below = root + eps
            found: Tensor = (1 / below).masked_fill(below == 0, 0.0)
            return found

        def apply(work: Work) -> None:
            steps, before = work.count(), work.state("norm_sq")
            square = passes.norms(work.grads).square()
            moment = torch.where(steps == 1, square, beta2 * torch.stack(before) + (1 - beta2) * square)
            if work.live is not None:
                moment = torch.where(work.live > 0, moment, torch.stack(before))
            torch._foreach_copy_(before, list(moment.unbind()))
            share = work.added(1 - beta1 if group["averaging"] else 1.0)
            from_g = work.vector(ratio(moment, moment.sqrt()) * share)
            buffers = work.state("exp_avg")
            passes.scale_(buffers, work.kept(beta1))
            passes.plus_(buffers, passes.with_decay(work, from_g, share * decay))
            passes.minus_(work.weights, passes.times(buffers, work.lr()))

        return Rule(
            apply=apply,
            first="exp_avg",
            counted=True,
            norm="norm_sq",
            trust=ratio,
            number=2,
            options=(beta1, beta2, eps, decay, group["averaging"]),
        )
