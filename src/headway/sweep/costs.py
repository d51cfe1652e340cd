"""Costs of a trial's parts, measured before a sweep: building it, decoding and stepping a batch, evaluating, saving."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast, final

import torch

from headway.core.messages import mute_messages
from headway.core.recipe import LoadedRecipe
from headway.data.batch import Batch
from headway.setup.recipe import TrainRecipe
from headway.setup.shared_inputs import SharedInputs
from headway.training.actions import Action
from headway.training.progress import hide_progress
from headway.training.run_steps import RunSteps, start_run
from headway.training.trainer import Trainer

WARM_UP = 3
"""Steps and batches before a measurement: the loader's ring fills, and torch chooses its algorithms."""
ROUNDS = 3
"""Rounds of a measurement. Each has a turn of every kind of step, so that a slow moment of the machine hits all."""
LEAST, MOST = 3, 20
MEASURE_S = 0.15
"""Seconds after which a turn ends, if it has made `LEAST` steps."""
AFTER_S, MOST_AFTER = 0.05, 10
"""Seconds and most steps for which steps take longer after an evaluation or a checkpoint: caches have other data, and a
thread writes."""
LIMIT_S = 10.0
"""Wall seconds after which a part of the measurement (starts, steps, pauses) repeats nothing more."""
NEVER = 1e9

# Nothing but steps happens by itself, and the run is long enough for the measurement.
_STEPS_ALONE: dict[str, Any] = {
    "evaluate.every_epochs": NEVER,
    "evaluate.at_steps": [],
    "checkpoint.every_epochs": NEVER,
    "checkpoint.every_steps": None,
    "stop_at": None,
    "early_stopping": None,
}


@final
@dataclass(frozen=True, kw_only=True)
class TrialCosts:
    """Seconds of a processor's core for the parts of a trial; on a GPU, seconds of wall time.

    Attributes:
        open_s: what the first trial of a process costs more than another one: it opens the data.
        build_s: building a trial, and what its first step and its first evaluation take longer than others.
        step_s: a step, without its input.
        decode_s: the input of a step. It is what steps take longer with a loader than on one batch, if that is more
            than the loader takes alone: its threads and the training disturb each other.
        evaluate_s: an evaluation, with the log record before it and what it adds to the next steps.
        checkpoint_s: a checkpoint, with what it adds to the next steps.
        end_s: summary and panels at the end of a run.
    """

    open_s: float
    build_s: float
    step_s: float
    decode_s: float
    evaluate_s: float
    checkpoint_s: float
    end_s: float


class MeasurementStoppedError(Exception):
    """The process that measures has to end."""


def measure_costs(
    loaded: LoadedRecipe[TrainRecipe], stopping: Callable[[], bool] = lambda: False, limit_s: float = LIMIT_S
) -> TrialCosts:
    """Measures the costs of a recipe here, in a run that is thrown away. It takes some seconds.

    Args:
        stopping: returns True once the process has to end; asked before each step, evaluation and checkpoint.
        limit_s: wall seconds after which a part of the measurement repeats nothing more. Each is made once.

    Raises:
        MeasurementStoppedError: `stopping` returned True.
    """
    watch = _Watch(stopping, limit_s)
    clock: Callable[[], float] = time.process_time
    if loaded.recipe.device.startswith("cuda"):
        clock = _read_device_clock
    alone = loaded.resolve_all({key: (value, "only steps are measured") for key, value in _STEPS_ALONE.items()})
    with (
        tempfile.TemporaryDirectory(prefix="headway-costs-") as folder,
        hide_progress(True),
        mute_messages(),
        closing(SharedInputs()) as shared,
        ExitStack() as stack,
    ):
        begun = list[float]()
        for name in ("first", "second"):
            watch.check()
            if begun and watch.is_late:
                # Opening the data counts as building then.
                break
            began = clock()
            run = start_run(alone, Path(folder) / name, warns=False, shared=shared)
            steps = stack.enter_context(closing(run))
            trainer = next(steps)
            begun.append(clock() - began)
            watch.check()
            # The first evaluation of a process takes longer than the first one of a trial.
            began = clock()
            trainer.recovery.queue(Action.EVALUATE)
            next(steps)
            first_evaluation_s = clock() - began
        open_s = max(0.0, begun[0] - begun[-1])
        return _measure_parts(steps, trainer, clock, watch, open_s, begun[-1], first_evaluation_s)


@final
class _Watch:
    """Says when a measurement has to end, and when its present part takes too long."""

    def __init__(self, stopping: Callable[[], bool], limit_s: float) -> None:
        self._stopping, self._limit_s = stopping, limit_s
        self.begin()

    def begin(self) -> None:
        """Begins a part."""
        self._began = time.monotonic()

    @property
    def is_late(self) -> bool:
        """True if this part has lasted as long as it may."""
        return time.monotonic() - self._began >= self._limit_s

    def check(self) -> None:
        """Raises MeasurementStoppedError if the process has to end."""
        if self._stopping():
            raise MeasurementStoppedError


