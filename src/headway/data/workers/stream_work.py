"""LoadStream: loads the elements of one step from an iterable data set of the user's own, and collates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, final

from headway.core.random_keys import make_keys
from headway.data.collated_batch import take_nothing
from headway.data.order import get_rank_slots
from headway.data.workers.sample_seeds import seed_generators
from headway.data.workers.sample_work import LoadedSamples
from headway.data.workers.user_failure import UserFailure
from headway.data.workers.worker_pool import Work

# Keys that are computed together.
KEYS_AT_A_TIME = 1024


class StreamTask(NamedTuple):
    """One step of an epoch.

    Attributes:
        batch: elements of a step, over all ranks.
        workers: number of workers, which take steps in turns.
    """

    epoch: int
    step: int
    batch: int
    workers: int


@final
class LoadStream(Work):
    """Reads an iterable data set. Every element is produced with generators seeded by its number in its epoch, whether
    it is kept or skipped, so all workers and ranks see the same stream.

    Args:
        is_sharded: the data set has `shard`; each worker of each rank reads its own shard.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, rank: int, world: int, is_sharded: bool
    ) -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed
        self._rank, self._world, self._is_sharded = rank, world, is_sharded
        self._worker, self._epoch, self._next = 0, -1, 0
        self._stream: Iterator[Any] = iter(())
        self._keys: list[int] = []

    def start(self, number: int, workers: int) -> None:
        """Notes the number of this worker.

        `torch.utils.data.get_worker_info()` answers None, so that a data set which divides its elements among torch's
        workers gives all of them here.
        """
        self._worker = number

    def __call__(self, task: StreamTask) -> LoadedSamples | UserFailure | None:
        """Returns the batch of a step; None if the epoch has ended before it."""
        begun = perf_counter()
        try:
            first, elements = self._read_elements(task)
        except (Exception, SystemExit) as error:
            what = f"element {self._next} of your data set (epoch {task.epoch})"
            return UserFailure.describe(what, error)
        if not elements:
            return None
        # A last, short step is divided as all others are; a rank without a sample gets the form of one.
        share = (0, len(elements)) if self._is_sharded else get_rank_slots(len(elements), self._rank, self._world)
        own, between = elements[slice(*share)], perf_counter()
        try:
            data = self._collate(own or elements[:1])
        except (Exception, SystemExit) as error:
            what = f"collating elements {first + share[0]} to {first + share[1] - 1} of your data set"
            return UserFailure.describe(what, error)
        return LoadedSamples(
            data if own else take_nothing(data),
            len(own),
            between - begun,
            perf_counter() - between,
            first + share[0],
        )

    def _read_elements(self, task: StreamTask) -> tuple[int, list[Any]]:
        """Reads the elements of a step; returns the number of the first one, and all of them."""
        first, count = task.step * task.batch, task.batch
        if self._is_sharded:
            # Steps go round among the workers, so this is the n-th one of this worker's own shard.
            low, high = get_rank_slots(task.batch, self._rank, self._world)
            count = high - low
            first = task.step // task.workers * count
        # An iterator cannot go back, so an earlier position means to read the epoch from its beginning.
        if task.epoch != self._epoch or first < self._next:
            self._begin_epoch(task)
        while self._next < first and self._take_element() is not _END:
            pass
        elements: list[Any] = []
        while len(elements) < count and (element := self._take_element()) is not _END:
            elements.append(element)
        return first, elements

    def _begin_epoch(self, task: StreamTask) -> None:
        self._epoch, self._next, self._keys = task.epoch, 0, []
        # `shard`, `set_epoch` and `__iter__` may shuffle: everyone has to draw the same order.
        seed_generators(self._make_key(0))
        dataset = self.dataset
        if self._is_sharded:
            index = self._rank * task.workers + self._worker
            dataset = dataset.shard(num_shards=self._world * task.workers, index=index)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(task.epoch)
        self._stream = iter(dataset)

    def _take_element(self) -> Any:
        """Returns the next element, or _END."""
        seed_generators(self._make_key(self._next))
        element = next(self._stream, _END)
        if element is not _END:
            self._next += 1
        return element

    def _make_key(self, number: int) -> int:
        place = number % KEYS_AT_A_TIME
        if place == 0 or not self._keys:
            low = number - place
            # Equal numbers in two shards are different elements, and must not get the same random numbers.
            view = self._worker * self._world + self._rank if self._is_sharded else 0
            numbers = range(low, low + KEYS_AT_A_TIME)
            self._keys = make_keys(self._seed, self._epoch, list(numbers), view).tolist()
        return self._keys[place]


# No value of a data set can be it; None may be an element.
_END = object()
