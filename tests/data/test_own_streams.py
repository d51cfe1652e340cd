"""A Loader of an iterable data set of the user's own: disjoint shares, exact resume by skipping."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_own_samples import N, opened

from headway.core.errors import CheckpointError, UsageError, UserCodeError
from headway.data.loader import Loader
from headway.data.order import Order

HERE = Path(__file__).name


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Elements in an order of its own that differs in each epoch, from the global generators."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = list(range(N))
        random.shuffle(numbers)
        for number in numbers:
            yield {"number": number, "noise": np.random.rand() + torch.rand(()).item()}


class Sharded:
    """A stream that can be divided, and that is told the epoch."""

    def __init__(self, numbers: range = range(N)) -> None:
        self.numbers, self.epoch = numbers, 0

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.numbers[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"number": number, "noise": self.epoch} for number in self.numbers])

    def __len__(self) -> int:
        return N


Elements = list[list[tuple[int, int, float]]]


def elements(batches: Any, count: int | None = None) -> Elements:
    """(position, number, noise) of each element, by batch."""
    return [
        list(zip(*(list(map(float, one)) for one in (batch.positions, batch["number"], batch["noise"])), strict=True))
        for batch in islice(batches, count)
    ]


@pytest.fixture(scope="module")
def streamed() -> Elements:
    """Two epochs, in this process."""
    with opened(Stream()) as loader:
        return [*elements(loader), *elements(loader)]


def test_a_stream_is_read_in_its_own_order_and_differs_in_each_epoch(streamed: Elements) -> None:
    assert [len(batch) for batch in streamed] == 2 * [7, 7, 7, 2]
    for epoch in (streamed[:4], streamed[4:]):
        assert sorted(number for batch in epoch for _, number, _ in batch) == list(range(N))
        assert [position for batch in epoch for position, *_ in batch] == list(range(N))
    assert [number for batch in streamed[:4] for _, number, _ in batch] != list(range(N))
    assert len({noise for batch in streamed for *_, noise in batch}) == 2 * N


@pytest.mark.parametrize(("workers", "world"), [(2, 1), (0, 3), (3, 2)])
def test_workers_and_ranks_divide_a_stream(streamed: Elements, workers: int, world: int) -> None:
    shares = []
    for rank in range(world):
        with opened(Stream(), workers=workers, rank=rank, world=world) as loader:
            shares.append([*elements(loader), *elements(loader)])
    assert [[row for share in step for row in share] for step in zip(*shares, strict=True)] == streamed


def test_a_stream_resumes_by_skipping(streamed: Elements) -> None:
    with opened(Stream(), workers=2) as first, opened(Stream(), workers=1) as second:
        assert elements(first, 3) == streamed[:3]
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        assert elements(second) == streamed[3:4]
        assert elements(second) == streamed[4:]
        # Left early, then the next epoch; and back.
        assert elements(first) == streamed[4:]
        first.set_epoch(0)
        assert elements(first, 1) == streamed[:1]
        with (
            pytest.raises(CheckpointError, match="saved with seed 5, and the loader has 6"),
            opened(Stream(), seed=6) as other,
        ):
            other.load_state_dict(state)
        assert repr(first) == "Loader of Stream: without a known end, steps of 7, 2 worker processes"


def test_shards_are_read_side_by_side() -> None:
    for workers, world in ((1, 1), (2, 2)):
        numbers: list[float] = []
        for rank in range(world):
            with opened(Sharded(), workers=workers, world=world, rank=rank, batch=4) as loader:
                assert len(loader) == 6
                batches = elements(loader)
                numbers += [number for batch in batches for _, number, _ in batch]
                assert {noise for batch in elements(loader) for *_, noise in batch} == {1}
        assert sorted(numbers) == list(range(N))


def test_what_a_stream_cannot_do_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="this generator can be read once"):
        Loader((n for n in range(3)), batch=2)
    with pytest.raises(UsageError, match="order: an iterable data set has its own order"):
        Loader(Stream(), batch=2, order=Order(N, 1))

    class Fails(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from ({"number": n, "noise": 0} for n in range(9))
            raise KeyError("the user's own key")

    with (
        opened(Fails(), workers=1) as loader,
        pytest.raises(UserCodeError, match=rf"{HERE}:\d+: element 9 of your .*KeyError"),
    ):
        list(loader)
