"""Learning-rate schedules: a factor on the learning rate, as a pure function of the position in the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, final

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.core.recipe import Part
from headway.optim.options import refuse_unused, without_unused

USERS = {
    "warmup_epochs": ("constant", "multi_step", "cosine", "polynomial"),
    "warmup_start": ("constant", "multi_step", "cosine", "polynomial"),
    "milestones_epochs": ("multi_step",),
    "gamma": ("multi_step",),
    "power": ("polynomial",),
    "start": ("triangular",),
    "peak": ("triangular",),
    "end": ("cosine", "polynomial", "triangular"),
}

Factor = Annotated[float, Field(ge=0, le=1)]
Epochs = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ScheduleRecipe(Part):
    """How the learning rate moves during a run; it is the optimizer's `lr` times a factor from 0 to 1."""

    name: Literal["constant", "multi_step", "cosine", "polynomial", "triangular"]
    """`constant`; `multi_step` falls at milestones; `cosine` and `polynomial` fall from the end of the warm-up to
    the end of the run; `triangular` rises along a line to its peak, then falls along one."""
    warmup_epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The factor rises along a line, step by step, for so many epochs (of all but `triangular`)."""
    warmup_start: Factor = 0.0
    """Factor at the first step of the warm-up."""
    milestones_epochs: tuple[Epochs, ...] = ()
    """Of `multi_step`: epochs from the beginning of the run at which the factor falls."""
    gamma: float = Field(default=0.1, gt=0, lt=1)
    """Of `multi_step`: what the factor is multiplied by at each milestone."""
    power: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Of `polynomial`: exponent of the share of the run that is left; 1 is a straight line."""
    start: Factor = 0.2
    """Of `triangular`: factor at the first step."""
    peak: float = Field(default=0.25, gt=0, lt=1)
    """Of `triangular`: share of the run after which the factor is 1."""
    end: Factor = 0.0
    """Of `cosine`, `polynomial` and `triangular`: factor at the end of the run."""

    @model_validator(mode="after")
    def _fits(self) -> ScheduleRecipe:
        refuse_unused(self, self.name, USERS)
        milestones = self.milestones_epochs
        if self.name == "multi_step":
            if not milestones:
                raise ValueError("'multi_step' needs milestones. Set milestones_epochs: [30, 60], or name: constant")
            if any(after <= before for before, after in pairwise(milestones)):
                raise ValueError(f"milestones_epochs {list(milestones)} do not rise. Write each once, in order")
            if milestones[0] < self.warmup_epochs:
                inside = f"the milestone at epoch {milestones[0]:g} lies inside the warm-up"
                raise ValueError(f"{inside}. Set warmup_epochs to at most {milestones[0]:g}")
        if self.warmup_epochs == 0 and self.warmup_start != 0:
            raise ValueError("'warmup_start' counts only in a warm-up. Set warmup_epochs, or remove it")
        return self

    @model_serializer(mode="wrap")
    def _used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(handler(self), self.name, USERS)


@final
class Schedule:
    """Factor on the learning rate of the step that begins at a position (samples served before it).

    Args:
        total: positions of the whole run; beyond them the factor stays as it is there. A longer warm-up is cut there.
        epoch: positions of one epoch.
    """

    def __init__(self, recipe: ScheduleRecipe, *, total: int, epoch: int) -> None:
        warmup = min(round(recipe.warmup_epochs * epoch), total)  # a run ends at a whole step, maybe just before it
        self._total = total
        self._warmup = warmup
        self._warmup_start = recipe.warmup_start
        self._warmup_slope = (1 - recipe.warmup_start) / warmup if warmup else 0.0
        self._curve = _curve(recipe, total, epoch, warmup)

    def __call__(self, position: int) -> float:
        if position < self._warmup:
            return self._warmup_start + self._warmup_slope * position
        return self._curve(position if position < self._total else self._total)


def _curve(recipe: ScheduleRecipe, total: int, epoch: int, warmup: int) -> Callable[[int], float]:
    # Closures over plain numbers: a call takes 0.2 us, and is made at every step.
    end, power, gamma = recipe.end, recipe.power, recipe.gamma
    fall = 1 - end
    length = max(total - warmup, 1)  # a run that is all warm-up has no fall, and ends at 1
    match recipe.name:
        case "constant":
            return lambda position: 1.0
        case "multi_step":
            milestones = [round(milestone * epoch) for milestone in recipe.milestones_epochs]
            factors = [gamma**count for count in range(len(milestones) + 1)]
            return lambda position: factors[bisect_right(milestones, position)]
        case "cosine":
            return lambda position: end + fall * (1 + math.cos(math.pi * (position - warmup) / length)) / 2
        case "polynomial":
            return lambda position: end + fall * (1 - (position - warmup) / length) ** power
        case "triangular":
            start, peak = recipe.start, recipe.peak * total
            rise = (1 - start) / peak
            drop = fall / (total - peak)
            return lambda position: start + rise * position if position < peak else end + drop * (total - position)
