"""Measures work between steps: how long an evaluation and a checkpoint hold the run up, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, final

from headway.doctor.loop_measurement import build_wait
from headway.doctor.measurement_job import MeasurementJob, close_stream, with_values
from headway.training.display import Display
from headway.training.evaluate import evaluate_batches
from headway.training.trainer import Trainer

# Checkpoints saved for the median, or fewer if the time is up.
CHECKPOINTS = 3
# First checkpoints that are left out: they remove no older one, and wait for no earlier write.
SETTLED = 2


@final
@dataclass(frozen=True)
class Stall:
    """Work between steps that holds the run up."""

    # Seconds of one stall.
    once_s: float
    # Samples between two.
    every: float
    # How it was measured.
    how: str

    @property
    def seconds(self) -> float:
        """Seconds added to each sample."""
        return self.once_s / self.every


def measure_evaluation(job: MeasurementJob, *, limit_s: float) -> Stall | None:
    """Measures one evaluation, extrapolated if the limit is too short; None: there is no evaluation set."""
    setup, dataset = job.setup, job.setup.eval
    if dataset is None:
        return None
    wait, begun, done, first, first_s = build_wait(setup.device), perf_counter(), 0, 0, 0.0
    stream = evaluate_batches(setup, dataset)
    try:
        for outputs, labels, batch in stream:
            setup.task.loss(outputs, labels)
            setup.task.metrics(outputs, labels)
            done += len(batch.images)
            if not first:
                wait()
                first, first_s = done, perf_counter() - begun
            elif perf_counter() - begun > limit_s:
                break
        wait()
        spent = perf_counter() - begun
    finally:
        close_stream(stream)
    every = job.loaded.recipe.evaluate.every_epochs * setup.epoch
    if done >= len(dataset):
        return Stall(spent, every, f"all {done:,} images")
    # The first batch contains the start of the threads, so the rate is that of the later ones.
    rate = (done - first) / max(spent - first_s, 1e-9) if done > first else first / first_s
    return Stall(first_s + (len(dataset) - first) / rate, every, f"{done:,} of {len(dataset):,} images")


def measure_checkpoint(job: MeasurementJob, *, limit_s: float) -> Stall:
    """Measures the time that the loop waits for a checkpoint: the write, or the copy that a thread then writes."""
    options, setup = job.loaded.recipe.checkpoint, job.setup
    values = {"checkpoint.every_steps": 1, "checkpoint.asynchronous": options.asynchronous}
    other = MeasurementJob(job.loaded, replace(setup, loaded=with_values(setup.loaded, values, "as it is measured")))
    other.replace_batches(job.load_batches())
    seconds, begun = list[float](), perf_counter()
    if options.asynchronous:
        # In one run a second checkpoint would wait for the thread of the first: each gets its own run.
        while not seconds or (len(seconds) < CHECKPOINTS and perf_counter() - begun < limit_s):
            seconds += _measure_saves(other, 1, limit_s)
    else:
        seconds = _measure_saves(other, SETTLED + CHECKPOINTS, limit_s)
        seconds = seconds[SETTLED:] or seconds
    every = options.every_epochs * setup.epoch if options.every_steps is None else options.every_steps * job.batch
    how = "the copy, which a thread then writes" if options.asynchronous else "until it is written"
    where = "" if options.folder is None else f", to the local disk instead of {options.folder}"
    return Stall(median(seconds), every, how + where)


def _measure_saves(job: MeasurementJob, most: int, limit_s: float) -> list[float]:
    """Returns the seconds that each checkpoint of one run held the loop up, without the last write at the end of the
    run."""
    seen, begun = _CheckpointTimes(), perf_counter()
    with job.open_trainer(batches=job.load_batches(), display=seen) as trainer:
        while len(seen.seconds) < most and (not seen.seconds or perf_counter() - begun < limit_s):
            trainer.run(1)
    return seen.seconds


@final
class _CheckpointTimes(Display):
    """Records by how much the Clock's checkpoint time grows with each step."""

    def __init__(self) -> None:
        self.seconds, self._before = list[float](), 0.0

    def step(self, trainer: Trainer) -> None:
        """Records the checkpoint time of a step."""
        now = trainer.clock.seconds.get("checkpoint", 0.0)
        self.seconds.append(now - self._before)
        self._before = now

    def record(self, record: dict[str, Any]) -> None:
        """Shows nothing."""
