"""Preview: learning rate, momentum and batch over a run, before a second is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import UsageError
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.data.batch_plan import BatchPlan
from headway.data.columns import COLUMNS_FILE, load_columns
from headway.data.data_recipe import SYNTHETIC, SyntheticRecipe
from headway.optim.batch_scaling import require_number
from headway.optim.internal_schedule import InternalSchedule
from headway.optim.schedule import Schedule, ScheduleTurn
from headway.setup.rates import check_length, find_batch_warnings, find_oddities, plan_steps, resolve_rates
from headway.setup.recipe import TrainRecipe

CURVE_POINTS = 600


@final
@dataclass(frozen=True)
class SchedulePoint:
    """One step, by the number of steps before it.

    Attributes:
        lr: that its macro-batch moves the weights with, what the optimizer does to it by itself included; 0 of steps at
            the end that fill no macro-batch. Trust ratios of layers are not in it. Of `rmsprop_sgd`: that of SGD.
        batch: samples of its macro-batch, which is one step of all optimizers but `lbsgd`.
        lr_rmsprop: of `rmsprop_sgd`: that of RMSprop beside it.
    """

    step: int
    position: int
    epoch: float
    lr: float
    momentum: float | None
    batch: int
    what: str = ""
    lr_rmsprop: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class SchedulePreview:
    """What a run will do, as far as the recipe says it.

    Attributes:
        loaded: the recipe, its rates resolved.
        samples: of one epoch.
        momentum: None: the optimizer has none. Adam and its kin: their first beta.
        internal: what the optimizer makes of learning rate and batch by itself.
        warnings: what a large batch is known to want, and a length that is hardly meant.
    """

    loaded: LoadedRecipe[TrainRecipe]
    samples: int
    plan: BatchPlan
    steps: int
    schedule: Schedule
    internal: InternalSchedule
    lr: float
    momentum: float | None
    warnings: Sequence[str]

    @property
    def total_positions(self) -> int:
        """Positions of the whole run."""
        return self.plan.find_position(self.steps)

    @property
    def epochs(self) -> float:
        return self.total_positions / self.samples

    def compute_point(self, step: int, what: str = "") -> SchedulePoint:
        """A step of the run."""
        plan, internal, position = self.plan, self.internal, self.plan.find_position(step)
        first = step - step % internal.steps_per_update
        last = first + internal.steps_per_update - 1  # in which the macro-batch moves the weights
        factor = self.schedule(plan.find_position(last)) * internal.lr_factor(last) if last < self.steps else 0.0
        batch = plan.find_position(last + 1) - plan.find_position(first)
        rmsprop = None if internal.rmsprop_lr is None else self.schedule(position) * internal.rmsprop_lr(step)
        return SchedulePoint(
            step, position, position / self.samples, self.lr * factor, self.momentum, batch, what, rmsprop
        )

    @property
    def largest_batch(self) -> int:
        """Samples of the largest macro-batch."""
        return self.plan.largest_batch * self.internal.steps_per_update

    def list_turns(self) -> list[SchedulePoint]:
        """The first step, those at which something changes its way, the highest learning rate, and the last step."""
        sizes = zip(self.plan.starts.tolist(), self.plan.sizes.tolist(), strict=True)
        grows = [ScheduleTurn(start, f"batch grows to {size:,}") for start, size in sizes if start]
        said: dict[int, list[str]] = {0: ["start"]}
        for turn in sorted([*self.schedule.list_turns(), *grows]):
            step = self.plan.count_steps(0, turn.position)
            if step < self.steps:
                said.setdefault(step, []).append(turn.change)
        for step, text in self.internal.turns:
            if step < self.steps:
                said.setdefault(step, []).append(text)
        if self.internal.turns:  # times a schedule, the highest rate may lie between them
            said.setdefault(max(self._choose_steps(CURVE_POINTS), key=lambda step: self.compute_point(step).lr), [])
        if left := self.steps % self.internal.steps_per_update:
            said.setdefault(self.steps - left, []).append("no full macro-batch: moves nothing")
        said.setdefault(self.steps - 1, []).append("last step")
        points = [self.compute_point(step, ", ".join(what)) for step, what in sorted(said.items())]
        if max(point.lr for point in points) == min(point.lr for point in points):
            return points
        best = max(range(len(points)), key=lambda place: points[place].lr)
        if "peak" not in points[best].what:
            points[best] = replace(points[best], what=", ".join(filter(None, (points[best].what, "peak"))))
        return [point for point in points if point.what]

    def _choose_steps(self, count: int) -> set[int]:
        """Steps evenly over the run's positions."""
        positions = (np.arange(count) + 0.5) * self.total_positions // count
        begun = (positions - self.plan.locate_slots(positions.astype(np.int64))[0]).astype(np.int64)
        return {self.plan.count_steps(0, int(position)) for position in begun}

    def sample_curve(self, count: int = CURVE_POINTS) -> list[SchedulePoint]:
        """Steps evenly over the run's positions, and both sides of every turn."""
        steps = self._choose_steps(count)
        for turn in self.list_turns():
            steps |= {max(0, turn.step - 1), turn.step}
        return [self.compute_point(step) for step in sorted(steps)]

    def to_json(self) -> dict[str, Any]:
        points = self.sample_curve()
        names = ["epoch", "lr", "momentum", "batch"] + ["lr_rmsprop"] * (self.internal.rmsprop_lr is not None)
        return {
            "samples": self.samples,
            "steps": self.steps,
            "epochs": self.epochs,
            "turns": [asdict(turn) for turn in self.list_turns()],
            "curve": {name: [getattr(point, name) for point in points] for name in names},
            "warnings": list(self.warnings),
        }


def build_preview(path: Path, overrides: Sequence[str], samples: int | None = None) -> SchedulePreview:
    """Reads a recipe and works out its run. Neither the network nor an image is touched.

    Args:
        samples: size of the training set; None: as its columns say.

    Raises:
        HeadwayError: the recipe is wrong. UsageError: there is no packed data set to ask for its size.
    """
    loaded = resolve_rates(read_recipe(path, overrides, TrainRecipe))
    recipe = loaded.recipe
    if samples is None:
        samples = _count_samples(recipe, loaded.base)
    plan, steps = plan_steps(recipe, samples)
    check_length(recipe, steps)
    return SchedulePreview(
        loaded=loaded,
        samples=samples,
        plan=plan,
        steps=steps,
        schedule=Schedule(recipe.schedule, total=plan.find_position(steps), epoch=samples),
        internal=recipe.optimizer.build_internal_schedule(samples / recipe.batch),
        lr=require_number(recipe.optimizer.lr, "optimizer.lr"),
        momentum=recipe.optimizer.displayed_momentum,
        warnings=[*find_batch_warnings(recipe), *find_oddities(recipe, samples, plan, steps)],
    )


def _count_samples(recipe: TrainRecipe, base: Path) -> int:
    uri = recipe.data.train
    if uri == SYNTHETIC:
        return (recipe.data.synthetic or SyntheticRecipe()).samples
    path = base / Path(uri).expanduser() / COLUMNS_FILE
    if "://" in uri or not path.is_file():
        fix = "Say how many images it has: --samples 50000. Or pack it first."
        raise UsageError("there is no packed data set here, so its size is not known", where=uri, fix=fix)
    columns, _, _ = load_columns(path)
    return len(columns["label"])
