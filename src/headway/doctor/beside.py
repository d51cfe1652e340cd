"""Loader and loop beside each other, neither waiting for the other: how much longer each then takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from headway.core.cores import usable_cores
from headway.core.profile import Together
from headway.doctor.feed import loader_of
from headway.doctor.job import Job, close
from headway.doctor.loop import waiting
from headway.doctor.measure import least_window_s, settled

BATCHES = 8
"""That the loader gives meanwhile, if the time is enough for them."""


def beside(job: Job, input_alone: float, loop_alone: float, *, limit_s: float, **options: Any) -> Together:
    """Trains on batches that are there already, while a thread goes through the loader as fast as it gives.

    Args:
        input_alone, loop_alone: seconds of a sample.
        options: of the loader, in place of the recipe's.
    """
    arrived, stop, failed = list[tuple[float, int]](), threading.Event(), list[BaseException]()
    loader = loader_of(job, options)

    def drain() -> None:
        stream = iter(loader)
        try:
            while not stop.is_set():
                images = len(next(stream).images)
                arrived.append((perf_counter(), images))
        except BaseException as error:
            failed.append(error)
        finally:
            close(stream)

    thread = threading.Thread(target=drain, name="headway-doctor", daemon=True)
    wait = waiting(job.setup.device)
    with job.trainer(batches=job.kept()) as trainer:
        trainer.run(1)
        thread.start()
        try:
            trainer.run(1)
            wait()
            steps = max(1, round(least_window_s() / max(job.batch * loop_alone, 1e-6)))
            begun, before = perf_counter(), len(arrived)

            def window() -> float:
                since, at = perf_counter(), trainer.position
                trainer.run(steps)
                wait()
                return (trainer.position - at) / (perf_counter() - since)

            rate = settled(window, limit_s=limit_s)
            while len(arrived) - before <= BATCHES and perf_counter() - begun < limit_s and not failed:
                window()
            given = arrived[before:]
        finally:
            stop.set()
            thread.join()
    if failed:
        raise failed[0]
    return Together(
        input_alone=input_alone,
        loop_alone=loop_alone,
        input_beside=each(given) or input_alone,  # a loader that gives next to nothing meanwhile was not seen to suffer
        loop_beside=1 / rate.value,
        cores=usable_cores(),
    )


def each(arrived: Sequence[tuple[float, int]]) -> float:
    """Seconds of an image from the first batch to the last, of (time, images) of each; 0: there are too few of them."""
    if len(arrived) < 3:
        return 0.0
    return (arrived[-1][0] - arrived[0][0]) / sum(images for _, images in arrived[1:])
