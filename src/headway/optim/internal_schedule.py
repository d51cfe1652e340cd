"""The changes that an optimizer makes to learning rate and batch by itself, as pure functions of the step.

The optimizers compute the same numbers in tensors, as their step counts lie on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

LbsgdWarmup = Literal["linear", "power2", "sqrt", "lars"]
WARMUP_POWERS: dict[str, float] = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}
"""Exponent of the progress through LBSGD's warm-up, 0 to 1; `lars` has no warm-up."""


@final
@dataclass(frozen=True, kw_only=True)
class InternalSchedule:
    """The schedule that an optimizer follows within one run, beside the recipe's own.

    Attributes:
        steps_per_update: steps of a macro-batch; the last one moves the weights.
        lr_factor: factor on the learning rate, by the number of the step (the first is 0).
        turns: steps at which the factor changes its course, and the change in words.
        rmsprop_lr: learning rate of RMSprop at a step if the recipe's factor is 1; None: there is no RMSprop.
    """

    steps_per_update: int = 1
    lr_factor: Callable[[int], float] = lambda step: 1.0
    turns: tuple[tuple[int, str], ...] = ()
    rmsprop_lr: Callable[[int], float] | None = None


def build_lbsgd_schedule(batch_scale: int, warmup: LbsgdWarmup, warmup_steps: float) -> InternalSchedule:
    """Builds LBSGD's rise of the factor from 1 to `batch_scale` within the first `warmup_steps` steps.

    `warmup: lars` has a rate for each layer instead, which is not a function of the step.
    """
    # Nothing rises: the rate of a layer depends on its norms, and a macro-batch of one step is the batch.
    if warmup == "lars" or batch_scale == 1:
        return InternalSchedule(steps_per_update=batch_scale)
    power = WARMUP_POWERS[warmup]

    def compute_factor(step: int) -> float:
        # Steps count from 0, and the first one is part of the rise already.
        progress = min((step + 1) / warmup_steps, 1.0) if warmup_steps > 0 else 1.0
        rise: float = progress**power
        return 1 + (batch_scale - 1) * rise

    # The turn is the first step at the full rate.
    end = math.ceil(warmup_steps) - 1
    turns = ((end, "end of LBSGD's warm-up"),) if end > 0 else ()
    return InternalSchedule(steps_per_update=batch_scale, lr_factor=compute_factor, turns=turns)


def build_rmsprop_sgd_schedule(lr_rmsprop: float, center: float, period: float) -> InternalSchedule:
    """Builds RMSpropSGD's transition.

    Args:
        lr_rmsprop: learning rate of RMSprop at the beginning.
        center: step at which SGD's share is one half.
        period: length of the transition in steps.
    """

    def compute_share(step: int) -> float:
        # An exponential before the centre, a line behind it: both have the same slope there.
        distance = (step - center) / period
        return math.exp(2 * distance) / 2 if distance < 0 else min(0.5 + distance, 1.0)

    # A centre at the start of the run has no turn: step 0 is listed anyway.
    center_step, end_step = math.ceil(center), math.ceil(center + period / 2)
    turns = ((center_step, "SGD has one half"), (end_step, "SGD alone"))
    return InternalSchedule(
        lr_factor=compute_share,
        turns=tuple(turn for turn in turns if turn[0] > 0),
        rmsprop_lr=lambda step: (1 - compute_share(step)) * lr_rmsprop,
    )
