"""Plans of the steps over a data set of the user's own: map-style, or an iterable one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data.epoch_cursor import EpochCursor
from headway.data.loader_spec import LoaderSpec
from headway.data.order import get_rank_slots
from headway.data.spans import count_positions
from headway.data.workers.sample_work import LoadedSamples, LoadSamples, choose_samples
from headway.data.workers.stream_cursor import StreamCursor
from headway.data.workers.stream_work import LoadStream, StreamTask
from headway.data.workers.worker_pool import Work

Int64 = NDArray[np.int64]


class Step(NamedTuple):
    """One step: where it begins and ends, and the task of a worker.

    Attributes:
        key: tells steps apart: (epoch, position), the epoch 0 where positions alone tell them apart.
    """

    key: tuple[int, int]
    end: int
    task: Any


class SamplePlan(ABC):
    """Chooses the samples of each step.

    Attributes:
        spec: the options, with the order that they give.
        seed: of the samples' keys.
        work: loads the samples of a task.
        cursor: position of the loader.
    """

    spec: LoaderSpec
    seed: int
    work: Work
    cursor: EpochCursor | StreamCursor

    @abstractmethod
    def make_key(self, position: int, epoch: int) -> tuple[int, int]:
        """Returns the key of the step at a position."""

    @abstractmethod
    def iterate_steps(self, position: int, epoch: int) -> Iterator[Step]:
        """Yields the steps from a position on, without an end."""

    @abstractmethod
    def locate_samples(self, task: Any, loaded: LoadedSamples) -> tuple[Int64, Int64, Int64]:
        """Returns (positions, epochs, samples) of a loaded task; int64 [b] each."""


def build_plan(dataset: Any, spec: LoaderSpec, workers: int) -> SamplePlan:
    """Builds the plan for a data set.

    Raises:
        UsageError: the options do not fit it.
    """
    if spec.plan.get_batch_size(0) < spec.world:
        what = f"a batch of {spec.plan} gives some of {spec.world} ranks no sample"
        raise UsageError(what, where="batch", fix=f"Set it to {spec.world} or more.")
    collate = spec.collate or torch.utils.data.default_collate
    make = StreamPlan if is_stream(dataset) else MapPlan
    return make(dataset, spec, collate, workers)


def is_stream(dataset: object) -> bool:
    """Returns True if a data set is iterable and has no samples by index."""
    # It inherits a __getitem__ that only raises.
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


@final
class MapPlan(SamplePlan):
    """Steps over a map-style data set: by the Order, or once in index order."""

    def __init__(self, dataset: Any, spec: LoaderSpec, collate: Any, workers: int) -> None:
        self._samples = len(dataset)
        self.spec = spec = spec.resolve_order(self._samples)
        self.seed = spec.order.seed if spec.order is not None else 0
        self.work = LoadSamples(dataset, collate, spec.order, self.seed)
        self.cursor = EpochCursor(self._samples, spec.order, spec.plan, spec.start, spec.stop)

    def make_key(self, position: int, epoch: int) -> tuple[int, int]:
        """Returns (0, position)."""
        return 0, position

    def iterate_steps(self, position: int, epoch: int) -> Iterator[Step]:
        """Yields the steps from a position on, through all epochs."""
        spec = self.spec
        stop = math.inf if spec.order is not None else self._samples if spec.stop is None else spec.stop
        # The second half lets the next epoch begin. `while True` would spin over an empty range without yielding a
        # step.
        while position < stop or spec.start < stop:
            while position < stop:
                total = count_positions(spec, position, stop)
                low, high = get_rank_slots(total, spec.rank, spec.world)
                # Only positions travel: the worker computes the samples itself.
                yield Step((0, position), position + total, (position + low, position + high))
                position += total
            # Without an order each epoch serves the same positions.
            position = spec.start

    def locate_samples(self, task: Any, loaded: LoadedSamples) -> tuple[Int64, Int64, Int64]:
        """Returns (positions, epochs, samples), from the Order."""
        return choose_samples(self.spec.order, task)


@final
class StreamPlan(SamplePlan):
    """Steps over an iterable data set: its elements in its own order.

    If the data set has `shard(num_shards, index)`, each worker of each rank reads a shard of its own. Otherwise each
    reads all elements, and keeps those of its own steps.
    """

    def __init__(self, dataset: Any, spec: LoaderSpec, collate: Any, workers: int) -> None:
        for name in ("order", "stop", "start"):
            if getattr(spec, name):
                what = "an iterable data set has its own order and end"
                raise UsageError(what, where=name, fix="Remove it, or give the data set __len__ and __getitem__.")
        if spec.plan.grows:
            raise UsageError("batches over an iterable data set do not grow", where="batch", fix="Give one number.")
        self.spec, self.seed = spec, spec.seed or 0
        # Without workers, the loop reads the elements itself, and counts as one.
        self._batch, self._workers = spec.plan.get_batch_size(0), max(1, workers)
        self._is_sharded = callable(getattr(dataset, "shard", None))
        self.work = LoadStream(dataset, collate, self.seed, spec.rank, spec.world, self._is_sharded)
        length = len(dataset) if hasattr(dataset, "__len__") else None
        # A saved position holds with as many shards only. Without `shard`, everyone reads the same stream, so any
        # number goes.
        shards = self._workers * spec.world if self._is_sharded else 1
        self.cursor = StreamCursor(length, self._batch, self.seed, shards)

    def make_key(self, position: int, epoch: int) -> tuple[int, int]:
        """Returns (epoch, position)."""
        return epoch, position

    def iterate_steps(self, position: int, epoch: int) -> Iterator[Step]:
        """Yields the steps of an epoch, without an end: a worker finds that."""
        while True:
            task = StreamTask(epoch, position // self._batch, self._batch, self._workers)
            yield Step((epoch, position), position + self._batch, task)
            position += self._batch

    def locate_samples(self, task: Any, loaded: LoadedSamples) -> tuple[Int64, Int64, Int64]:
        """Returns (positions, epochs, samples): samples are the numbers of elements, or of those of the shard."""
        samples = loaded.first + np.arange(loaded.samples)
        positions = task.step * self._batch + np.arange(loaded.samples) if self._is_sharded else samples
        return positions, np.full_like(samples, task.epoch), samples
