"""Preview of learning rate, momentum and batch over a run, computed before it starts."""

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
from headway.data.store_address import StoreAddress, is_store_address
from headway.optim.batch_scaling import require_number
from headway.optim.internal_schedule import InternalSchedule
from headway.optim.schedule import Schedule, ScheduleTurn
from headway.setup.rates import (
    check_length,
    find_batch_warnings,
    find_step_warnings,
    plan_steps,
    resolve_batch,
    resolve_rates,
)
from headway.setup.recipe import TrainRecipe

# Points of a curve; a chart is about as many pixels wide.
CURVE_POINTS = 600


@final
@dataclass(frozen=True)
class SchedulePoint:
    """One step of the schedule. `step` is the number of steps before it."""

    step: int
    position: int
    epoch: float
    # Learning rate at which its macro-batch moves the weights, with the optimizer's own changes but without trust
    # ratios of layers; 0 for steps at the end that do not fill a macro-batch. For `rmsprop_sgd`: that of SGD.
    lr: float
    momentum: float | None
    # Samples of its macro-batch, which spans one step for all optimizers but `lbsgd`.
    batch: int
    what: str = ""
    # Learning rate of the RMSprop part. Used by `rmsprop_sgd`.
    lr_rmsprop: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class SchedulePreview:
    """Schedule of a run, as far as the recipe determines it."""

    # Recipe with resolved rates.
    loaded: LoadedRecipe[TrainRecipe]
    # Samples per epoch.
    samples: int
    plan: BatchPlan
    steps: int
    schedule: Schedule
    # Changes that the optimizer makes to learning rate and batch by itself.
    internal: InternalSchedule
    lr: float
    # First beta for Adam and its relatives; None if the optimizer has no momentum.
    momentum: float | None
    # Known needs of large batches that the recipe does not meet, and a suspicious length.
    warnings: Sequence[str]

    @property
    def total_positions(self) -> int:
        """Number of positions in the whole run."""
        return self.plan.find_position(self.steps)

    @property
    def epochs(self) -> float:
        return self.total_positions / self.samples

    def compute_point(self, step: int, what: str = "") -> SchedulePoint:
        """Computes the schedule at a step."""
        plan, internal, position = self.plan, self.internal, self.plan.find_position(step)
        first = step - step % internal.steps_per_update
        # The whole macro-batch is applied at its last step, with the learning rate of that step.
        last = first + internal.steps_per_update - 1
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
        """Lists the first step, all changes of the schedule, the highest learning rate, and the last step."""
        sizes = zip(self.plan.starts.tolist(), self.plan.sizes.tolist(), strict=True)
        grows = [ScheduleTurn(start, f"batch grows to {size:,}") for start, size in sizes if start]
        changes: dict[int, list[str]] = {0: ["start"]}
        for turn in sorted([*self.schedule.list_turns(), *grows]):
            step = self.plan.count_steps(0, turn.position)
            if step < self.steps:
                changes.setdefault(step, []).append(turn.change)
        for step, text in self.internal.turns:
            if step < self.steps:
                changes.setdefault(step, []).append(text)
        # The optimizer's own factor times the schedule may be highest between two turns.
        if self.internal.turns:
            changes.setdefault(max(self._choose_steps(CURVE_POINTS), key=lambda step: self.compute_point(step).lr), [])
        if left := self.steps % self.internal.steps_per_update:
            changes.setdefault(self.steps - left, []).append("macro-batch not full: no update")
        changes.setdefault(self.steps - 1, []).append("last step")
        points = [self.compute_point(step, ", ".join(what)) for step, what in sorted(changes.items())]
        # A constant learning rate has no peak to mark.
        if max(point.lr for point in points) == min(point.lr for point in points):
            return points
        best = max(range(len(points)), key=lambda place: points[place].lr)
        if "peak" not in points[best].what:
            points[best] = replace(points[best], what=", ".join(filter(None, (points[best].what, "peak"))))
        return [point for point in points if point.what]

    def _choose_steps(self, count: int) -> set[int]:
        """Chooses steps evenly over the run's positions."""
        positions = (np.arange(count) + 0.5) * self.total_positions // count
        # First position of each step, so that every position selects the step it belongs to.
        begun = (positions - self.plan.locate_slots(positions.astype(np.int64))[0]).astype(np.int64)
        return {self.plan.count_steps(0, int(position)) for position in begun}

    def sample_curve(self, count: int = CURVE_POINTS) -> list[SchedulePoint]:
        """Samples the schedule evenly over the run, and at both sides of every turn, where it may jump."""
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


def build_preview(path: Path, overrides: Sequence[str], samples: int | None = None, ranks: int = 1) -> SchedulePreview:
    """Reads a recipe and computes its schedule. Neither the network nor an image is loaded.

    Args:
        samples: Size of the training set; None: read it from the packed data set.
        ranks: Number of ranks, for a batch per device.

    Raises:
        HeadwayError: The recipe is wrong.
        UsageError: There is no packed data set to read the size from.
    """
    loaded = resolve_rates(resolve_batch(read_recipe(path, overrides, TrainRecipe), ranks))
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
        schedule=Schedule(recipe.schedule.resolve_paths(loaded.base), total=plan.find_position(steps), epoch=samples),
        internal=recipe.optimizer.build_internal_schedule(samples / recipe.global_batch),
        lr=require_number(recipe.optimizer.lr, "optimizer.lr"),
        momentum=recipe.optimizer.displayed_momentum,
        warnings=[*find_batch_warnings(recipe), *find_step_warnings(recipe, samples, plan, steps)],
    )


def _count_samples(recipe: TrainRecipe, base: Path) -> int:
    uri = recipe.data.train
    if uri == SYNTHETIC:
        return (recipe.data.synthetic or SyntheticRecipe()).samples
    if is_store_address(uri):
        columns, _, _ = load_columns(StoreAddress.parse(uri, base=base).resolve_split() / COLUMNS_FILE)
        return len(columns["label"])
    path = base / Path(uri).expanduser() / COLUMNS_FILE
    if "://" in uri or not path.is_file():
        fix = "Give the number of images: --samples 50000. Or pack the data set first."
        raise UsageError("there is no packed data set here, so its size is unknown", where=uri, fix=fix)
    columns, _, _ = load_columns(path)
    return len(columns["label"])
