"""LAMB: Adam's update with layer-wise rates (You et al. 2019, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import work as passes
from headway.optim.layerwise import LayerWise, refuse
from headway.optim.work import Group, Rule, Work


def refuse_betas(name: str, group: Group) -> None:
    """Raises UsageError for betas that are no two numbers in [0, 1)."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UsageError(f"{name} has betas={betas!r}", fix="Give it two numbers in [0, 1), for example (0.9, 0.999).")
    beta1, beta2 = betas
    refuse(name, {"betas[0]": beta1, "betas[1]": beta2}, **{"betas[0]": (0, 1), "betas[1]": (0, 1)})


@final
class LAMB(LayerWise):
    """u = m / (sqrt(v) + eps) + weight_decay * w with Adam's unbiased moments m and v; w -= lr * trust * u, where trust
    = |w| / |u|, and 1 where a norm is 0 or the parameter has at most one dimension (biases, batch norm).

    This is algorithm 2 of the paper with phi(x) = x.

    Args:
        lr: a number, or a tensor of one.
        betas: shares of the running first and second moments that one step keeps.
        trust: False: trust = 1 everywhere, which is AdamW.
        fused: the native core does the step where it can. Same formulas; sums are rounded otherwise.

    Raises:
        UsageError: an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: bool = True,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust, "fused": fused}
        super().__init__(params, options)

    def _check(self, group: Group) -> None:
        refuse("LAMB", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        refuse_betas("LAMB", group)

    def _rule(self, group: Group) -> Rule:
        (beta1, beta2), eps, decay, trust = group["betas"], group["eps"], group["weight_decay"], group["trust"]

        def adapts(parameter: Tensor) -> bool:
            return trust and parameter.ndim > 1

        def ratio(w: Tensor, u: Tensor) -> Tensor:
            return w / u

        def apply(work: Work) -> None:
            first, second = work.state("exp_avg"), work.state("exp_avg_sq")
            steps = work.count()
            passes.moment_(first, work.kept(beta1), 1 - beta1, work.grads)
            passes.square_moment_(second, work.kept(beta2), 1 - beta2, work.grads)
            unbiased = passes.times(first, work.vector(passes.whole(beta1, steps)))
            update = passes.over_root(unbiased, second, work.vector(passes.whole(beta2, steps)), eps)
            if decay:
                torch._foreach_add_(update, work.weights, alpha=decay)
            rate: Any = work.lr()
            if chosen := [index for index, weight in enumerate(work.weights) if adapts(weight)]:
                w, u = (passes.norms([tensors[index] for index in chosen]) for tensors in (work.weights, update))
                rate = work.layerwise(chosen, ratio(w, u), (w > 0) & (u > 0), rate)
            passes.minus_(work.weights, passes.times(update, rate))

        return Rule(
            apply=apply,
            first="exp_avg",
            second="exp_avg_sq",
            counted=True,
            number=1,
            options=(beta1, beta2, eps, decay),
            adapt=adapts,
            trust=ratio if trust else None,
        )
