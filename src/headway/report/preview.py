"""Preview: learning rate, momentum and batch over a run, before a second is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import UsageError
from headway.core.recipe import Loaded, load
from headway.data.batch_plan import BatchPlan
from headway.data.columns import COLUMNS_FILE, load_columns
from headway.data.options import SYNTHETIC, SyntheticRecipe
from headway.optim.pace import Pace
from headway.optim.rate import number
from headway.optim.schedule import Mark, Schedule
from headway.setup.rates import check_length, find_batch_warnings, find_oddities, plan_steps, resolve_rates
from headway.setup.recipe import TrainRecipe

CURVE_POINTS = 600


@final
@dataclass(frozen=True)
class Point:
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
class Preview:
    """What a run will do, as far as the recipe says it.

    Attributes:
        loaded: the recipe, its rates resolved.
        samples: of one epoch.
        momentum: None: the optimizer has none. Adam and its kin: their first beta.
        pace: what the optimizer makes of learning rate and batch by itself.
        warnings: what a large batch is known to want, and a length that is hardly meant.
    """

    loaded: Loaded[TrainRecipe]
    samples: int
    plan: BatchPlan
    steps: int
    schedule: Schedule
    pace: Pace
    lr: float
    momentum: float | None
    warnings: Sequence[str]

    @property
    def total(self) -> int:
        """Positions of the whole run."""
        return self.plan.position_of(self.steps)

    @property
    def epochs(self) -> float:
        return self.total / self.samples

    def at(self, step: int, what: str = "") -> Point:
        """A step of the run."""
        plan, pace, position = self.plan, self.pace, self.plan.position_of(step)
        first = step - step % pace.steps
        last = first + pace.steps - 1  # in which the macro-batch moves the weights
        factor = self.schedule(plan.position_of(last)) * pace.factor(last) if last < self.steps else 0.0
        batch = plan.position_of(last + 1) - plan.position_of(first)
        rmsprop = None if pace.rmsprop is None else self.schedule(position) * pace.rmsprop(step)
        return Point(step, position, position / self.samples, self.lr * factor, self.momentum, batch, what, rmsprop)

    @property
    def largest(self) -> int:
        """Samples of the largest macro-batch."""
        return self.plan.largest * self.pace.steps

    def turns(self) -> list[Point]:
        """The first step, those at which something changes its way, the highest learning rate, and the last step."""
        sizes = zip(self.plan.starts.tolist(), self.plan.sizes.tolist(), strict=True)
        grows = [Mark(start, f"batch grows to {size:,}") for start, size in sizes if start]
        said: dict[int, list[str]] = {0: ["start"]}
        for mark in sorted([*self.schedule.marks(), *grows]):
            step = self.plan.steps_between(0, mark.position)
            if step < self.steps:
                said.setdefault(step, []).append(mark.what)
        for step, text in self.pace.turns:
            if step < self.steps:
                said.setdefault(step, []).append(text)
        if self.pace.turns:  # times a schedule, the highest rate may lie between them
            said.setdefault(max(self._evenly(CURVE_POINTS), key=lambda step: self.at(step).lr), [])
        if left := self.steps % self.pace.steps:
            said.setdefault(self.steps - left, []).append("no full macro-batch: moves nothing")
        said.setdefault(self.steps - 1, []).append("last step")
        points = [self.at(step, ", ".join(what)) for step, what in sorted(said.items())]
        if max(point.lr for point in points) == min(point.lr for point in points):
            return points
        best = max(range(len(points)), key=lambda place: points[place].lr)
        if "peak" not in points[best].what:
            points[best] = replace(points[best], what=", ".join(filter(None, (points[best].what, "peak"))))
        return [point for point in points if point.what]

    def _evenly(self, count: int) -> set[int]:
        """Steps evenly over the run's positions."""
        positions = (np.arange(count) + 0.5) * self.total // count
        begun = (positions - self.plan.slots(positions.astype(np.int64))[0]).astype(np.int64)
        return {self.plan.steps_between(0, int(position)) for position in begun}

    def curve(self, count: int = CURVE_POINTS) -> list[Point]:
        """Steps evenly over the run's positions, and both sides of every turn."""
        steps = self._evenly(count)
        for turn in self.turns():
            steps |= {max(0, turn.step - 1), turn.step}
        return [self.at(step) for step in sorted(steps)]

    def to_json(self) -> dict[str, Any]:
        points = self.curve()
        names = ["epoch", "lr", "momentum", "batch"] + ["lr_rmsprop"] * (self.pace.rmsprop is not None)
        return {
            "samples": self.samples,
            "steps": self.steps,
            "epochs": self.epochs,
            "turns": [asdict(turn) for turn in self.turns()],
            "curve": {name: [getattr(point, name) for point in points] for name in names},
            "warnings": list(self.warnings),
        }


def preview(path: Path, overrides: Sequence[str], samples: int | None = None) -> Preview:
    """Reads a recipe and works out its run. Neither the network nor an image is touched.

    Args:
        samples: size of the training set; None: as its columns say.

    Raises:
        HeadwayError: the recipe is wrong. UsageError: there is no packed data set to ask for its size.
    """
    loaded = resolve_rates(load(path, overrides, TrainRecipe))
    recipe = loaded.recipe
    if samples is None:
        samples = _samples(recipe, loaded.base)
    plan, steps = plan_steps(recipe, samples)
    check_length(recipe, steps)
    shown = recipe.optimizer.model_dump()  # only what the chosen optimizer uses
    return Preview(
        loaded=loaded,
        samples=samples,
        plan=plan,
        steps=steps,
        schedule=Schedule(recipe.schedule, total=plan.position_of(steps), epoch=samples),
        pace=recipe.optimizer.pace(samples / recipe.batch),
        lr=number(recipe.optimizer.lr, "optimizer.lr"),
        momentum=shown.get("momentum", (shown.get("betas") or (None,))[0]),
        warnings=[*find_batch_warnings(recipe), *find_oddities(recipe, samples, plan, steps)],
    )


def _samples(recipe: TrainRecipe, base: Path) -> int:
    uri = recipe.data.train
    if uri == SYNTHETIC:
        return (recipe.data.synthetic or SyntheticRecipe()).samples
    path = base / Path(uri).expanduser() / COLUMNS_FILE
    if "://" in uri or not path.is_file():
        fix = "Say how many images it has: --samples 50000. Or pack it first."
        raise UsageError("there is no packed data set here, so its size is not known", where=uri, fix=fix)
    columns, _, _ = load_columns(path)
    return len(columns["label"])
