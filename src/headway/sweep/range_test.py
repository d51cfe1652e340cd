"""Range tests: a short training whose learning rate rises at every step until the loss does (Smith 2015,
arXiv 1506.01186)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch

from headway.core.errors import HeadwayError, RecipeError, TrainingError
from headway.core.messages import mute_messages
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.doctor.measurement_job import list_measured_values, with_values
from headway.optim.groups import Group
from headway.optim.optimizer_recipe import MuonRecipe
from headway.optim.schedule import Curve, RunSpan, Schedule, ScheduleRecipe
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.setup.seeding import GeneratorStates
from headway.setup.shared_inputs import SharedInputs
from headway.sweep.rate_curve import RateCurve, list_rates
from headway.training.display import Display
from headway.training.trainer import Trainer

FIRST_CHANGE, LAST_CHANGE = 1e-4, 1e2
"""Length of the first step, as a share of that of the weights, at the first and the last rate of a range test.

On digits the loss is lowest where that share is 0.04 (LARS), 0.15 (LAMB), 0.2 (SGD), 3 (Muon) and 5 (AdamW), while the
rates themselves are 38, 0.15, 1.5, 2 and 0.15.
"""
TRIED_RATES = (1.0, 1e8, 1e-8)
"""Rates at which a first step is measured. The first one serves for all but losses of an extreme scale."""
LEAST_CHANGE = 1e-6
"""A smaller step is lost in the rounding of the weights."""
MOST_FIRST_STEPS = 20
"""Steps until one has moved the weights: the first ones may be skipped to find the loss scale of fp16."""
# Every step has a record of its loss, and the rate is the test's own.
TESTED: dict[str, Any] = {
    "log_every_steps": 1,
    "observe": {"on_divergence": "ignore"},
    "schedule": {"name": "constant"},
    "batch_growth": None,
}


@final
@dataclass(frozen=True)
class RangeTest:
    """A range test that was made.

    Attributes:
        curve: its losses by learning rate.
        change: length of the first step at a learning rate of 1, as a share of the length of the weights.
        steps: steps that were made, those that measured the change included.
    """

    curve: RateCurve
    change: float
    steps: int


def measure_ranges(
    recipes: Sequence[LoadedRecipe[TrainRecipe]], steps: Sequence[int]
) -> list[RangeTest | HeadwayError]:
    """Makes a range test of each recipe. They read the same batches, in turns of one step.

    The range follows from the optimizer's own first step, whose length is proportional to the rate for every optimizer:
    it starts where that step changes the weights by 0.01 %, and ends where it would change them by a hundred times
    their length. So it depends neither on the scale of the loss nor on the optimizer's units.

    Args:
        recipes: they differ in the optimizer alone, and `optimizer.lr` is a number.
        steps: steps of each test.

    Returns:
        the test of each recipe, or why there is none: its first step moves no weight, its first loss is not finite, or
        it cannot be set up (see `build_setup`).

    Raises:
        RecipeError: an optimizer changes its learning rate by itself.
    """
    for loaded in recipes:
        if loaded.recipe.optimizer.changes_lr:
            what = f"{loaded.recipe.optimizer.name} changes its learning rate by itself, so it has no range test"
            raise RecipeError(what, where="optimizer.name", fix="Take another optimizer, for example sgd or lars.")
    found: list[RangeTest | HeadwayError] = []
    with closing(SharedInputs()) as shared, mute_messages(["setup", "training"]), ExitStack() as stack:
        tests: dict[int, _Test] = {}
        for place, loaded in enumerate(recipes):
            try:
                change, before = _measure_change(loaded, shared)
                rates = list_rates(FIRST_CHANGE / change, LAST_CHANGE / change, steps[place])
                tests[place] = stack.enter_context(closing(_Test(loaded, rates, shared)))
            except HeadwayError as error:
                found.append(error)
                continue
            found.append(RangeTest(RateCurve(rates, ()), change, before))
        # In turns, so that each batch is decoded once.
        while going := [test for test in tests.values() if not test.is_over]:
            for test in going:
                test.take_turn()
        for place, test in tests.items():
            begun = found[place]
            assert isinstance(begun, RangeTest)
            found[place] = replace(begun, curve=test.curve, steps=begun.steps + test.trainer.step)
    return found


@final
class _RampRecipe(ScheduleRecipe):
    """The factor of each step, from a list."""

    name: Literal["ramp"] = "ramp"
    factors: tuple[float, ...]
    batch: int

    def build_curve(self, span: RunSpan) -> Curve:
        return lambda position: self.factors[min(position // self.batch, len(self.factors) - 1)]


@final
class _LossRecorder(Display):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, trainer: Trainer) -> None:
        pass

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.losses.append(record["loss"])


@final
class _Test:
    """A training with given rates, between two of its steps.

    Attributes:
        trainer: makes the steps.
        is_over: nothing is left to do: the rates are used up, or the loss has risen.
    """

    def __init__(self, loaded: LoadedRecipe[TrainRecipe], rates: Sequence[float], shared: SharedInputs) -> None:
        values = TESTED | list_measured_values(loaded.recipe)
        setup = build_setup(with_values(loaded, values, "as it is measured"), shared=shared)
        batch = setup.recipe.global_batch
        ramp = _RampRecipe(factors=tuple(rate / rates[-1] for rate in rates), batch=batch)
        schedule = Schedule(ramp, total=batch * len(rates), epoch=setup.epoch)
        self._rates, self._recorder, self.is_over = tuple(rates), _LossRecorder(), False
        self._built_rate = setup.lr
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".headway-lr-"))
            run = RunFolder.create(Path(folder) / "run")
            setup = replace(setup, schedule=schedule, lr=rates[-1])
            self.trainer = stack.enter_context(closing(Trainer(setup, run, self._recorder)))
            self._steps: Iterator[None] = self.trainer.iterate(len(rates))
            self._states = GeneratorStates.read(setup.device)
            self._stack = stack.pop_all()
        groups = setup.optimizer.param_groups
        self._fixed = [(group, group["lr_scale"]) for group in groups if _has_own_rate(setup.recipe, group)]
        moved = [weight for group in groups if not _has_own_rate(setup.recipe, group) for weight in group["params"]]
        # Biases and the weights of norms may begin at 0, or at 1 in a layer that has far smaller ones beside it.
        self._weights: list[torch.Tensor] = [weight for weight in moved if weight.ndim > 1] or moved

    @property
    def curve(self) -> RateCurve:
        """The losses so far."""
        return RateCurve(self._rates, tuple(self._recorder.losses))

    def take_turn(self) -> None:
        """Makes one step."""
        self._states.restore()
        rate = self._rates[self.trainer.step]
        for group, scale in self._fixed:
            group["lr_scale"] = scale * self._built_rate / rate
        try:
            next(self._steps)
        except TrainingError:
            # A loss that is not finite.
            self.is_over = True
        self._states = GeneratorStates.read(self.trainer.setup.device)
        self.is_over = self.is_over or self.trainer.step == len(self._rates) or self.curve.has_diverged

    def measure_first_step(self) -> float:
        """Makes the first step, and returns its length as a share of the length of the weights; 0 if none moves."""
        before = [weight.detach().clone() for weight in self._weights]
        length, change = math.hypot(*map(_measure_length, before)), 0.0
        while not self.is_over and not change:
            self.take_turn()
            change = math.hypot(*(_measure_length(a - b) for a, b in zip(self._weights, before, strict=True)))
        return change / length if length else 0.0

    def close(self) -> None:
        """Ends the training and removes its folder."""
        self._stack.close()


def _has_own_rate(recipe: TrainRecipe, group: Group) -> bool:
    """Returns True for a group whose rate the recipe states beside `optimizer.lr`, so that a test leaves it alone."""
    optimizer = recipe.optimizer
    return isinstance(optimizer, MuonRecipe) and optimizer.lr_rest is not None and not group["filters"]


def _measure_length(values: torch.Tensor) -> float:
    return float(values.detach().double().norm())


def _measure_change(loaded: LoadedRecipe[TrainRecipe], shared: SharedInputs) -> tuple[float, int]:
    """Returns the length of the first step at a rate of 1, as a share of the weights' length, and the steps made."""
    steps = 0
    for rate in TRIED_RATES:
        with closing(_Test(loaded, [rate] * MOST_FIRST_STEPS, shared)) as test:
            change = test.measure_first_step()
            steps += test.trainer.step
        if LEAST_CHANGE < change < math.inf:
            return change / rate, steps
        if not test.curve.losses:
            fix = "Check images, labels and network: headway doctor RECIPE."
            raise TrainingError("the loss of the first step is not finite, before any weight has changed", fix=fix)
    what = f"the first step of {loaded.recipe.optimizer.name} moves no weight"
    raise TrainingError(what, fix="Check that the loss depends on the network, and that not all of it is frozen.")
