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


def measure_costs(loaded: LoadedRecipe[TrainRecipe]) -> TrialCosts:
    """Measures the costs of a recipe here, in a run that is thrown away. It takes some seconds."""
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
            began = clock()
            run = start_run(alone, Path(folder) / name, warns=False, shared=shared)
            steps = stack.enter_context(closing(run))
            trainer = next(steps)
            begun.append(clock() - began)
            # The first evaluation of a process takes longer than the first one of a trial.
            began = clock()
            trainer.recovery.queue(Action.EVALUATE)
            next(steps)
            first_evaluation_s = clock() - began
        open_s = max(0.0, begun[0] - begun[1])
        return _measure_parts(steps, trainer, clock, open_s, begun[1], first_evaluation_s)


def _read_device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _measure_parts(
    steps: RunSteps,
    trainer: Trainer,
    clock: Callable[[], float],
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
        first_s = _time_each(kinds["kept"], clock, most=1, warm_up=0)
        found = {name: statistics.fmean(seconds) for name, seconds in _time_in_turns(kinds, clock).items()}
        pause = _Pause(trainer, clock, kinds["read"], found["read"])
        evaluations = [pause.time(steps, Action.LOG, Action.EVALUATE) for _ in range(2)]
        checkpoint_s = statistics.fmean(pause.time(steps, Action.CHECKPOINT) for _ in range(2))
    source = cycle([kept])
    evaluate_s = statistics.fmean(evaluations)
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


def _time_in_turns(kinds: Mapping[str, Callable[[], object]], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Returns the seconds of a call of each kind, round by round."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, work in kinds.items():
            taken[name].append(_time_each(work, clock))
    return taken


def _step(steps: RunSteps, trainer: Trainer) -> None:
    # A short run is longer here: it goes back to its first step, with the weights that it has.
    if trainer.step + 1 >= trainer.setup.steps:
        trainer.step = trainer.position = 0
    next(steps)


def _time_each(
    work: Callable[[], object], clock: Callable[[], float], most: int = MOST, warm_up: int = WARM_UP
) -> float:
    """Returns the mean seconds of a call."""
    for _ in range(warm_up):
        work()
    began, calls = clock(), 0
    while calls < min(LEAST, most) or (calls < most and clock() - began < MEASURE_S):
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

    def time(self, steps: RunSteps, *actions: Action) -> float:
        """Returns the seconds of actions, with what they add to the steps after them."""
        after = min(MOST_AFTER, math.ceil(AFTER_S / self.step_s))
        began = self.clock()
        self.trainer.recovery.queue(*actions)
        next(steps)
        for _ in range(after):
            self.step()
        self.trainer.recovery.queue(Action.SETTLE)
        next(steps)
        return max(0.0, self.clock() - began - after * self.step_s)
