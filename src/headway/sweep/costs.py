"""Costs of a trial's parts, measured before a sweep: building it, decoding and stepping a batch, evaluating, saving."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
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

WARM_UP = 4
"""Steps and batches before a measurement: the loader's ring fills, and torch chooses its algorithms."""
LEAST, MOST = 6, 60
MEASURE_S = 0.8
"""Seconds after which a measurement ends, if it has made `LEAST` steps."""
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
        build_s: building a trial.
        step_s: a step, without its input.
        decode_s: the input of a step.
        evaluate_s: an evaluation.
        checkpoint_s: a checkpoint.
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
    ):
        marks = [clock()]
        with ExitStack() as stack:
            for name in ("first", "second"):
                run = start_run(alone, Path(folder) / name, warns=False, shared=shared)
                steps = stack.enter_context(closing(run))
                trainer = next(steps)
                marks.append(clock())
            first_s, build_s = marks[1] - marks[0], marks[2] - marks[1]
            return _measure_parts(steps, trainer, clock, max(0.0, first_s - build_s), build_s)


def _read_device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _measure_parts(
    steps: RunSteps, trainer: Trainer, clock: Callable[[], float], open_s: float, build_s: float
) -> TrialCosts:
    setup = trainer.setup
    batches = replace(setup.inputs, batch_source=None).build_batches(setup.recipe, setup.plan, 0)
    with closing(cast("Generator[Batch]", iter(batches))) as stream:
        decode_s = _time_each(lambda: next(stream), clock)
        batch = next(stream)
        # A copy: the loader fills the memory of the batch again.
        kept = replace(batch, images=batch.images.clone(), labels=batch.labels.clone())
    setup.inputs.batch_source = lambda plan, position: cycle([kept])
    step_s = _time_each(lambda: _step(steps, trainer), clock)
    # The first evaluation opens its loader.
    seconds = [_time_action(steps, trainer, Action.EVALUATE, clock) for _ in range(2)]
    checkpoint_s = _time_action(steps, trainer, Action.CHECKPOINT, clock)
    began = clock()
    trainer.stopping = True
    for _ in steps:
        pass
    return TrialCosts(
        open_s=open_s,
        build_s=build_s,
        step_s=step_s,
        decode_s=decode_s,
        evaluate_s=seconds[1],
        checkpoint_s=checkpoint_s,
        end_s=clock() - began,
    )


def _step(steps: RunSteps, trainer: Trainer) -> None:
    # A short run is longer here: it goes back to its first step, with the weights that it has.
    if trainer.step + 1 >= trainer.setup.steps:
        trainer.step = trainer.position = 0
    next(steps)


def _time_each(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Returns the mean seconds of a call."""
    for _ in range(WARM_UP):
        work()
    began, calls = clock(), 0
    while calls < LEAST or (calls < MOST and clock() - began < MEASURE_S):
        work()
        calls += 1
    return (clock() - began) / calls


def _time_action(steps: RunSteps, trainer: Trainer, action: Action, clock: Callable[[], float]) -> float:
    began = clock()
    trainer.recovery.queue(action, Action.SETTLE)
    next(steps)
    return clock() - began
