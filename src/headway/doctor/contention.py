"""Measures loader and training loop at the same time, neither waiting for the other: how much each slows the other
down."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any, final

from headway.core.cpu_count import count_usable_cores
from headway.core.profile import JointTiming
from headway.data.batch import Batch
from headway.data.decode_ring import PRODUCER_PAUSE_S
from headway.doctor.loader_measurement import build_loader
from headway.doctor.loop_measurement import LONG_STEP_S, build_wait, run_steps
from headway.doctor.measurement_job import MeasurementJob, close_stream
from headway.doctor.rate_measurement import build_window, choose_window_s, measure_rate
from headway.parallel.parallel_recipe import AsyncRecipe

# Batches that the loader should deliver during the measurement, if the time allows.
BATCHES = 8

# Handing a batch over costs about 0.1 ms: steps longer than this do not show it.
SHORT_STEP_S = 0.01


def measure_contention(
    job: MeasurementJob, input_alone: float, loop_alone: float, *, limit_s: float, **options: Any
) -> JointTiming:
    """Trains on ready batches while a thread drains the loader as fast as it delivers.

    Args:
        input_alone, loop_alone: seconds of a sample, each measured alone.
        options: of the loader, instead of the recipe's.
    """
    arrived, stop, failed = list[tuple[float, int]](), threading.Event(), list[BaseException]()
    loader = build_loader(job, options)

    def drain() -> None:
        stream = iter(loader)
        try:
            while not stop.is_set():
                images = len(next(stream).images)
                arrived.append((perf_counter(), images))
        except BaseException as error:
            failed.append(error)
        finally:
            close_stream(stream)

    thread = threading.Thread(target=drain, name="headway-doctor", daemon=True)
    wait = build_wait(job.setup.device)
    with job.open_trainer(batches=job.load_batches()) as trainer:
        if job.batch * loop_alone <= LONG_STEP_S:
            # A warm-up step; long steps were already run often enough.
            trainer.run(1)
        thread.start()
        try:
            trainer.run(1)
            wait()
            steps = max(1, round(choose_window_s() / max(job.batch * loop_alone, 1e-6)))
            # Batches from before this point were made while the loop still started up.
            begun, before = perf_counter(), len(arrived)
            window = build_window(lambda: run_steps(trainer, steps, wait), least_s=0.0)
            rate = measure_rate(window, limit_s=limit_s)
            while len(arrived) - before <= BATCHES and perf_counter() - begun < limit_s and not failed:
                window()
            given = arrived[before:]
        finally:
            stop.set()
            thread.join()
    if failed:
        raise failed[0]
    return JointTiming(
        input_alone=input_alone,
        loop_alone=loop_alone,
        input_beside=compute_seconds_per_image(given)
        # With fewer than 3 batches the slow-down of the loader is unknown: none is assumed.
        or input_alone,
        loop_beside=1 / rate.value,
        cores=count_usable_cores(),
    )


def compute_seconds_per_image(arrived: Sequence[tuple[float, int]]) -> float:
    """Returns the seconds of an image from the first to the last of (time, images) pairs; 0: fewer than 3 batches."""
    if len(arrived) < 3:
        return 0.0
    return (arrived[-1][0] - arrived[0][0]) / sum(images for _, images in arrived[1:])


def measure_handover(job: MeasurementJob, loop_alone: float, *, limit_s: float) -> float:
    """Returns the seconds of a sample that the loop loses by taking batches from another thread that has almost nothing
    to do: both threads wake up for each batch and share the interpreter lock. 0 for long steps, which do not show
    it."""
    if job.batch * loop_alone > SHORT_STEP_S:
        return 0.0
    # Asynchronous training reads each batch in a thread of its own, in every measurement of its loop.
    if isinstance(job.setup.recipe.parallel, AsyncRecipe):
        return 0.0
    given = _ReplayedFeed(job.load_batches(), job.setup.recipe.data.prefetch_batches)
    wait = build_wait(job.setup.device)
    steps = max(1, round(choose_window_s() / (job.batch * loop_alone)))
    # Windows without and with the ring alternate, so a machine that slows down slows both.
    lost, begun = list[float](), perf_counter()
    with job.open_trainer(feed=lambda *_: given) as trainer:
        window = build_window(lambda: run_steps(trainer, steps, wait), least_s=0.0)
        trainer.run(steps)
        try:
            while len(lost) < 3 or perf_counter() - begun < limit_s:
                taken = []
                for given.through_ring in (False, True):
                    # Use up the batches that are ready at once.
                    trainer.run(job.setup.recipe.data.prefetch_batches)
                    wait()
                    taken.append(1 / window())
                lost.append(taken[1] - taken[0])
        finally:
            given.close()
    return max(0.0, median(lost))


def add_handover(timing: JointTiming, seconds: float) -> JointTiming:
    """Returns the same measurement with the seconds that handing a sample over adds to the loop."""
    changed = {"loop_alone": timing.loop_alone + seconds, "loop_beside": timing.loop_beside + seconds}
    return timing.model_copy(update=changed)


@final
class _ReplayedFeed:
    """Repeats batches; with `through_ring` they come through a ring that a thread fills, as from the loader."""

    def __init__(self, batches: Sequence[Batch], ahead: int) -> None:
        self.through_ring, self._batches = False, batches
        self._free, self._ready = queue.SimpleQueue[bool](), queue.SimpleQueue[Batch]()
        for _ in range(ahead):
            self._free.put(True)
        self._thread = threading.Thread(target=self._produce, name="headway-doctor", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.cycle(self._batches):
            if self.through_ring:
                yield self._ready.get()
                self._free.put(True)
            else:
                yield batch

    def close(self) -> None:
        self._free.put(False)
        self._thread.join()

    def _produce(self) -> None:
        for batch in itertools.cycle(self._batches):
            try:
                more = self._free.get_nowait()
            except queue.Empty:
                more = self._free.get()
                # The loader's thread pauses in the same way after it has waited.
                sleep(PRODUCER_PAUSE_S)
            if not more:
                return
            self._ready.put(batch)
