"""Runs the whole job for a short time, to confirm the prediction from its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import final

from headway.core.profile import Throughput
from headway.data.batch import Batch
from headway.doctor.loop_measurement import LONG_STEP_S, build_wait, run_steps, warm_up
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.rate_measurement import build_window, measure_rate

MOST_STEPS = 200


@final
@dataclass(frozen=True)
class WholeJobRun:
    """A short run of the whole job."""

    rate: Throughput
    steps: int
    # Share of the time in which the loop waited for batches.
    wait_share: float
    # Seconds of a sample by stage.
    laps: Mapping[str, float]


def run_whole_job(
    job: MeasurementJob, *, limit_s: float, once: bool = False, batches: Sequence[Batch] = ()
) -> WholeJobRun:
    """Trains on the loader's batches from the beginning of the run, without the first batch.

    Args:
        once: files are read for the first time, so steps cannot be repeated, and a few seconds are all there is.
        batches: train on these again and again, instead of the loader's.
    """
    wait = build_wait(job.setup.device)
    with job.open_trainer(batches=batches) as trainer:
        a_step = warm_up(trainer, wait) if not once else 0.0
        if once:
            trainer.run(1)
        elif a_step <= LONG_STEP_S:
            # Use up the batches that were ready in the ring before the clock starts.
            trainer.run(job.setup.recipe.data.prefetch_batches)
        wait()
        before, begun, first = dict(trainer.clock.seconds), trainer.position, trainer.step
        since = perf_counter()

        def run_batches() -> int:
            """Runs as many batches as the ring holds: it delivers some at once, and then none."""
            return run_steps(
                trainer, 1 if once or a_step > LONG_STEP_S else job.setup.recipe.data.prefetch_batches, wait
            )

        if once:
            while perf_counter() - since < limit_s and trainer.step - first < MOST_STEPS:
                run_batches()
            value = (trainer.position - begun) / (perf_counter() - since)
            rate = Throughput(value=value, low=value, high=value, windows=1)
        else:
            rate = measure_rate(build_window(run_batches), limit_s=limit_s)
        images, steps = trainer.position - begun, trainer.step - first
        spent = perf_counter() - since
        after = trainer.clock.seconds
    laps = {name: (value - before.get(name, 0.0)) / images for name, value in after.items()}
    return WholeJobRun(rate, steps, min(1.0, laps.get("wait", 0.0) * images / spent), laps)
