"""SampleSource: batches of a data set of the user's own, loaded by worker processes."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from time import perf_counter
from typing import Any, Protocol, final

import torch
import torch.utils.data

from headway.core.cpu_count import choose_thread_count
from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.data.batch_source import BatchSource
from headway.data.collated_batch import CollatedBatch, move_data
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import SAMPLE_STAGES, LoaderStats, LoaderTally
from headway.data.order import get_rank_slots
from headway.data.spans import Span, count_positions
from headway.data.workers.sample_work import LoadedSamples, LoadSamples, choose_samples
from headway.data.workers.worker_pool import WorkerPool, build_pool

# With fewer, a worker would have nothing to do from the end of a batch until the loop asks for the next one.
LEAST_BATCHES_PER_WORKER = 2


class Samples(Protocol):
    """A map-style data set: any object with a length and samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def explain_no_samples(dataset: object) -> str:
    """Returns why an object is no data set of the user's own, or an empty text."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        return f"{dataset.__name__} is a class, not an object of it"
    if isinstance(dataset, torch.utils.data.DataLoader):
        return "a DataLoader makes batches already: give its dataset"
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return f"this {name} has no __len__ and __getitem__"
    return ""


@final
class SampleSource(BatchSource[CollatedBatch]):
    """Serves a data set of the user's own.

    The pool lives as long as this object. Its workers go on with the next epoch at the end of one, so an epoch begins
    without a wait.
    """

    def __init__(self, dataset: Any, spec: LoaderSpec, device: torch.device) -> None:
        spec.refuse_image_options()
        self.samples = len(dataset)
        self.spec = spec = spec.resolve_order(self.samples)
        if spec.plan.get_batch_size(0) < spec.world:
            what = f"a batch of {spec.plan} gives some of {spec.world} ranks no sample"
            raise UsageError(what, where="batch", fix=f"Set it to {spec.world} or more.")
        self._device = device
        self._seed = spec.order.seed if spec.order is not None else 0
        collate = spec.collate or torch.utils.data.default_collate
        self._work = LoadSamples(dataset, collate, spec.order, self._seed)
        self._workers = choose_thread_count() if spec.workers is None else spec.workers
        self._ahead = max(LEAST_BATCHES_PER_WORKER, -(-spec.prefetch_batches // max(1, self._workers))) * self._workers
        self._tally = LoaderTally(stage_s=dict.fromkeys(SAMPLE_STAGES, 0.0))
        self._pool: WorkerPool | None = None
        self._process = os.getpid()
        # Steps in flight: (begin, end, span of this rank).
        self._steps = deque[tuple[int, int, Span]]()
        self._coming: Iterator[tuple[int, int, Span]] = iter(())
        self._serving = object()

    def serve(self, start: int, stop: float) -> Generator[CollatedBatch, None, None]:
        """Yields the batches of the steps that begin at these positions."""
        # The newest iterator has the pool; an older one that is asked again takes it back.
        me = self._serving = object()
        position, tally, is_first = start, self._tally, True
        while position < stop:
            pool = self._open_pool()
            if self._serving is not me or not self._steps or self._steps[0][0] != position:
                self._serving = me
                self._restart(pool, position)
            asked = perf_counter()
            tally.asked += 1
            tally.ready += pool.count_ready()
            _, position, span = self._steps.popleft()
            loaded = self._receive(pool)
            if not is_first:
                tally.wait_s += perf_counter() - asked
            self._submit_steps(pool)
            positions, epochs, samples = choose_samples(self.spec.order, span)
            data = loaded.data if self._device.type == "cpu" else move_data(loaded.data, self._device)
            batch = CollatedBatch(data=data, positions=positions, epochs=epochs, samples=samples, seed=self._seed)
            # Nothing here may keep the batch alive while the loop has it.
            del data, loaded
            yield batch
            del batch
            tally.images += len(samples)
            tally.batches += 1
            # The first batch always has to be waited for, so it is not part of the rate.
            if not is_first:
                tally.timed_images += len(samples)
                tally.seconds += perf_counter() - asked
            is_first = False

    def make_stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""
        return self._tally.summarise(
            prefetch_batches=self._ahead,
            threads=self._workers,
            backend="own",
            tier=type(self._work.dataset).__name__,
        )

    def describe(self) -> str:
        """Returns the number of workers in words."""
        return f"{self._workers} worker process{'es'[: 2 * (self._workers != 1)]}"

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.close()
        self._pool = None
        self._steps.clear()

    def _open_pool(self) -> WorkerPool:
        # A forked child has none of its parent's workers.
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = build_pool(self._work, self._workers), os.getpid()
            self._steps.clear()
        return self._pool

    def _restart(self, pool: WorkerPool, position: int) -> None:
        """Forgets the steps in flight, and begins at another position."""
        pool.discard()
        self._steps.clear()
        self._coming = self._iterate_steps(position)
        self._submit_steps(pool)

    def _submit_steps(self, pool: WorkerPool) -> None:
        while pool.in_flight < max(1, self._ahead) and (step := next(self._coming, None)) is not None:
            self._steps.append(step)
            # Only the positions travel: the worker computes the samples itself.
            pool.submit(step[2])

    def _iterate_steps(self, position: int) -> Iterator[tuple[int, int, Span]]:
        """Yields (begin, end, this rank's span) of each step from a position on, without an end."""
        spec = self.spec
        end = self.samples if spec.stop is None else spec.stop
        stop = math.inf if spec.order is not None else end
        while position < stop or spec.start < stop:
            while position < stop:
                total = count_positions(spec, position, stop)
                low, high = get_rank_slots(total, spec.rank, spec.world)
                yield position, position + total, (position + low, position + high)
                position += total
            # Without an order each epoch serves the same positions.
            position = spec.start

    def _receive(self, pool: WorkerPool) -> LoadedSamples:
        try:
            loaded: LoadedSamples = pool.receive()
        except UserCodeError:
            raise
        # Without one of its processes the pool is of no use; the next iteration starts another.
        except HeadwayError:
            self.close()
            raise
        seconds = self._tally.stage_s
        for stage, spent in zip(SAMPLE_STAGES, (loaded.samples_s, loaded.collate_s), strict=True):
            seconds[stage] += spent / max(1, self._workers)
        self._tally.stage_images += loaded.samples
        return loaded
