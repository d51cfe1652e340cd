"""What happens between steps: how long an evaluation and a checkpoint hold the run up, and how often they do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, final

from headway.doctor.loop_measurement import build_wait
from headway.doctor.measurement_job import MeasurementJob, close_stream, with_values
from headway.train.evaluate import batches_of
from headway.train.trainer import Display, Trainer

# That are saved to see how long one takes, or what comes in time.
CHECKPOINTS = 3
# Of a run, that are left out: nothing older is to be removed by them, and nothing of theirs is still being written.
SETTLED = 2


@final
@dataclass(frozen=True)
class Stall:
    """Attributes: once_s: that one takes. every: samples between two. seconds: of a sample. how: it was measured."""

    once_s: float
    every: float
    how: str

    @property
    def seconds(self) -> float:
        """Seconds that it adds to each sample."""
        return self.once_s / self.every


def measure_evaluation(job: MeasurementJob, *, limit_s: float) -> Stall | None:
    """One evaluation, from what comes within the limit; None: there is no evaluation set."""
    setup, dataset = job.setup, job.setup.eval
    if dataset is None:
        return None
    wait, begun, done, first, first_s = build_wait(setup.device), perf_counter(), 0, 0, 0.0
    stream = batches_of(setup, dataset)
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
    rate = (done - first) / max(spent - first_s, 1e-9) if done > first else first / first_s
    return Stall(first_s + (len(dataset) - first) / rate, every, f"{done:,} of {len(dataset):,} images")


def measure_checkpoint(job: MeasurementJob, *, limit_s: float) -> Stall:
    """How long the loop waits for one: for the writing, or for the copy that a thread writes meanwhile."""
    options, setup = job.loaded.recipe.checkpoint, job.setup
    values = {"checkpoint.every_steps": 1, "checkpoint.asynchronous": options.asynchronous}
    other = MeasurementJob(job.loaded, replace(setup, loaded=with_values(setup.loaded, values, "as it is measured")))
    other.replace_batches(job.load_batches())
    found, begun = list[float](), perf_counter()
    if options.asynchronous:
        # A second one would wait for the first one's thread.
        while not found or (len(found) < CHECKPOINTS and perf_counter() - begun < limit_s):
            found += _measure_saves(other, 1, limit_s)
    else:
        found = _measure_saves(other, SETTLED + CHECKPOINTS, limit_s)
        found = found[SETTLED:] or found
    every = options.every_epochs * setup.epoch if options.every_steps is None else options.every_steps * job.batch
    how = "the copy; a thread writes it meanwhile" if options.asynchronous else "until it is written"
    where = "" if options.folder is None else f", to the local disk and not to {options.folder}"
    return Stall(median(found), every, how + where)


def _measure_saves(job: MeasurementJob, most: int, limit_s: float) -> list[float]:
    """Seconds that the loop was held by each of the checkpoints of one run, at most so many. That a run waits for the
    last one's writing at its end is no part of it."""
    seen, begun = _CheckpointTimes(), perf_counter()
    with job.open_trainer(batches=job.load_batches(), display=seen) as trainer:
        while len(seen.seconds) < most and (not seen.seconds or perf_counter() - begun < limit_s):
            trainer.run(1)
    return seen.seconds


@final
class _CheckpointTimes(Display):
    """Notes by how much the Clock's time of checkpoints grows with each step."""

    def __init__(self) -> None:
        self.seconds, self._before = list[float](), 0.0

    def step(self, trainer: Trainer) -> None:
        now = trainer.clock.seconds.get("checkpoint", 0.0)
        self.seconds.append(now - self._before)
        self._before = now

    def record(self, record: dict[str, Any]) -> None:
        """Nothing of it is shown."""
