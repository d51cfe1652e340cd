"""Loader and loop beside each other, neither waiting for the other: how much longer each then takes."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from headway.core.cores import usable_cores
from headway.core.profile import Together
from headway.doctor.feed import loader_of
from headway.doctor.job import Job, close
from headway.doctor.loop import waiting
from headway.doctor.measure import LEAST_WINDOW_S, settled


def beside(job: Job, input_alone: float, loop_alone: float, *, limit_s: float, **options: Any) -> Together:
    """Trains on batches that are there already, while a thread goes through the loader as fast as it gives.

    Args:
        input_alone, loop_alone: seconds of a sample.
        options: of the loader, in place of the recipe's.
    """
    given, stop, failed = [0], threading.Event(), list[BaseException]()
    loader = loader_of(job, options)

    def drain() -> None:
        stream = iter(loader)
        try:
            while not stop.is_set():
                given[0] += len(next(stream).images)
        except BaseException as error:
            failed.append(error)
        finally:
            close(stream)

    thread = threading.Thread(target=drain, name="headway-doctor", daemon=True)
    wait = waiting(job.setup.device)
    with job.trainer(replayed=True) as trainer:
        trainer.run(1)
        thread.start()
        try:
            trainer.run(1)
            wait()
            steps = max(1, round(LEAST_WINDOW_S / max(job.batch * loop_alone, 1e-6)))
            begun, images = perf_counter(), given[0]

            def window() -> float:
                since, at = perf_counter(), trainer.position
                trainer.run(steps)
                wait()
                return (trainer.position - at) / (perf_counter() - since)

            rate = settled(window, limit_s=limit_s)
            seconds, into = perf_counter() - begun, given[0] - images
        finally:
            stop.set()
            thread.join()
    if failed:
        raise failed[0]
    # A loader that gives less than a batch meanwhile was not seen to be slower than alone.
    input_beside = seconds / into if into else max(input_alone, seconds)
    return Together(
        input_alone=input_alone,
        loop_alone=loop_alone,
        input_beside=input_beside,
        loop_beside=1 / rate.value,
        cores=usable_cores(),
    )
