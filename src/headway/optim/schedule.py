"""Learning-rate schedules: a factor on the learning rate, as a pure function of the position in the run.

To add a schedule, write its recipe class here, with `build_curve`, and list it in `AnyScheduleRecipe`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, final

from pydantic import BeforeValidator, Field, model_validator

from headway.core.epochs import Epochs, Milestones, epochs_to_position
from headway.core.errors import UsageError
from headway.core.recipe import RecipePart, validate_part
from headway.core.user_code import make_absolute
from headway.optim.own_schedule import build_own_curve, find_peak

Factor = Annotated[float, Field(ge=0, le=1)]
Curve = Callable[[int], float]
Gamma = Annotated[float, Field(gt=0, lt=1)]


class RunSpan(NamedTuple):
    """The positions of a run that a schedule fills.

    Attributes:
        total: samples that the run serves.
        epoch: samples of one epoch.
        warmup: samples that the warm-up serves.
    """

    total: int
    epoch: int
    warmup: int


class ScheduleTurn(NamedTuple):
    """A position at which a schedule changes its course, and the change in words, such as `falls to x 0.1`."""

    position: int
    change: str


class Warmup(NamedTuple):
    """The rise at the beginning of a schedule.

    Attributes:
        epochs: its length.
        start: factor at its first step; `base`: `base / lr` of a learning rate that follows the batch.
        power: the factor rises with this power of the fraction of the warm-up that is done.
    """

    epochs: float = 0.0
    start: float | Literal["base"] = 0.0
    power: float = 1.0


class ScheduleRecipe(RecipePart, ABC):
    """Base of the schedules: the learning rate of a step is the optimizer's `lr` times a factor from 0 to 1.

    A name alone stands for its defaults: `schedule: cosine`.
    """

    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that are moments or stretches of the run, in epochs."""

    name: str
    """Name of the schedule."""

    @abstractmethod
    def build_curve(self, span: RunSpan) -> Curve:
        """Returns the factor as a function of the position, for positions after the warm-up."""

    def resolve_paths(self, base: Path) -> Self:
        """Returns the recipe with paths to files of the user's that do not depend on the current folder.

        Args:
            base: folder that its relative paths start from.
        """
        return self

    def list_turns(self, span: RunSpan) -> list[ScheduleTurn]:
        """Lists the positions at which the curve changes its course, for `headway schedule`; some lie after its end."""
        return []

    @property
    def warmup(self) -> Warmup:
        """The warm-up; one of 0 epochs if there is none."""
        return Warmup()

    @property
    def epoch_fields(self) -> dict[str, Any]:
        """The values that count in epochs, by their keys. They are scaled with the length of the run."""
        return {field: getattr(self, field) for field in self.EPOCH_FIELDS}

    @property
    def first_decay_epochs(self) -> dict[str, tuple[float, ...]]:
        """Epochs of the first decays of the factor by the keys that set them; each has to lie inside the run."""
        return {}

    @property
    def changes_lr(self) -> bool:
        """True if the factor is not always 1."""
        return True


class WarmupScheduleRecipe(ScheduleRecipe, ABC):
    """A schedule that can begin with a warm-up."""

    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("warmup_epochs",)

    warmup_epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Length of the warm-up in epochs. The factor rises at every step."""
    warmup_start: Factor | Literal["base"] = 0.0
    """Factor at the first step of the warm-up. `base`: begin with the learning rate `optimizer.lr.base` of the small
    batch."""
    warmup_power: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Exponent of the warm-up: the factor rises with progress ** warmup_power. 1 is a line, 2 begins slowly, 0.5
    (square root) fast."""

    @model_validator(mode="after")
    def _check_warmup(self) -> WarmupScheduleRecipe:
        # In such a warm-up the factor would rise and fall at once.
        for decays in self.first_decay_epochs.values():
            if decays[0] < self.warmup_epochs:
                decay_name = "milestone" if self.name == "multi_step" else "first fall"
                fix = f"Set warmup_epochs to at most {decays[0]:g}"
                raise ValueError(f"the {decay_name} at epoch {decays[0]:g} lies inside the warm-up. {fix}")
        # A start or power without a warm-up is a leftover or a forgotten `warmup_epochs`.
        for name, default in (("warmup_start", 0), ("warmup_power", 1)):
            if self.warmup_epochs == 0 and getattr(self, name) != default:
                raise ValueError(f"{name!r} counts only in a warm-up. Set warmup_epochs, or remove it")
        return self

    @property
    def warmup(self) -> Warmup:
        return Warmup(self.warmup_epochs, self.warmup_start, self.warmup_power)


# Curves are closures over Python numbers, not tensors: every step calls one, which takes 0.2 us.


class ConstantScheduleRecipe(WarmupScheduleRecipe):
    """A factor of 1 after the warm-up."""

    name: Literal["constant"] = "constant"

    def build_curve(self, span: RunSpan) -> Curve:
        return lambda position: 1.0

    @property
    def changes_lr(self) -> bool:
        return self.warmup_epochs > 0


