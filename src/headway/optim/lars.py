"""LARS: layer-wise rates for large batches (You, Gitman, Ginsburg 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, Literal, final

from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import work as passes
from headway.optim.layerwise import LayerWise, refuse
from headway.optim.work import Group, Rule, Work

LrPlace = Literal["inside", "outside"]


@final
class LARS(LayerWise):
    """SGD with momentum, each layer's step scaled by trust = eta |w| / (|g| + weight_decay |w| + eps); 1 where a norm
    is 0. With d = g + weight_decay * w:

    - lr `inside` the momentum buffer: m = momentum * m + lr * trust * d; w -= m. The paper's algorithm, and MLPerf's.
    - lr `outside`: m = momentum * m + trust * d; w -= lr * m, as torch's SGD and timm. The two differ while the
      learning rate moves: inside, a step that was made with a small rate stays small.

    Parameters of at most one dimension (biases, batch norm) take trust = 1; put them into a group with weight_decay 0
    (`headway.optim.split_decay` does).

    Args:
        lr: a number, or a tensor of one.
        eta: the trust coefficient.
        clip: no layer's rate lr * trust is above lr: LARC. The paper's value of eta is then 0.02.
        nesterov: the step looks ahead by one more momentum step, as torch's SGD does.
        trust: False: trust = 1 everywhere, which is SGD.
        fused: the native core does the step where it can. Same formulas; sums are rounded otherwise.

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
        eta: float = 0.001,
        eps: float = 0.0,
        lr_place: LrPlace = "inside",
        clip: bool = False,
        nesterov: bool = False,
        trust: bool = True,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        switches = {"lr_place": lr_place, "clip": clip, "nesterov": nesterov, "trust": trust, "fused": fused}
        super().__init__(params, options | switches)

    def _check(self, group: Group) -> None:
        refuse("LARS", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf), eta=(0, inf), eps=(0, inf))
        if group["lr_place"] not in ("inside", "outside"):
            what = f"LARS has lr_place={group['lr_place']!r}"
            raise UsageError(what, fix="Set it to 'inside' or 'outside' (of the momentum buffer).")

    def _rule(self, group: Group) -> Rule:
        return rule(group, trust=group["trust"], inside=group["lr_place"] == "inside", clip=group["clip"])


def rule(group: Group, *, trust: bool, inside: bool, clip: bool) -> Rule:
    """That of LARS, and with trust off of SGD; of the group it takes lr, momentum, weight_decay, eta, eps, nesterov."""
    eta, eps = (group["eta"], group["eps"]) if trust else (0.0, 0.0)

    def adapts(parameter: Tensor) -> bool:
        return trust and parameter.ndim > 1

    def ratio(w: Tensor, g: Tensor) -> Tensor:
        found: Tensor = eta * w / (g + group["weight_decay"] * w + eps)
        return (found / group["lr"]).clamp(max=1) if clip else found

    def apply(work: Work) -> None:
        lr, decay = work.lr(), group["weight_decay"]
        within: Any = lr if inside else work.added(1.0)
        if chosen := [index for index, weight in enumerate(work.weights) if adapts(weight)]:
            w, g = (passes.norms([tensors[index] for index in chosen]) for tensors in (work.weights, work.grads))
            within = work.layerwise(chosen, ratio(w, g), (w > 0) & (g > 0), within)
        from_w: Any = [factor * decay for factor in within] if isinstance(within, list) else within * decay
        addends = passes.with_decay(work, within, from_w if decay else 0)
        step_(work, addends, work.added(1.0) if inside else lr)

    return Rule(
        apply=apply,
        first="momentum_buffer" if group["momentum"] > 0 else None,
        number=0,
        options=(group["momentum"], group["weight_decay"], eta, eps, group["nesterov"], inside, clip),
        adapt=adapts,
        trust=ratio if trust else None,
    )


def step_(work: Work, addends: list[Tensor], rate: passes.Coefficient) -> None:
    """m = momentum * m + addend; w -= rate * m, or with `nesterov` rate * (addend + momentum * m). It uses
    up `addends`."""
    momentum = work.group["momentum"]
    if momentum > 0:
        buffers = work.state("momentum_buffer")
        passes.scale_(buffers, work.kept(momentum))
        passes.plus_(buffers, addends)
        if work.group.get("nesterov"):
            passes.plus_(addends, passes.times(buffers, work.added(momentum)))
        else:
            addends = buffers
    passes.minus_(work.weights, addends if isinstance(rate, float) and rate == 1 else passes.times(addends, rate))
