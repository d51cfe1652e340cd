"""Iterating a Loader again: the next epoch, positions that are saved and restored, and what it accepts."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data._loaders import SEED, SIZE, N, Rows, loader, mixed, rows

from headway.core.errors import CheckpointError, UsageError
from headway.data import opening
from headway.data.batch_plan import BatchGrowthRecipe, BatchPlan
from headway.data.dataset import Dataset
from headway.data.epoch_cursor import EpochCursor
from headway.data.loader import Loader
from headway.data.order import Order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(tmp_path_factory.mktemp("epochs"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return opening.open(folder)


def epochs(data: Dataset, **options: Any) -> Loader:
    """A loader whose iterations are epochs, with random crops and flips."""
    return loader(data, **{"stop": None, "crop": "random", "flip": True, "batch": 7, **options})


def test_epochs_follow_each_other_and_are_together_one_stream(data: Dataset) -> None:
    """The trap: `for epoch in range(n): for batch in loader` served the same crops in the same order n times."""
    again = epochs(data)
    served = [rows(again) for _ in range(4)]
    stream = rows(epochs(data, stop=math.inf), sum(map(len, served)) // 7)
    assert [row for epoch in served for row in epoch] == stream
    assert len({tuple(row[2] for row in epoch) for epoch in served}) == 4
    # 4 epochs of 23 samples in steps of 7: 28, 21, 21 and 28 positions; each pass serves each sample once.
    assert [len(epoch) for epoch in served] == [28, 21, 21, 28]
    for number in range(4):
        assert sorted(row[2] for row in stream if row[1] == number) == list(range(N))
    assert again.epoch == 4


def test_the_same_crop_is_not_served_twice(data: Dataset) -> None:
    again = epochs(data)
    first, second = rows(again), rows(again)
    pixels = {row[2]: row[5] for row in first if row[1] == 0}
    assert sum(pixels[row[2]] == row[5] for row in second if row[1] == 1) < N / 3


def test_len_is_what_the_next_iteration_serves(data: Dataset) -> None:
    again = epochs(data)
    for _ in range(7):
        expected = len(again)
        assert expected <= -(-N // 7)
        assert len(list(again)) == expected


def test_a_seed_and_a_path_are_enough(folder: Path, data: Dataset) -> None:
    same = rows(epochs(data))
    for path in (folder, str(folder)):
        assert rows(Loader(path, batch=7, seed=SEED, size=SIZE, crop="random", flip=True)) == same


def test_without_an_order_each_iteration_serves_the_same(data: Dataset) -> None:
    held_out = loader(data, order=None)
    assert rows(held_out) == rows(held_out)
    assert [row[2] for row in rows(held_out)] == list(range(N))


def test_a_stop_makes_epochs_of_that_length(data: Dataset) -> None:
    again = epochs(data, start=7, stop=21)
    stream = rows(epochs(data, stop=math.inf), 7)
    assert [rows(again) for _ in range(3)] == [stream[7:21], stream[21:35], stream[35:49]]


def test_set_epoch_takes_it_to_any_epoch(data: Dataset) -> None:
    again = epochs(data)
    served = [rows(again) for _ in range(4)]
    for epoch in (2, 0, 3, 3):
        again.set_epoch(epoch)
        assert rows(again) == served[epoch]
    with pytest.raises(UsageError, match="Epochs count from 0"):
        again.set_epoch(-1)


def test_an_epoch_that_is_left_is_not_served_again(data: Dataset) -> None:
    again, whole = epochs(data), epochs(data)
    served = [rows(whole) for _ in range(2)]
    assert rows(again, 2) == served[0][:14]
    assert rows(again) == served[1]


def test_an_endless_loader_goes_on_where_it_was_left(data: Dataset) -> None:
    endless = epochs(data, stop=math.inf)
    stream = rows(epochs(data, stop=math.inf), 9)
    assert [rows(endless, 4), rows(endless, 5)] == [stream[:28], stream[28:]]


def test_two_open_iterators_serve_two_epochs(data: Dataset) -> None:
    again, whole = epochs(data), epochs(data)
    served = [rows(whole) for _ in range(3)]
    left, right = iter(again), iter(again)
    pairs = [(rows([one]), rows([other])) for one, other in islice(zip(left, right, strict=False), 3)]
    assert [row for pair in pairs for row in pair[0]] == served[0][:21]
    assert [row for pair in pairs for row in pair[1]] == served[1]
    left.close()  # type: ignore[attr-defined]
    right.close()  # type: ignore[attr-defined]
    assert rows(again) == served[2]


# Saved and restored


@settings(deadline=None, max_examples=15)
@given(served=st.integers(0, 12), growth=st.booleans(), world=st.integers(1, 3))
def test_a_restored_loader_serves_what_the_first_one_would_have(
    data: Dataset, served: int, growth: bool, world: int
) -> None:
    plan = BatchPlan(5, BatchGrowthRecipe(milestones_epochs=(1,), factor=2) if growth else None, epoch=N)
    for rank in {0, world - 1}:
        options = {"batch": plan, "rank": rank, "world": world}
        whole, first, second = epochs(data, **options), epochs(data, **options), epochs(data, **options)
        stream = [rows([batch]) for _ in range(4) for batch in whole]
        taken: list[Rows] = []
        # An islice that ends inside an epoch leaves it, so it is the last one.
        while len(taken) < served:
            taken += [rows([batch]) for batch in islice(first, served - len(taken))]
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        while len(taken) < len(stream):
            taken += [rows([batch]) for batch in second]
        assert taken == stream
        assert second.epoch == 4


def test_the_state_inside_an_epoch_counts_what_was_served_not_what_was_prefetched(data: Dataset) -> None:
    again = epochs(data, prefetch_batches=3)
    batches = iter(again)
    assert again.state_dict()["position"] == 0
    for step in range(1, 4):
        next(batches)
        assert again.state_dict() == {"epoch": 0, "position": 7 * step, "samples": N, "seed": SEED}
    batches.close()  # type: ignore[attr-defined]


def test_a_state_saved_behind_the_last_batch_has_nothing_left_in_its_epoch(data: Dataset) -> None:
    """A loop that saved in epoch 0 and begins at epoch 0 again makes as many epochs as one that was not stopped."""
    first, second = epochs(data), epochs(data)
    for _ in range(3):
        served = [first.state_dict() for _ in first]
    assert served[-1]["epoch"] == 2
    second.load_state_dict(served[-1])
    assert rows(second) == []
    assert rows(second) == rows(first)


def test_an_open_iterator_does_not_move_a_restored_position(data: Dataset) -> None:
    again = epochs(data)
    batches = iter(again)
    next(batches)
    again.load_state_dict({"epoch": 1, "position": 35, "samples": N, "seed": SEED})
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert again.state_dict()["position"] == 35
    assert [row[0] for row in rows(again)] == list(range(35, 49))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "not a state of a loader"),
        ({"epoch": -1, "position": 0, "samples": N, "seed": SEED}, "not a state of a loader"),
        ({"epoch": 0, "position": 1.5, "samples": N, "seed": SEED}, "not a state of a loader"),
        ({"epoch": True, "position": 0, "samples": N, "seed": SEED}, "not a state of a loader"),
        ({"epoch": 0, "position": 7, "samples": 99, "seed": SEED}, "of 99 samples"),
        ({"epoch": 0, "position": 7, "samples": N, "seed": 1}, "with seed 1"),
        ({"epoch": 2, "position": 7, "samples": N, "seed": SEED}, "lies before epoch 2"),
    ],
)
def test_a_wrong_state_is_refused(data: Dataset, state: dict[str, Any], message: str) -> None:
    again = epochs(data)
    with pytest.raises(CheckpointError, match=message):
        again.load_state_dict(state)
    assert again.state_dict()["position"] == 0


# What a Loader is given


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (3, "this int has no __len__ and __getitem__"),
        (None, "this NoneType has no"),
        (torch.utils.data.TensorDataset, "TensorDataset is a class, not an object of it"),
        (torch.utils.data.DataLoader([1, 2]), "a DataLoader makes batches already: give its dataset"),
    ],
)
def test_a_wrong_first_argument_is_a_sentence(wrong: Any, why: str) -> None:
    with pytest.raises(UsageError, match=f"a Loader serves a data set, and {why}.*Give the path"):
        Loader(wrong, batch=4)


@pytest.mark.parametrize(
    ("positional", "options", "message"),
    [
        ((), {"batch_size": 64}, r"no option 'batch_size'\. Use batch=\."),
        ((), {"batch": 4, "shuffle": True}, r"no option 'shuffle'\. Use seed=1\."),
        ((), {"batch": 4, "num_workers": 2}, "Use workers= for a data set of your own, or threads="),
        ((), {"batch": 4, "seeds": 2}, "Did you mean 'seed'"),
        ((64,), {}, r"given by name, and 64 has none\. Write batch=64, seed=1"),
        ((), {"seed": 1}, r"needs the number of samples of a batch\. Write batch=64"),
    ],
)
def test_habits_of_the_dataloader_are_answered(
    data: Dataset, positional: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(data, *positional, **options)


def test_wrong_ends_and_seeds_are_refused(data: Dataset) -> None:
    for options, message in (
        ({"stop": 7.5}, "a stop at 7.5"),
        ({"stop": math.nan}, "a stop at nan"),
        ({"stop": math.inf}, "a stop at inf"),
        ({"seed": 1, "order": Order(N, 1)}, "an order and a seed"),
        ({"order": Order(9, 1)}, "an order of 9 samples"),
        ({"flip": True}, "Give seed=1"),
    ):
        with pytest.raises(UsageError, match=message):
            Loader(data, batch=4, size=SIZE, **options)


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(1, 300), batch=st.integers(1, 400), start=st.integers(0, 700), number=st.integers(0, 9))
def test_epochs_tile_the_positions(samples: int, batch: int, start: int, number: int) -> None:
    """Epoch k ends where epoch k + 1 begins, which is the first step behind the end of a pass."""
    cursor = EpochCursor(samples, Order(samples, 1), BatchPlan(batch), start)
    cursor.set_epoch(number)
    first, stop = cursor.begin()
    steps = cursor.count_steps()
    assert steps >= 1
    for _ in range(steps):
        cursor.advance()
    end = cursor.position
    cursor.finish()
    assert cursor.position == end
    assert 0 <= end - stop < batch
    assert (first - start) % batch == 0
    if batch <= samples:
        assert stop == (start // samples + 1 + number) * samples


def test_a_batch_larger_than_the_set_makes_one_step_an_epoch(data: Dataset) -> None:
    again = epochs(data, batch=64)
    served = [rows(again) for _ in range(3)]
    assert [len(epoch) for epoch in served] == [64, 64, 64]
    assert [row for epoch in served for row in epoch] == rows(epochs(data, batch=64, stop=math.inf), 3)
    again.set_epoch(1)
    assert rows(again) == served[1]
