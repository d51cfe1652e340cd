"""A Loader of a data set of the user's own: the same samples for any number of workers, ranks and resumes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections import namedtuple
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data._loaders import SEED, N
from tests.data._own import Photos, opened

from headway.core.errors import CheckpointError, HeadwayError, UsageError, UserCodeError
from headway.data.loader import Loader
from headway.data.order import Order
from headway.data.workers.messages import receive_message, send_message

HERE = Path(__file__).name
Pair = namedtuple("Pair", "left right")


class Odd:
    """A sample of each index that `fails` does not refuse."""

    def __init__(self, fails: int = -1, ends: int = -1) -> None:
        self.fails, self.ends = fails, ends

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if index == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.fails:
            return {}["the user's own key"]  # here: fails
        return index


def rows(batches: Any, count: int | None = None) -> list[tuple[Any, ...]]:
    """Everything about each sample that was served."""
    out = []
    for batch in islice(batches, count):
        assert len(batch.positions) == len(batch["image"]) == len(batch["name"])
        left, right = batch["crop"]
        columns = (
            *(batch.positions, batch.epochs, batch.samples, batch.keys(), batch["label"], left, right),
            batch["image"],
        )
        out += [(*row, name) for row, name in zip(zip(*map(_plain, columns), strict=True), batch["name"], strict=True)]
    return out


def _plain(column: Any) -> list[Any]:
    return [str(one) for one in column.tolist()]


def stream(count: int, **options: Any) -> list[tuple[Any, ...]]:
    with opened(**options) as loader:
        return [row for _ in range(count) for row in rows(loader)]


# The same whatever loads it


@pytest.fixture(scope="module")
def whole() -> list[tuple[Any, ...]]:
    """Four epochs, loaded in this process."""
    return stream(4)


def test_epochs_cover_the_set_and_differ(whole: list[tuple[Any, ...]]) -> None:
    for epoch in range(3):
        assert sorted(int(row[2]) for row in whole if row[1] == str(epoch)) == list(range(N))
    for column in (5, 6, 7):
        # 7 random numbers of a sample, in each epoch others.
        assert len({row[column] for row in whole}) == len(whole)
    assert all(row[2] == row[4] and row[8] == f"photo {row[2]}" for row in whole)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(whole: list[tuple[Any, ...]], workers: int) -> None:
    assert stream(4, workers=workers) == whole


def test_the_order_is_that_of_a_pack(whole: list[tuple[Any, ...]]) -> None:
    assert [int(row[2]) for row in whole] == Order(N, SEED)(np.arange(len(whole)))[1].tolist()
    near = Order(N, SEED, window=8)
    assert [int(row[2]) for row in stream(1, seed=None, order=near)] == near(np.arange(28))[1].tolist()


@settings(deadline=None, max_examples=10)
@given(served=st.integers(0, 12), world=st.integers(1, 3))
def test_ranks_share_each_step_and_resume_exactly(whole: list[tuple[Any, ...]], served: int, world: int) -> None:
    shares = []
    for rank in range(world):
        with opened(rank=rank, world=world) as first, opened(rank=rank, world=world) as second:
            batches = (batch for _ in range(4) for batch in first)
            taken = [rows([batch]) for batch in islice(batches, served)]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            while second.epoch < 4:
                taken += [rows([batch]) for batch in second]
            shares.append(taken)
    assert [row for step in zip(*shares, strict=True) for share in step for row in share] == whole


def test_a_restored_loader_with_workers_serves_the_rest(whole: list[tuple[Any, ...]]) -> None:
    with opened(workers=2) as first, opened(workers=1) as second:
        served = rows(first, 2)
        second.load_state_dict(first.state_dict())
        assert len(second) == 4
        assert served + rows(second) + rows(second) == whole[: 28 + 21]
        # An epoch that was left is not served again, also where its batches are in flight.
        assert rows(first) == whole[28 : 28 + 21]
        first.set_epoch(0)
        assert rows(first, 1) == whole[:7]
        with pytest.raises(CheckpointError, match="with seed 6"):
            first.load_state_dict({**first.state_dict(), "seed": 6})


def test_two_open_iterators_serve_two_epochs(whole: list[tuple[Any, ...]]) -> None:
    with opened(workers=1) as loader:
        left, right = iter(loader), iter(loader)
        pairs = [(rows([next(left)]), rows([next(right)])) for _ in range(2)]
        assert [row for pair in pairs for row in pair[0]] == whole[:14]
        assert [row for pair in pairs for row in pair[1]] == whole[28:42]


def test_evaluation_takes_each_sample_once_in_index_order() -> None:
    with opened(seed=None, workers=1) as loader:
        first = rows(loader)
        assert [int(row[2]) for row in first] == list(range(N))
        assert rows(loader) == first
        assert len(loader) == 4
    # 23 samples in steps of 11: the last step has one sample, and the first of two ranks has none of it.
    shares = []
    for rank in range(2):
        with opened(seed=None, batch=11, rank=rank, world=2) as loader:
            shares.append([[int(row[2]) for row in rows([batch])] for batch in loader])
    assert [len(step) for step in shares[0]] == [5, 5, 0]
    assert [len(step) for step in shares[1]] == [6, 6, 1]


def test_a_loop_keeps_its_own_random_numbers(whole: list[tuple[Any, ...]]) -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    alone = draw() + draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    beside = draw()
    with opened(workers=0) as loader:
        assert rows(loader) == whole[:28]
    assert beside + draw() == alone


# Batches


def test_a_batch_is_what_collate_returned() -> None:
    pairs = [Pair(torch.tensor([n]), np.float64(n)) for n in range(N)]
    for workers in (0, 1):
        with opened(pairs, workers=workers) as loader:
            kept = list(loader)
        for batch in kept:
            left, right = batch
            assert left.flatten().tolist() == right.tolist() == batch.samples.tolist() == batch.data.left[:, 0].tolist()
            assert len(batch) == 2
            assert batch[1] is right
    with opened() as loader:
        (batch,) = islice(loader, 1)
    assert "image" in batch
    assert "name" not in batch.data["crop"]
    assert batch.data.keys() == {"image", "crop", "label", "name"}
    assert batch.keys().dtype == np.uint64
    assert "7 samples from position 0" in repr(batch)


def test_ragged_samples_take_a_collate_of_ones_own() -> None:
    ragged = [np.arange(n) for n in range(N)]
    for workers in (0, 2):
        with opened(ragged, collate=list, workers=workers) as loader:
            for batch in loader:
                assert [len(one) for one in batch] == batch.samples.tolist()
        with opened(ragged, workers=workers) as loader, pytest.raises(UserCodeError) as caught:
            list(loader)
        # Shuffled samples are named as they are, and not as a range.
        first = Order(len(ragged), seed=SEED)(np.arange(7))[1].tolist()
        assert f"collating samples {', '.join(map(str, first))} (positions 0 to 6) of your" in str(caught.value)
    with pytest.raises(UserCodeError, match="collating samples 0 to 6 of your data set failed"):
        list(Loader(ragged, batch=7, workers=0))


LARGE = 20_000


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(LARGE),
        torch.arange(4 * LARGE).view(2, 2, -1)[:, 1].transpose(0, 1),
        torch.rand(LARGE).bfloat16(),
        torch.rand(3, 2).bfloat16(),
        torch.tensor([[True, False]]),
        torch.tensor(3.5),
        torch.rand(2, 3, dtype=torch.complex64)[:, 1:],
        torch.empty(0, 4),
        np.arange(LARGE)[::2],
        np.zeros((3, LARGE), "f2"),
        np.array(["a", None], object),
        {"ragged": [torch.full((LARGE,), n) for n in range(260)], "name": (np.float64(2), 3)},
    ],
    ids=lambda sent: type(sent).__name__,
)
def test_any_data_arrives_as_it_was(sent: Any) -> None:
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            send_message(theirs, sent)
            # As if its sender had ended meanwhile.
            message = receive_message(mine)
            got = message.load()
            torch.testing.assert_close(got, sent, rtol=0, atol=0) if not isinstance(sent, np.ndarray) else None
            if isinstance(sent, np.ndarray):
                assert got.dtype == sent.dtype
                assert (got == sent).all()
            del got
        send_message(theirs, sent)
        receive_message(mine).drop()
        del message
        gc.collect()
        assert isinstance(sent, dict) or len(os.listdir("/proc/self/fd")) <= before + 1


def test_stats_count_what_was_served() -> None:
    with opened(workers=1) as loader:
        list(loader)
        stats = loader.stats()
        assert (stats.images, stats.batches, stats.threads, stats.backend) == (28, 4, 1, "own")
        assert set(stats.stage_images_s) == {"samples", "collate"}
        assert "the data set, 1 worker process; Photos" in repr(stats)
        assert repr(loader) == "Loader of Photos: 3 steps of 7, 1 worker process"


# What goes wrong


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_names_its_sample_and_line(workers: int) -> None:
    line = (
        Path(__file__).read_text().splitlines().index('            return {}["the user\'s own key"]  # here: fails') + 1
    )
    with opened(Odd(fails=3), workers=workers, seed=None) as loader:
        with pytest.raises(
            UserCodeError, match=rf"{HERE}:{line}: sample 3 of your data set .* failed: KeyError"
        ) as found:
            list(loader)
        # Its traceback, which the command line shows.
        assert "# here: fails" in str(found.value.__cause__)
        # The batches behind it are served nonetheless.
        loader.load_state_dict({"epoch": 0, "position": 7, "samples": N, "seed": None})
        assert [batch.samples[0] for batch in loader] == [7, 14, 21]


def test_a_killed_worker_is_a_sentence_and_the_next_iteration_has_others() -> None:
    with opened(Odd(ends=16), workers=2, seed=None) as loader:
        served = []
        with pytest.raises(HeadwayError, match=r"worker process 0 of 2 \(pid \d+\) was killed by SIGKILL.*memory"):
            served += [batch.samples[0] for batch in loader]
        loader.load_state_dict({"epoch": 0, "position": 0, "samples": N, "seed": None})
        assert [batch.samples[0] for batch in islice(loader, 2)] == [0, 7]


def test_a_sample_that_cannot_travel_is_a_sentence() -> None:
    failing = pytest.raises(UserCodeError, match="sending a batch from its worker process failed")
    with opened([lambda: 1] * 9, collate=list, workers=1) as loader, failing:
        list(loader)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"crop": "random"}, "crop: it is for images that Headway decodes"),
        ({"size": 8}, "size: it is for images"),
        ({"workers": -1}, "-1 workers. Set 0 or more"),
        ({"world": 9, "rank": 8}, "gives some of 9 ranks no sample"),
        ({"order": Order(9, 1), "seed": None}, "an order of 9 samples"),
        ({"batch": 0}, "a batch of 0"),
    ):
        with pytest.raises(UsageError, match=message):
            Loader(Photos(), **{"batch": 7, "seed": 1, **options})
    with opened() as loader, pytest.raises(UsageError, match="a data set of your own, and decodes no images"):
        _ = loader.tier


SPAWNED = """
import multiprocessing, sys
import headway

class Squares:
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return index * index

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    loader = headway.Loader(Squares(), batch=9, workers=1)
    print(*(square.item() for (batch) in loader for square in batch))
    loader.close()
    try:
        list(headway.Loader([lambda: 1], batch=1, workers=1))
    except headway.core.errors.UsageError as error:
        print(error)
"""


@pytest.mark.check
@pytest.mark.fresh
def test_workers_that_are_spawned_serve_the_same(tmp_path: Path) -> None:
    """As where nothing is forked, the default of Python 3.14."""
    (tmp_path / "script.py").write_text(SPAWNED)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    squares, refused = done.stdout.splitlines()
    assert squares == "0 1 4 9 16 25 36 49 64"
    assert "workers: your code cannot be sent to worker processes" in refused


PARENT = """
import os, sys, headway
class Slow:
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return os.getpid()
loader = headway.Loader(Slow(), batch=3, workers=2, collate=list)
print(*{pid for batch in loader for pid in batch}, flush=True)
sys.stdin.read()
"""


@pytest.mark.check
def test_workers_end_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent:
        workers = list(map(int, parent.stdout.readline().split()))
        assert len(workers) == 2
        parent.kill()
        parent.stdin.close()
    left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=60)[1]
