"""SampleSource: batches of a data set of the user's own, loaded by worker processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from time import perf_counter
from typing import Any, Protocol, final

import torch
import torch.utils.data

from headway.core.cpu_count import choose_thread_count
from headway.core.errors import HeadwayError, UserCodeError
from headway.core.text_format import pluralise
from headway.data.batch_source import BatchSource
from headway.data.collated_batch import CollatedBatch, move_data
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import SAMPLE_STAGES, LoaderStats, LoaderTally
from headway.data.workers.sample_plans import Step, build_plan, is_stream
from headway.data.workers.sample_work import LoadedSamples
from headway.data.workers.worker_pool import WorkerPool, build_pool

# With fewer, a worker would have nothing to do from the end of a batch until the loop asks for the next one.
LEAST_BATCHES_PER_WORKER = 2


class Samples(Protocol):
    """A map-style data set: any object with a length and samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def explain_no_samples(dataset: object) -> str:
    """Returns why an object is not a data set of the user's own, or an empty text."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        return f"{dataset.__name__} is a class, not an object of it"
    if isinstance(dataset, torch.utils.data.DataLoader):
        return "a DataLoader makes batches already: give its dataset"
    if hasattr(dataset, "__next__"):
        return f"this {name} can be read once: give an object whose __iter__ begins anew"
    if not is_stream(dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return f"this {name} has no __len__ and __getitem__, and no __iter__"
    return ""


@final
class SampleSource(BatchSource[CollatedBatch]):
    """Serves a data set of the user's own.

    The pool lives as long as this object. At the end of an epoch of a map-style data set its workers go on with the
    next one, so an epoch begins without a wait.
    """

    def __init__(self, dataset: Any, spec: LoaderSpec, device: torch.device) -> None:
        spec.refuse_image_options()
        self._workers = choose_thread_count() if spec.workers is None else spec.workers
        self._plan = build_plan(dataset, spec, self._workers)
        self.spec, self.cursor = self._plan.spec, self._plan.cursor
        self._name, self._device = type(dataset).__name__, device
        self._ahead = max(LEAST_BATCHES_PER_WORKER, -(-spec.prefetch_batches // max(1, self._workers))) * self._workers
        self._tally = LoaderTally(stage_s=dict.fromkeys(SAMPLE_STAGES, 0.0))
        self._pool: WorkerPool | None = None
        self._process = os.getpid()
        self._steps_in_flight = deque[Step]()
        self._coming_steps: Iterator[Step] = iter(())
        self._serving = object()

    def serve(self, start: int, stop: float) -> Generator[CollatedBatch, None, None]:
        """Yields the batches of the steps that begin at these positions."""
        # The newest iterator has the pool; an older one that is asked again takes it back.
        me = self._serving = object()
        plan, tally, epoch = self._plan, self._tally, self.cursor.epoch
        position, is_first = start, True
        while position < stop:
            pool, key = self._open_pool(), plan.make_key(position, epoch)
            if self._serving is not me or not self._steps_in_flight or self._steps_in_flight[0].key != key:
                self._serving = me
                self._restart(pool, position, epoch)
            asked = perf_counter()
            tally.asked += 1
            tally.ready += pool.count_ready()
            step = self._steps_in_flight.popleft()
            loaded = self._receive(pool)
            if loaded is None:
                # The end of an iterable data set: all other steps in flight lie behind it, too.
                self._steps_in_flight.clear()
                pool.discard()
                return
            if not is_first:
                tally.wait_s += perf_counter() - asked
            self._submit_steps(pool)
            position = step.end
            positions, epochs, samples = plan.locate_samples(step.task, loaded)
            data = loaded.data if self._device.type == "cpu" else move_data(loaded.data, self._device)
            batch = CollatedBatch(data=data, positions=positions, epochs=epochs, samples=samples, seed=plan.seed)
            # Nothing here may keep the batch alive while the loop has it.
            del data, loaded
            yield batch
            del batch
            tally.count_batch(len(samples), asked, is_first=is_first)
            is_first = False

    def make_stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""
        return self._tally.summarise(
            prefetch_batches=self._ahead,
            threads=self._workers,
            backend="own",
            tier=self._name,
        )

    def describe(self) -> str:
        """Returns the number of workers in words."""
        return pluralise(self._workers, "worker process")

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.close()
        self._pool = None
        self._steps_in_flight.clear()

    def _open_pool(self) -> WorkerPool:
        # A forked child has none of its parent's workers.
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = build_pool(self._plan.work, self._workers), os.getpid()
            self._steps_in_flight.clear()
        return self._pool

    def _restart(self, pool: WorkerPool, position: int, epoch: int) -> None:
        """Forgets the steps in flight, and begins at another position."""
        pool.discard()
        self._steps_in_flight.clear()
        self._coming_steps = self._plan.iterate_steps(position, epoch)
        self._submit_steps(pool)

    def _submit_steps(self, pool: WorkerPool) -> None:
        while pool.in_flight < max(1, self._ahead) and (step := next(self._coming_steps, None)) is not None:
            self._steps_in_flight.append(step)
            pool.submit(step.task)

    def _receive(self, pool: WorkerPool) -> LoadedSamples | None:
        try:
            loaded: LoadedSamples | None = pool.receive()
        except UserCodeError:
            raise
        # Without one of its processes the pool is of no use; the next iteration starts another.
        except HeadwayError:
            self.close()
            raise
        if loaded is None:
            return None
        seconds = self._tally.stage_s
        for stage, spent in zip(SAMPLE_STAGES, (loaded.samples_s, loaded.collate_s), strict=True):
            seconds[stage] += spent / max(1, self._workers)
        self._tally.stage_images += loaded.samples
        return loaded
