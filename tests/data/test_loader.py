from __future__ import annotations

import io
import shutil
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data._loaders import SEED, SIZE, N, Rows, loader, mixed, own_threads, rows, rows_of, uniform

from headway.core.errors import DataError, UsageError
from headway.core.random_keys import make_keys
from headway.data import opening
from headway.data.crops import compute_center_boxes
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.data.loader_spec import LoaderSpec
from headway.data.order import Order, get_rank_slots
from headway.data.reference import decode_one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return opening.open(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uniform(tmp_path_factory.mktemp("equal"))


# What is served


def test_a_batch_holds_the_pixels_and_labels_of_the_order(data: Dataset) -> None:
    found = rows(loader(data, backend="pillow"), 5)
    epochs, samples = Order(N, SEED)(np.arange(35))
    for place, (position, epoch, asked, served, label, pixels) in enumerate(found):
        sample = int(samples[place])
        assert (position, epoch, asked, served) == (place, epochs[place], sample, sample)
        assert label == data.label[sample]
        out = np.zeros((*SIZE, 3), np.uint8)
        decode_one(
            data.read([sample])[0], out, compute_center_boxes(data.width[[sample]], data.height[[sample]], SIZE)[0]
        )
        assert pixels == out.tobytes()


def test_a_batch_says_what_it_is(data: Dataset) -> None:
    batch = next(iter(loader(data)))
    assert (batch.images.shape, batch.images.dtype) == ((7, *SIZE, 3), torch.uint8)
    assert batch.labels.dtype == torch.int64
    assert (batch.seed, batch.bad) == (SEED, ())
    assert (batch.keys() == make_keys(SEED, batch.epochs, batch.samples)).all()
    assert (batch.keys(view=1) == make_keys(SEED, batch.epochs, batch.samples, 1)).all()
    assert (batch.keys() != batch.keys(view=1)).all()


def test_size_and_channels_come_from_the_data_where_they_are_not_given(equal: Path, data: Dataset) -> None:
    gray = opening.open(equal)
    plain = next(iter(loader(gray, size=None)))
    assert plain.images.shape == (7, 6, 8, 1)
    colour = next(iter(loader(gray, size=(3, 4), channels=3)))
    assert colour.images.shape == (7, 3, 4, 3)
    assert (colour.images[..., :1] == colour.images).all()
    assert next(iter(loader(data, channels=1))).images.shape == (7, *SIZE, 1)


@pytest.mark.parametrize("kind", ["value", "several"])
def test_labels_may_be_numbers_and_vectors(equal: Path, kind: str) -> None:
    data = opening.open(equal)
    label = np.random.default_rng(0).random((N, 3), np.float32)
    data.label = label if kind == "several" else label[:, 0]
    for batch in loader(data, stop=2 * N):
        assert batch.labels.dtype == torch.float32
        assert (batch.labels.numpy() == data.label[batch.samples]).all()
        assert batch.labels.is_contiguous()


# The same, however it is made


@pytest.fixture(scope="module")
def expected(data: Dataset) -> Rows:
    return rows(loader(data, stop=63))


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
def test_threads_and_slots_change_nothing(data: Dataset, expected: Rows, threads: int, prefetch: int) -> None:
    assert rows(loader(data, stop=63, threads=threads, prefetch_batches=prefetch)) == expected


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_checksums_change_nothing(data: Dataset, expected: Rows, verify: str) -> None:
    assert rows(loader(data, stop=63, verify=verify)) == expected


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("batch", [7, 21])
def test_the_ranks_of_any_world_together_serve_what_one_serves(
    data: Dataset, expected: Rows, world: int, batch: int
) -> None:
    """In a world of 9 and a batch of 7 two ranks of a step have nothing; they step all the same."""
    ranks = [list(map(rows_of, loader(data, batch, stop=63, rank=rank, world=world))) for rank in range(world)]
    assert {len(steps) for steps in ranks} == {63 // batch}
    assert [row for step in zip(*ranks, strict=True) for part in step for row in part] == expected
    for rank, steps in enumerate(ranks):
        low, high = get_rank_slots(batch, rank, world)
        assert {len(step) for step in steps} == {high - low}


@pytest.mark.parametrize("batch", [1, 9, 23, 40, 63])
def test_the_size_of_the_batch_changes_no_sample(data: Dataset, expected: Rows, batch: int) -> None:
    """Also where a batch is larger than the data set: it then holds samples of several epochs."""
    found = rows(loader(data, batch, stop=63))
    assert found[:63] == expected
    assert len(found) == -(-63 // batch) * batch  # every step is full


@pytest.mark.parametrize("start", [1, 7, 22, 23, 30, 62])
def test_a_loader_that_starts_later_serves_the_tail(data: Dataset, expected: Rows, start: int) -> None:
    assert rows(loader(data, start=start, stop=63))[: 63 - start] == expected[start:]


def test_an_epoch_spans_batches_and_a_batch_spans_epochs(data: Dataset, expected: Rows) -> None:
    batches = list(islice(loader(data), 4))
    assert [sorted(set(batch.epochs.tolist())) for batch in batches] == [[0], [0], [0], [0, 1]]
    for epoch in (0, 1):
        assert sorted(row[2] for row in expected if row[1] == epoch)[: len(expected)] == list(range(N))
    assert [row[2] for row in expected[:N]] != [row[2] for row in expected[N : 2 * N]]


def test_the_window_is_the_orders(data: Dataset) -> None:
    order = Order(N, SEED, window=4)
    found = rows(loader(data, order=order, stop=N))
    assert [row[2] for row in found[:N]] == order(np.arange(N))[1].tolist()


@settings(deadline=None, max_examples=20)
@given(batch=st.integers(1, 60), start=st.integers(0, N), length=st.integers(0, N), world=st.integers(1, 5))
def test_a_loader_knows_its_number_of_steps(data: Dataset, batch: int, start: int, length: int, world: int) -> None:
    stop = min(N, start + length)
    for order in (Order(N, SEED), None):
        for rank in {0, world - 1}:
            some = loader(data, batch, order=order, start=start, stop=stop, rank=rank, world=world)
            assert len(some) == len(list(some)) == -(-(stop - start) // batch)


def test_a_loader_without_an_end_has_no_length(data: Dataset) -> None:
    with pytest.raises(TypeError, match="no end"):
        len(loader(data))
    assert "without end" in repr(loader(data))
    assert len(loader(data, order=None)) == 4


# Evaluation


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5, 23, 100])
def test_an_evaluation_takes_every_sample_once_in_order(data: Dataset, batch: int, world: int) -> None:
    ranks = [list(map(rows_of, loader(data, batch, order=None, rank=rank, world=world))) for rank in range(world)]
    assert {len(steps) for steps in ranks} == {-(-N // batch)}
    found = [row for step in zip(*ranks, strict=True) for part in step for row in part]
    assert [row[0] for row in found] == [row[2] for row in found] == [row[3] for row in found] == list(range(N))
    assert {row[1] for row in found} == {0}
    assert [row[4] for row in found] == data.label.tolist()


def test_only_the_last_batch_of_an_evaluation_is_short(data: Dataset) -> None:
    assert [len(batch.samples) for batch in loader(data, 5, order=None)] == [5, 5, 5, 5, 3]
    assert [len(batch.samples) for batch in loader(data, 5, order=None, start=20)] == [3]
    assert [len(batch.samples) for batch in loader(data, 5, order=None, start=2, stop=9)] == [5, 2]


# The ring


def test_no_more_slots_than_batches_are_made(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    empty = torch.empty

    def counted(*shape: Any, **how: Any) -> torch.Tensor:
        made.append(shape)
        return empty(*shape, **how)

    for start, stop, prefetch, slots in ((0, 63, 50, 9), (0, 63, 3, 3), (0, 5, 50, 1), (8, 8, 50, 0)):
        made.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", counted)
            batches = list(loader(data, start=start, stop=stop, prefetch_batches=prefetch))
        assert (len(batches), len(made)) == (-(-(stop - start) // 7), slots)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_abandoned_iterator_frees_its_threads(data: Dataset, prefetch: int, taken: int) -> None:
    batches = iter(loader(data, prefetch_batches=prefetch, threads=3))
    for _ in range(taken):
        next(batches)
    assert bool(own_threads()) == (taken > 0)
    del batches
    assert own_threads() == []


def test_a_loop_that_is_left_frees_its_threads(data: Dataset) -> None:
    for batch in loader(data, threads=2):
        if batch.positions[0] > 20:
            break
    assert own_threads() == []
    batches = iter(loader(data, threads=2))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert own_threads() == []


def test_a_finished_loader_frees_its_threads(data: Dataset) -> None:
    batches = iter(loader(data, stop=14, threads=2))
    assert len(list(batches)) == 2
    assert own_threads() == []
    assert next(batches, None) is None


def test_a_batch_is_valid_until_the_next_one_is_asked_for(data: Dataset, expected: Rows) -> None:
    """With every slot full and waiting, the one that is out stays as it is."""
    for prefetch in (1, 2):
        batches = iter(loader(data, prefetch_batches=prefetch, stop=63))
        held = []
        for step in range(9):
            batch = next(batches)
            before = batch.images.clone()
            threading.Event().wait(0.01)
            assert (batch.images == before).all()
            assert rows([batch]) == expected[7 * step : 7 * step + 7]
            held.append(batch.images.data_ptr())
        batches.close()  # type: ignore[attr-defined]
        assert len(set(held)) == prefetch  # and the slots are used again and again


def test_an_error_of_the_producer_reaches_the_consumer(copy: Path) -> None:
    data = opening.open(copy)
    (copy / "shard-00001.rec").unlink()
    served: list[int] = []
    with pytest.raises(DataError, match=r"shard-00001\.rec"):
        served.extend(batch.samples.item() for batch in loader(data, 1, threads=2))
    _, samples = Order(N, SEED)(np.arange(N))
    first = next(place for place, sample in enumerate(samples) if data.shard[sample] == 1)
    assert served == samples[:first].tolist()  # what came before it was served
    assert own_threads() == []


def test_a_spec_serves_several_loaders(data: Dataset, expected: Rows) -> None:
    spec = LoaderSpec(batch=7, order=Order(N, SEED), size=SIZE, threads=1, stop=63)
    assert rows(Loader(data, spec)) == expected
    late = Loader(data, spec, start=14)
    assert (spec.start, late.spec.start) == (0, 14)
    assert rows(late) == expected[14:]


# What cannot be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "a batch of 0 samples. Set 1 or more."),
        ({"prefetch_batches": 0}, "prefetch_batches: 0 batches to prefetch. Set 1 or more."),
        ({"size": ()}, "() is not a size. Give one side, or (height, width), in pixels."),
        ({"size": (8,)}, "(8,) is not a size. Give one side, or (height, width), in pixels."),
        ({"start": 9, "stop": 8}, "positions from 9 to 8. Start at 0 or later, and stop at start or later."),
        ({"rank": 2, "world": 2}, "rank 2 of a world of 2. Ranks count from 0."),
        ({"rank": -1}, "rank -1 of a world of 1. Ranks count from 0."),
        ({"size": None}, "the images have different sizes. Give the loader a size=(height, width)."),
        (
            {"order": Order(N + 1, 0)},
            f"an order of {N + 1} samples over a data set of {N}. Make it with Order(len(dataset), seed), "
            "or give seed= instead.",
        ),
    ],
)
def test_impossible_loaders_are_refused(data: Dataset, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        loader(data, **options)
    assert str(refused.value) == said


def test_a_wrong_number_of_threads_is_refused_not_waited_for(data: Dataset) -> None:
    with pytest.raises(UsageError, match="0 decoding threads"):
        next(iter(loader(data, threads=0)))


def test_the_images_of_a_pack_decode_as_their_files(folder: Path, data: Dataset) -> None:
    (batch,) = loader(data, N, order=None, size=(30, 40))
    sample = next(place for place in range(N) if (data.width[place], data.height[place]) == (40, 30))
    with Image.open(io.BytesIO((folder.parent / "src" / data.name(sample)).read_bytes())) as image:
        assert (batch.images[sample].numpy() == np.asarray(image.convert("RGB"))).all()
