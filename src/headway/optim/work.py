"""What one step of a rule works on: tensors, what gates them, and the elementwise passes that several rules share.

These are torch's own operations, for every device and type; the native core does the same where it can. A coefficient
is a number, a tensor of one number, or a list of such, one for each parameter. Nothing here waits for the device; so
`where` is given tensors alone, as it copies numbers there, and waits for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

Coefficient = float | Tensor | Sequence[Tensor] | Sequence[float]
Group = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The parameters of a group that lie on one device and have one type.

    Attributes:
        weights, grads: in the type that is computed in, float32 at least; gradients unscaled, and 0 in a step that is
            skipped.
        states: of each parameter.
        group: the options.
        live: 1, or 0 in a step that is skipped, on the device; None: it cannot be.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    group: Group
    live: Tensor | None

    def state(self, name: str) -> list[Tensor]:
        """One state of all parameters."""
        return [state[name] for state in self.states]

    def lr(self) -> float | Tensor:
        """The learning rate, 0 in a step that is skipped."""
        lr: float | Tensor = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(self.weights[0].device, self.weights[0].dtype)
        return lr if self.live is None else lr * self.live

    def kept(self, share: float) -> float | Tensor:
        """A share that a state keeps: all of it in a step that is skipped."""
        if self.live is None:
            return share
        return torch.where(self.live > 0, torch.full_like(self.live, share), torch.ones_like(self.live))

    def kept_each(self, shares: Tensor) -> Tensor:
        """The same for a share of each parameter, [n]."""
        return shares if self.live is None else torch.where(self.live > 0, shares, torch.ones_like(shares))

    def added(self, share: Any) -> Any:
        """A share that is added to a state: nothing in a step that is skipped."""
        return share if self.live is None else share * self.live

    def count(self) -> Tensor:
        """Counts the step. Its number of each parameter, float64 [n], at least 1."""
        steps = self.state("step")
        if self.live is None:
            torch._foreach_add_(steps, 1)
        else:  # as a list: one tensor would be read by the host
            torch._foreach_add_(steps, [self.live.float()] * len(steps))
        return torch.stack(steps).double().clamp(min=1)

    def vector(self, values: Tensor) -> list[Tensor]:
        """[n] of any type as coefficients of the parameters."""
        return list(values.to(self.weights[0].dtype).unbind())

    def layerwise(self, chosen: Sequence[int], ratio: Tensor, known: Tensor, rate: float | Tensor) -> list[Tensor]:
        """Coefficients of the parameters: rate * ratio of those chosen where that is known, and rate of the others.

        Args:
            ratio, known: one number, and one bool, for each of the chosen.
        """
        values = self.vector(ratio.masked_fill(~known, 1.0) * rate)
        other = self.vector(torch.ones_like(ratio[:1]) * rate)
        out = other * len(self.weights)
        for index, value in zip(chosen, values, strict=True):
            out[index] = value
        return out


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norms, float64 [n]; each is summed in the tensors' own type."""
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def whole(beta: float, steps: Tensor) -> Tensor:
    """1 / (1 - beta^t): makes a running mean that began at 0 an unbiased one. Exact where beta^t is nearly 1."""
    return -1 / torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))


def times(tensors: list[Tensor], factor: Coefficient) -> list[Tensor]:
    """New tensors."""
    return list(torch._foreach_mul(tensors, factor))  # type: ignore[arg-type]


def scale_(tensors: list[Tensor], factor: Coefficient) -> None:
    torch._foreach_mul_(tensors, factor)  # type: ignore[arg-type]


def plus_(tensors: list[Tensor], others: list[Tensor]) -> None:
    torch._foreach_add_(tensors, others)


def minus_(tensors: list[Tensor], others: list[Tensor]) -> None:
    torch._foreach_sub_(tensors, others)


def with_decay(work: Work, from_g: Coefficient, from_w: Coefficient) -> list[Tensor]:
    """from_g * g + from_w * w, as new tensors."""
    out = times(work.grads, from_g)
    if not (isinstance(from_w, float | int) and from_w == 0):
        plus_(out, times(work.weights, from_w))
    return out


def moment_(moments: list[Tensor], keep: float | Tensor, rest: float, values: list[Tensor]) -> None:
    """moment = keep * moment + rest * value."""
    scale_(moments, keep)
    torch._foreach_add_(moments, values, alpha=rest)


def square_moment_(moments: list[Tensor], keep: float | Tensor, rest: float, values: list[Tensor]) -> None:
    """moment = keep * moment + rest * value^2."""
    scale_(moments, keep)
    torch._foreach_addcmul_(moments, values, values, rest)


def over_root(values: list[Tensor], moments: list[Tensor], factor: Coefficient, eps: float) -> list[Tensor]:
    """value / (sqrt(moment * factor) + eps), as new tensors."""
    below = times(moments, factor)
    torch._foreach_sqrt_(below)
    torch._foreach_add_(below, eps)
    return list(torch._foreach_div(values, below))


@final
@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a group's gradients become steps.

    Attributes:
        first, second: names of the states that have the parameter's shape, None where there is none.
        counted: there is a state `step`, a number.
        norm: name of a state that is one number; None: there is none.
        number: of the native core; None: it does not know the rule.
        options: what the native core is told.
        adapt: which parameters have a trust ratio; None: the rule does not ask.
        trust: the factor on the learning rate of each layer, [n], of the norms of its weights and of what it scales
            (float64 [n] both): the gradient, LAMB's update, or the root of NovoGrad's moment. What it gives where a
            norm is 0 does not count. None: layers are taken alike.
        apply: the step in torch's operations; changes weights and states in place.
    """

    apply: Callable[[Work], None]
    first: str | None = None
    second: str | None = None
    counted: bool = False
    norm: str | None = None
    number: int | None = None
    options: Sequence[float] = ()
    adapt: Callable[[Tensor], bool] | None = None
    trust: Callable[[Tensor, Tensor], Tensor] | None = None