class StepScheduleRecipe(WarmupScheduleRecipe):
    """The factor falls at even distances."""

    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("warmup_epochs", "every_epochs")

    name: Literal["step"] = "step"
    every_epochs: Epochs
    """Epochs between two decays by `gamma`, for example a third of the run."""
    gamma: Gamma = 0.1
    """Factor of each decay."""

    def build_curve(self, span: RunSpan) -> Curve:
        period = self.every_epochs * span.epoch
        gamma = self.gamma
        # The fall lies at the nearest position, as milestones do.
        return lambda position: gamma ** ((position + 0.5) // period)

    def list_turns(self, span: RunSpan) -> list[ScheduleTurn]:
        period = self.every_epochs * span.epoch
        # One more than fits, as positions are rounded; turns beyond the run are dropped later.
        count = math.ceil(span.total / period) + 1
        return _list_decays([math.ceil(period * index - 0.5) for index in range(1, count)], self.gamma)

    @property
    def first_decay_epochs(self) -> dict[str, tuple[float, ...]]:
        return {"every_epochs": (self.every_epochs,)}


class MultiStepScheduleRecipe(WarmupScheduleRecipe):
    """The factor falls at milestones."""

    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("warmup_epochs", "milestones_epochs")

    name: Literal["multi_step"] = "multi_step"
    milestones_epochs: Annotated[Milestones, Field(min_length=1)]
    """Epochs at which the factor decays by `gamma`, for example [30, 60] of 90."""
    gamma: Gamma = 0.1
    """Factor of each decay."""

    def build_curve(self, span: RunSpan) -> Curve:
        milestones = [epochs_to_position(milestone, span.epoch) for milestone in self.milestones_epochs]
        # All factors are computed beforehand: a call is one bisection.
        factors = [self.gamma**count for count in range(len(milestones) + 1)]
        return lambda position: factors[bisect_right(milestones, position)]

    def list_turns(self, span: RunSpan) -> list[ScheduleTurn]:
        return _list_decays(
            [epochs_to_position(milestone, span.epoch) for milestone in self.milestones_epochs], self.gamma
        )

    @property
    def first_decay_epochs(self) -> dict[str, tuple[float, ...]]:
        return {"milestones_epochs": self.milestones_epochs}


class ExponentialScheduleRecipe(WarmupScheduleRecipe):
    """The factor falls smoothly from the end of the warm-up."""

    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("warmup_epochs", "every_epochs")

    name: Literal["exponential"] = "exponential"
    every_epochs: Epochs
    """Epochs in which the factor decays by `gamma` in total, for example a third of the run."""
    gamma: Gamma = 0.1
    """Factor of the decay in `every_epochs`."""

    def build_curve(self, span: RunSpan) -> Curve:
        period = self.every_epochs * span.epoch
        gamma, warmup = self.gamma, span.warmup
        # Without a warm-up, the same factor as `step` at multiples of `every_epochs`, and smooth between them.
        return lambda position: gamma ** ((position - warmup) / period)


class CosineScheduleRecipe(WarmupScheduleRecipe):
    """Half a cosine from the end of the warm-up to the end of the run."""

    name: Literal["cosine"] = "cosine"
    end: Factor = 0.0
    """Factor at the end of the run."""

    def build_curve(self, span: RunSpan) -> Curve:
        # SGDR without restarts (Loshchilov and Hutter 2016, arXiv 1608.03983).
        end, amplitude = self.end, 1 - self.end
        warmup, length = span.warmup, _count_decay_positions(span)
        return lambda position: end + amplitude * (1 + math.cos(math.pi * (position - warmup) / length)) / 2


class PolynomialScheduleRecipe(WarmupScheduleRecipe):
    """A power of the share of the run that is left, from the end of the warm-up to the end of the run."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Exponent of the remaining share of the run. 1 is a straight line."""
    end: Factor = 0.0
    """Factor at the end of the run."""

    def build_curve(self, span: RunSpan) -> Curve:
        # Power 2 is the usual choice with LARS.
        end, amplitude, power = self.end, 1 - self.end, self.power
        warmup, length = span.warmup, _count_decay_positions(span)
        return lambda position: end + amplitude * (1 - (position - warmup) / length) ** power


class TriangularScheduleRecipe(ScheduleRecipe):
    """The factor rises along a line to its peak, then falls along one."""

    name: Literal["triangular"] = "triangular"
    start: Factor = 0.2
    """Factor at the first step."""
    peak: float = Field(default=0.25, gt=0, lt=1)
    """Share of the run at which the factor reaches 1."""
    end: Factor = 0.0
    """Factor at the end of the run."""

    def build_curve(self, span: RunSpan) -> Curve:
        # Two lines that meet at (peak, 1).
        start, end = self.start, self.end
        peak = self.peak * span.total
        rise = (1 - start) / peak
        drop = (1 - end) / (span.total - peak)
        return lambda position: start + rise * position if position < peak else end + drop * (span.total - position)

    def list_turns(self, span: RunSpan) -> list[ScheduleTurn]:
        return [ScheduleTurn(math.ceil(self.peak * span.total), "peak")]


class OwnScheduleRecipe(WarmupScheduleRecipe):
    """Your own factor as a function of the epoch."""

    name: Literal["own"] = "own"
    factory: str
    """Import path of a function that is called once, as factory(epochs, **args), and returns the factor as a function
    of the epoch: 0 to `epochs`, with fractions. `schedule: my_file.py:make` is enough if there are no other keys."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    def resolve_paths(self, base: Path) -> Self:
        return self.model_copy(update={"factory": make_absolute(self.factory, base)})

    def build_curve(self, span: RunSpan) -> Curve:
        return build_own_curve(self.factory, self.args, total=span.total, epoch=span.epoch, start=span.warmup)

    def list_turns(self, span: RunSpan) -> list[ScheduleTurn]:
        # All that is known of a function is its values: the highest one is named, so that no drawing misses it.
        return [ScheduleTurn(find_peak(self.build_curve(span), start=span.warmup, total=span.total), "peak")]


def _expand_name(value: Any) -> Any:
    # `schedule: cosine` is short for `schedule: {name: cosine}`, and an import path for `{factory: PATH}`.
    if isinstance(value, str):
        value = {"factory" if ":" in value else "name": value}
    return {"name": "own", **value} if isinstance(value, dict) and "factory" in value else value


# A tagged union: pydantic looks at `name`, then validates against one class alone, so that errors are about its keys.
AnyScheduleRecipe = Annotated[
    ConstantScheduleRecipe
    | StepScheduleRecipe
    | MultiStepScheduleRecipe
    | ExponentialScheduleRecipe
    | CosineScheduleRecipe
    | PolynomialScheduleRecipe
    | TriangularScheduleRecipe
    | OwnScheduleRecipe,
    Field(discriminator="name"),
    BeforeValidator(_expand_name),
]
"""The recipe of one schedule; `name` says which one."""


class _ScheduleValues(RecipePart):
    """The `schedule` part alone, so that messages name its keys as they do for a recipe."""

    schedule: AnyScheduleRecipe


def read_schedule(**values: Any) -> AnyScheduleRecipe:
    """Validates the `schedule` part of a recipe, and returns it: `read_schedule(name="cosine", warmup_epochs=5)`.

    Raises:
        RecipeError: an unknown name or key, or a value out of range.
    """
    return validate_part({"schedule": values}, _ScheduleValues, "read_schedule").schedule


@final
class Schedule:
    """Factor on the learning rate: `schedule(position)`, for the step that begins at a position (samples served).

    Args:
        recipe: the schedule, with its options.
        total: number of samples that the run serves. Later the factor stays constant. A longer warm-up is cut there.
        epoch: number of samples of one epoch.

    Raises:
        UsageError: the warm-up starts at `base`, which only a recipe's optimizer knows.
    """

    def __init__(self, recipe: ScheduleRecipe, *, total: int, epoch: int) -> None:
        epochs, start, power = recipe.warmup
        if start == "base":
            what = "the warm-up starts at base, and the base of the learning rate is not known here"
            raise UsageError(what, where="schedule.warmup_start", fix="Give the factor: per / batch.")
        # A run ends at a whole step, which may lie before the end of the warm-up.
        warmup = min(epochs_to_position(epochs, epoch), total)
        self._recipe, self._span = recipe, RunSpan(total, epoch, warmup)
        self._start, self._power = start, power
        self._curve = recipe.build_curve(self._span)

    def __call__(self, position: int) -> float:
        span = self._span
        # The warm-up covers the curve: it ends at 1, where the curve begins.
        if position < span.warmup:
            progress: float = (position / span.warmup) ** self._power
            return self._start + (1 - self._start) * progress
        return self._curve(position if position < span.total else span.total)

    def list_turns(self) -> list[ScheduleTurn]:
        """Lists the turns within the run, in no particular order."""
        warmup_turns = [ScheduleTurn(self._span.warmup, "end of the warm-up")] if self._span.warmup else []
        # Turns outside the run never happen: a milestone beyond its end, for example.
        turns = [*warmup_turns, *self._recipe.list_turns(self._span)]
        return [turn for turn in turns if 0 < turn.position < self._span.total]


def _count_decay_positions(span: RunSpan) -> int:
    """Counts the positions between warm-up and end of the run; at least 1, as a run may be nothing but warm-up."""
    return max(span.total - span.warmup, 1)


def _list_decays(positions: list[int], gamma: float) -> list[ScheduleTurn]:
    return [ScheduleTurn(position, f"falls to x {gamma**count:.4g}") for count, position in enumerate(positions, 1)]
