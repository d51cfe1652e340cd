"""Learning-rate schedules: a factor on the learning rate, as a pure function of the position in the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, final

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.core.epochs import Epochs, Milestones, epochs_to_position
from headway.core.errors import UsageError
from headway.core.recipe import RecipePart
from headway.optim.options import refuse_unused, without_unused

_WITH_WARMUP = ("constant", "step", "multi_step", "exponential", "cosine", "polynomial")
USERS = {
    "warmup_epochs": _WITH_WARMUP,
    "warmup_start": _WITH_WARMUP,
    "warmup_power": _WITH_WARMUP,
    "every_epochs": ("step", "exponential"),
    "milestones_epochs": ("multi_step",),
    "gamma": ("step", "multi_step", "exponential"),
    "power": ("polynomial",),
    "start": ("triangular",),
    "peak": ("triangular",),
    "end": ("cosine", "polynomial", "triangular"),
}

Factor = Annotated[float, Field(ge=0, le=1)]


class ScheduleRecipe(RecipePart):
    """How the learning rate moves during a run; it is the optimizer's `lr` times a factor from 0 to 1. A name alone
    stands for its defaults: `schedule: cosine`."""

    name: Literal["constant", "step", "multi_step", "exponential", "cosine", "polynomial", "triangular"]
    """`constant`; `step` falls by a fixed factor at even distances, `multi_step` at milestones; `exponential` falls as
    `step`, but smoothly; `cosine` and `polynomial` fall from the end of the warm-up to the end of the run;
    `triangular` rises along a line to its peak, then falls along one."""
    warmup_epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The factor rises, step by step, for so many epochs (of all but `triangular`)."""
    warmup_start: Factor | Literal["base"] = 0.0
    """Factor at the first step of the warm-up. `base`: the learning rate is then `optimizer.lr.base`, that of the small
    batch."""
    warmup_power: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor rises with this power of the share of the warm-up that is done: 1 is a line, 2 begins slowly, 0.5 (the
    square root) fast."""
    every_epochs: Epochs | None = None
    """Of `step` and `exponential`: epochs in which the factor falls by `gamma` once."""
    milestones_epochs: Milestones = ()
    """Of `multi_step`: epochs from the beginning of the run at which the factor falls."""
    gamma: float = Field(default=0.1, gt=0, lt=1)
    """Of `step`, `multi_step` and `exponential`: what the factor is multiplied by each time."""
    power: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Of `polynomial`: exponent of the share of the run that is left; 1 is a straight line."""
    start: Factor = 0.2
    """Of `triangular`: factor at the first step."""
    peak: float = Field(default=0.25, gt=0, lt=1)
    """Of `triangular`: share of the run after which the factor is 1."""
    end: Factor = 0.0
    """Of `cosine`, `polynomial` and `triangular`: factor at the end of the run."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> ScheduleRecipe:
        refuse_unused(self, self.name, USERS)
        if self.name == "multi_step" and not self.milestones_epochs:
            raise ValueError(
                "'multi_step' needs milestones. Set milestones_epochs, of a run of 90 epochs for example to [30, 60]"
            )
        if self.name in USERS["every_epochs"] and self.every_epochs is None:
            raise ValueError(
                f"{self.name!r} needs every_epochs, in which it falls by gamma. Set it: a third of the run, for example"
            )
        first = self.first_fall_epochs
        if first is not None and first < self.warmup_epochs:
            fall = "milestone" if self.name == "multi_step" else "first fall"
            fix = f"Set warmup_epochs to at most {first:g}"
            raise ValueError(f"the {fall} at epoch {first:g} lies inside the warm-up. {fix}")
        for name, usual in (("warmup_start", 0), ("warmup_power", 1)):
            if self.warmup_epochs == 0 and getattr(self, name) != usual:
                raise ValueError(f"{name!r} counts only in a warm-up. Set warmup_epochs, or remove it")
        return self

    @property
    def first_fall_epochs(self) -> float | None:
        """Of `step` and `multi_step`: epochs until the factor falls first."""
        return {"step": self.every_epochs, "multi_step": (*self.milestones_epochs, None)[0]}.get(self.name)

    @property
    def moves(self) -> bool:
        """Whether the factor is not always 1."""
        return self.name != "constant" or self.warmup_epochs > 0

    @model_serializer(mode="wrap")
    def _used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(handler(self), self.name, USERS)


class Mark(NamedTuple):
    """A position at which a schedule turns, and what it does there."""

    position: int
    what: str


@final
class Schedule:
    """Factor on the learning rate of the step that begins at a position (samples served before it).

    Args:
        total: positions of the whole run; beyond them the factor stays as it is there. A longer warm-up is cut there.
        epoch: positions of one epoch.

    Raises:
        UsageError: the warm-up starts at `base`, which only a recipe's optimizer knows.
    """

    def __init__(self, recipe: ScheduleRecipe, *, total: int, epoch: int) -> None:
        if recipe.warmup_start == "base":
            what = "the warm-up starts at base, and the base of the learning rate is not known here"
            raise UsageError(what, where="schedule.warmup_start", fix="Give the factor: per / batch.")
        warmup = min(
            epochs_to_position(recipe.warmup_epochs, epoch), total
        )  # a run ends at a whole step, maybe before it
        self._recipe, self._total, self._epoch, self._warmup = recipe, total, epoch, warmup
        self._start: float = recipe.warmup_start
        self._power: float = recipe.warmup_power
        self._curve = _curve(recipe, total, epoch, warmup)

    def __call__(self, position: int) -> float:
        if position < self._warmup:
            risen: float = (position / self._warmup) ** self._power
            return self._start + (1 - self._start) * risen
        return self._curve(position if position < self._total else self._total)

    def marks(self) -> list[Mark]:
        """Where the factor turns or falls, between the first position and the last."""
        recipe, total, epoch = self._recipe, self._total, self._epoch
        out = [Mark(self._warmup, "end of the warm-up")] if self._warmup else []
        if recipe.name == "triangular":
            out.append(Mark(math.ceil(recipe.peak * total), "peak"))
        milestones = [epochs_to_position(milestone, epoch) for milestone in recipe.milestones_epochs]
        if recipe.name == "step":
            assert recipe.every_epochs is not None
            every = recipe.every_epochs * epoch
            milestones = [math.ceil(every * count - 0.5) for count in range(1, math.ceil(total / every) + 1)]
        out += [Mark(position, f"falls to x {recipe.gamma**count:.4g}") for count, position in enumerate(milestones, 1)]
        return [mark for mark in out if 0 < mark.position < total]


def _curve(recipe: ScheduleRecipe, total: int, epoch: int, warmup: int) -> Callable[[int], float]:
    # Closures over plain numbers: a call takes 0.2 us, and is made at every step.
    end, power, gamma = recipe.end, recipe.power, recipe.gamma
    fall = 1 - end
    every = (recipe.every_epochs or 1.0) * epoch
    length = max(total - warmup, 1)  # a run that is all warm-up has no fall, and ends at 1
    match recipe.name:
        case "constant":
            return lambda position: 1.0
        case "step":
            return lambda position: gamma ** ((position + 0.5) // every)  # at the nearest position, as milestones are
        case "multi_step":
            milestones = [epochs_to_position(milestone, epoch) for milestone in recipe.milestones_epochs]
            factors = [gamma**count for count in range(len(milestones) + 1)]
            return lambda position: factors[bisect_right(milestones, position)]
        case "exponential":
            return lambda position: gamma ** ((position - warmup) / every)
        case "cosine":
            return lambda position: end + fall * (1 + math.cos(math.pi * (position - warmup) / length)) / 2
        case "polynomial":
            return lambda position: end + fall * (1 - (position - warmup) / length) ** power
        case "triangular":
            start, peak = recipe.start, recipe.peak * total
            rise = (1 - start) / peak
            drop = fall / (total - peak)
            return lambda position: start + rise * position if position < peak else end + drop * (total - position)