def _read_device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _measure_parts(
    steps: RunSteps,
    trainer: Trainer,
    clock: Callable[[], float],
    watch: _Watch,
    open_s: float,
    build_s: float,
    first_evaluation_s: float,
) -> TrialCosts:
    setup = trainer.setup
    batches = replace(setup.inputs, batch_source=None).build_batches(setup.recipe, setup.plan, 0)
    with closing(cast("Generator[Batch]", iter(batches))) as stream:
        batch = next(stream)
        # A copy: the loader fills the memory of the batch again.
        kept = replace(batch, images=batch.images.clone(), labels=batch.labels.clone())
        source: Iterator[Batch] = cycle([kept])

        def read() -> Iterator[Batch]:
            while True:
                yield next(source)

        def step(one: Iterator[Batch]) -> None:
            nonlocal source
            source = one
            _step(steps, trainer)

        setup.inputs.batch_source = lambda plan, position: read()
        kinds: dict[str, Callable[[], object]] = {
            "kept": lambda: step(cycle([kept])),
            "read": lambda: step(stream),
            "decode": lambda: next(stream),
        }
        # The first step of a network takes longer than the others.
        first_s = _time_each(kinds["kept"], clock, watch, most=1, warm_up=0)
        watch.begin()
        found = {name: statistics.fmean(seconds) for name, seconds in _time_in_turns(kinds, clock, watch).items()}
        watch.begin()
        pause = _Pause(trainer, clock, kinds["read"], found["read"], watch)
        evaluate_s = pause.time(steps, Action.LOG, Action.EVALUATE)
        checkpoint_s = pause.time(steps, Action.CHECKPOINT)
    source = cycle([kept])
    watch.check()
    began = clock()
    trainer.stopping = True
    for _ in steps:
        pass
    return TrialCosts(
        open_s=open_s,
        build_s=build_s + max(0.0, first_s - found["kept"]) + max(0.0, first_evaluation_s - evaluate_s),
        step_s=found["kept"],
        decode_s=max(found["decode"], found["read"] - found["kept"]),
        evaluate_s=evaluate_s,
        checkpoint_s=checkpoint_s,
        end_s=clock() - began,
    )


def _time_in_turns(
    kinds: Mapping[str, Callable[[], object]], clock: Callable[[], float], watch: _Watch
) -> dict[str, list[float]]:
    """Returns the seconds of a call of each kind, round by round."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for done in range(ROUNDS):
        if done and watch.is_late:
            break
        for name, work in kinds.items():
            taken[name].append(_time_each(work, clock, watch))
    return taken


def _step(steps: RunSteps, trainer: Trainer) -> None:
    # A short run is longer here: it goes back to its first step, with the weights that it has.
    if trainer.step + 1 >= trainer.setup.steps:
        trainer.step = trainer.position = 0
    next(steps)


def _time_each(
    work: Callable[[], object],
    clock: Callable[[], float],
    watch: _Watch,
    most: int = MOST,
    warm_up: int = WARM_UP,
) -> float:
    """Returns the mean seconds of a call."""
    for _ in range(warm_up):
        if watch.is_late:
            break
        watch.check()
        work()
    began, calls = clock(), 0
    while not calls or (
        not watch.is_late and (calls < min(LEAST, most) or (calls < most and clock() - began < MEASURE_S))
    ):
        watch.check()
        work()
        calls += 1
    return (clock() - began) / calls


@final
@dataclass(frozen=True)
class _Pause:
    """A pause of the training for actions, between steps of known length."""

    trainer: Trainer
    clock: Callable[[], float]
    step: Callable[[], object]
    step_s: float
    watch: _Watch

    def time(self, steps: RunSteps, *actions: Action) -> float:
        """Returns the mean seconds of actions, with what they add to the steps after them."""
        taken = [self._time_once(steps, *actions)]
        if not self.watch.is_late:
            taken.append(self._time_once(steps, *actions))
        return statistics.fmean(taken)

    def _time_once(self, steps: RunSteps, *actions: Action) -> float:
        after = 0 if self.watch.is_late else min(MOST_AFTER, math.ceil(AFTER_S / self.step_s))
        self.watch.check()
        began = self.clock()
        self.trainer.recovery.queue(*actions)
        next(steps)
        for _ in range(after):
            self.watch.check()
            self.step()
        self.trainer.recovery.queue(Action.SETTLE)
        next(steps)
        return max(0.0, self.clock() - began - after * self.step_s)
