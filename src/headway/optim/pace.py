"""What an optimizer makes of learning rate and batch by itself, as pure functions of the step.

The rules have the same in tensors, for counts that lie on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

Warmup = Literal["linear", "power2", "sqrt", "lars"]
POWERS: dict[str, float] = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}
"""Of the share of LBSGD's warm-up that is done; `lars` has none."""


@final
@dataclass(frozen=True, kw_only=True)
class Pace:
    """Of one run.

    Attributes:
        steps: of a macro-batch, the last of which moves the weights.
        factor: on the learning rate in the step before which there are so many.
        turns: the steps in which the factor turns, and what happens there.
        rmsprop: learning rate of RMSprop beside it in a step, where the schedule's factor is 1; None: there is none.
    """

    steps: int = 1
    factor: Callable[[int], float] = lambda step: 1.0
    turns: tuple[tuple[int, str], ...] = ()
    rmsprop: Callable[[int], float] | None = None


def lbsgd(batch_scale: int, warmup: Warmup, rising: float) -> Pace:
    """LBSGD's: from 1 to `batch_scale` within the first `rising` steps. That of `warmup: lars` is each layer's own."""
    if warmup == "lars" or batch_scale == 1:
        return Pace(steps=batch_scale)
    power = POWERS[warmup]

    def factor(step: int) -> float:
        share = min((step + 1) / rising, 1.0) if rising > 0 else 1.0
        risen: float = share**power
        return 1 + (batch_scale - 1) * risen

    end = math.ceil(rising) - 1
    return Pace(steps=batch_scale, factor=factor, turns=((end, "end of LBSGD's warm-up"),) if end > 0 else ())


def rmsprop_sgd(lr_rmsprop: float, center: float, period: float) -> Pace:
    """RMSpropSGD's: the share of SGD is one half in step `center`, and the rest is that of RMSprop."""

    def share(step: int) -> float:
        away = (step - center) / period
        return math.exp(2 * away) / 2 if away < 0 else min(0.5 + away, 1.0)

    middle, end = math.ceil(center), math.ceil(center + period / 2)
    turns = ((middle, "SGD has one half"), (end, "SGD alone"))
    return Pace(
        factor=share,
        turns=tuple(turn for turn in turns if turn[0] > 0),
        rmsprop=lambda step: (1 - share(step)) * lr_rmsprop,
    )
