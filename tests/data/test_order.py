from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import MASK
from headway.data.order import (
    BLOCKS_PER_WINDOW,
    SMALL_RANGE_SIZE,
    Order,
    count_rounds,
    get_rank_slots,
    permute,
    unpermute,
)

sizes = st.integers(1, 5000)
seeds = st.integers(0, 2**63 - 1)
windows = st.none() | st.integers(1, 6000)
few = settings(deadline=None, max_examples=100)


def epoch_of(order: Order, epoch: int) -> NDArray[np.int64]:
    """The samples of one epoch in the order in which they are served."""
    n = order.samples
    epochs, samples = order(np.arange(epoch * n, (epoch + 1) * n))
    assert (epochs == epoch).all()
    return samples


@few
@given(n=sizes, seed=seeds, epoch=st.integers(0, 10**9), window=windows)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int, window: int | None) -> None:
    samples = epoch_of(Order(n, seed, window), epoch)
    assert samples.dtype == np.int64
    assert (np.sort(samples) == np.arange(n)).all()


@pytest.mark.thin(12)
@pytest.mark.parametrize(
    "n", [*range(1, 70), SMALL_RANGE_SIZE - 1, SMALL_RANGE_SIZE, SMALL_RANGE_SIZE + 1, 2**16, 2**16 + 1]
)
def test_sizes_at_the_edges_are_permuted_too(n: int) -> None:
    for window in (None, 1, 2, 7, n - 1, n, n + 1):
        if window != 0:
            assert (np.sort(epoch_of(Order(n, 1, window), 3)) == np.arange(n)).all(), window


@few
@given(n=st.integers(5001, 2**40), seed=seeds, window=st.none() | st.integers(1, 2**40), data=st.data())
def test_large_sets_are_served_without_repetition(n: int, seed: int, window: int | None, data: st.DataObject) -> None:
    """Of a large set, any thousand positions of an epoch bring a thousand samples, all below n."""
    slots = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, n, 1000)
    first = data.draw(st.integers(0, n - 1000))
    slots = np.unique(np.concatenate([slots, np.arange(first, first + 1000)]))
    epoch = data.draw(st.integers(0, 1000))
    epochs, samples = Order(n, seed, window)(epoch * n + slots)
    assert (epochs == epoch).all()
    assert ((samples >= 0) & (samples < n)).all()
    assert len(np.unique(samples)) == len(slots)


@pytest.mark.parametrize("n", [2**53 + 1, 2**61 + 12345, 2**62])
def test_the_largest_ranges_are_permuted(n: int) -> None:
    x = np.unique(np.random.default_rng(0).integers(0, n, 20_000, np.uint64))
    out = permute(x, n, 42)
    assert (out < n).all()
    assert len(np.unique(out)) == len(x)
    assert np.corrcoef(x.astype(float), out.astype(float))[0, 1] == pytest.approx(0, abs=0.03)


@few
@given(n=sizes, seed=seeds, window=windows, data=st.data())
def test_any_positions_at_once_give_what_each_gives_alone(
    n: int, seed: int, window: int | None, data: st.DataObject
) -> None:
    order = Order(n, seed, window)
    positions = np.array(data.draw(st.lists(st.integers(0, 20 * n), min_size=1, max_size=20)), np.int64)
    epochs, samples = order(positions)
    assert (epochs == positions // n).all()
    for position, epoch, sample in zip(positions, epochs, samples, strict=True):
        assert Order(n, seed, window)(position) == (epoch, sample)
        assert epoch_of(order, int(epoch))[position % n] == sample


@pytest.mark.parametrize("window", [None, 64])
def test_no_positions_give_no_samples(window: int | None) -> None:
    epochs, samples = Order(100, 0, window)(np.arange(0))
    assert len(epochs) == len(samples) == 0


@pytest.mark.parametrize("window", [None, 256])
def test_seeds_and_epochs_give_unlike_permutations(window: int | None) -> None:
    n = 5000
    found = [epoch_of(Order(n, seed, window), epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    for place, left in enumerate(found):
        for right in found[:place]:
            assert (left == right).sum() < 30  # two random permutations agree in one place, give or take one
    assert (epoch_of(Order(n, 1, window), 0) != epoch_of(Order(n, 0, window), 1)).any()


# The way back


@few
@given(n=sizes, seed=seeds, epoch=st.integers(0, 10**9), window=windows)
def test_position_of_is_the_inverse_of_an_epoch(n: int, seed: int, epoch: int, window: int | None) -> None:
    order = Order(n, seed, window)
    positions = order.find_positions(epoch, epoch_of(order, epoch))
    assert positions.dtype == np.int64
    assert (positions == np.arange(epoch * n, (epoch + 1) * n)).all()


@few
@given(n=st.integers(1, 2**40), seed=seeds, window=st.none() | st.integers(1, 2**40), data=st.data())
def test_position_of_any_samples_of_a_large_set(n: int, seed: int, window: int | None, data: st.DataObject) -> None:
    order = Order(n, seed, window)
    epoch = data.draw(st.integers(0, 1000))
    samples = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, n, 500)
    positions = order.find_positions(epoch, samples)
    epochs, back = order(positions)
    assert (epochs == epoch).all()
    assert (back == samples).all()


@given(n=st.integers(1, 6000), key=st.integers(0, MASK), salt=st.none() | st.integers(0, MASK))
def test_unpermute_undoes_permute(n: int, key: int, salt: int | None) -> None:
    x = np.arange(n, dtype=np.uint64)
    salts = None if salt is None else np.uint64(salt) * (x % np.uint64(3) + np.uint64(1))
    if salts is None:
        assert (unpermute(permute(x, n, key), n, key) == x).all()
    else:
        assert (unpermute(permute(x, n, key, salts), n, key, salts) == x).all()


@pytest.mark.parametrize("n", [2**53 + 1, 2**61 + 12345, 2**62])
def test_the_largest_ranges_go_back_too(n: int) -> None:
    x = np.random.default_rng(1).integers(0, n, 20_000, np.uint64)
    assert (unpermute(permute(x, n, 42), n, 42) == x).all()


def test_no_samples_have_no_positions() -> None:
    assert len(Order(100, 0, 64).find_positions(1, np.arange(0))) == 0


# Windows


@few
@given(n=st.integers(1, 20_000), seed=seeds, window=st.integers(1, 3000), epoch=st.integers(0, 50))
def test_a_window_draws_from_few_contiguous_places(n: int, seed: int, window: int, epoch: int) -> None:
    samples = epoch_of(Order(n, seed, window), epoch)
    if window >= n:
        return
    for first in range(0, n, window):
        piece = np.sort(samples[first : first + window])
        places = 1 + np.count_nonzero(np.diff(piece) > 1)
        assert places <= BLOCKS_PER_WINDOW + 2


def test_a_window_as_large_as_the_set_is_none() -> None:
    whole = epoch_of(Order(1000, 3), 2)
    for window in (1000, 1001, 10**9):
        assert (epoch_of(Order(1000, 3, window), 2) == whole).all()


@pytest.mark.parametrize(("n", "window"), [(10_000, 64), (10_000, 1000), (9_999, 77), (1003, 100)])
def test_windows_mix_within_themselves_and_their_blocks_anew_each_epoch(n: int, window: int) -> None:
    found = np.array([epoch_of(Order(n, 5, window), epoch) for epoch in range(20)])
    inside = found[:, : window - 1] - found[:, 1:window]
    assert (inside == 1).mean() < 0.1  # not sequential
    # over the epochs, one position is served samples from all over the set
    assert found[:, 0].std() > n / 5
    assert found[:, -1].std() > n / 5
    # and one sample comes anywhere in its epoch, also the last, which would stay in the short block
    assert np.argmax(found == n - 1, axis=1).std() > n / 5
    # and no two samples stay together: those of the first window of epoch 0 are spread over later epochs
    together = np.isin(found[1:, :window], found[0, :window]).mean()
    assert together < 2.5 * window / n + 0.1


# Randomness


def unevenness(rows: NDArray[np.int64]) -> float:
    """Chi-square of the rows, each a permutation, over all permutations; in standard deviations from its mean."""
    n = rows.shape[1]
    names = {permutation: place for place, permutation in enumerate(permutations(range(n)))}
    counts = np.bincount([names[tuple(row)] for row in rows.tolist()], minlength=len(names))
    expected, freedom = len(rows) / len(names), len(names) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.thin(1)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_few_samples_are_about_equally_likely(n: int) -> None:
    epochs = 2500
    _, samples = Order(n, 1)(np.arange(epochs * n))
    assert unevenness(samples.reshape(epochs, n)) < 4
    salts = np.repeat(np.arange(40_000, dtype=np.uint64), n)
    by_salt = permute(np.tile(np.arange(n, dtype=np.uint64), 40_000), n, 1, salts)
    assert unevenness(by_salt.reshape(40_000, n).astype(np.int64)) < 5


@pytest.mark.thin(1)
@pytest.mark.parametrize("n", [50, 1000, 4096, 5001])
def test_each_sample_comes_at_each_place_equally_often(n: int) -> None:
    """Where the first, second and last position fall: chi-square over 20 equal parts of the set."""
    epochs = 1000
    for place in (0, 1, n - 1):
        _, samples = Order(n, 7)(np.arange(epochs) * n + place)
        counts = np.bincount(samples * 20 // n, minlength=20)
        expected = epochs * np.bincount(np.arange(n) * 20 // n) / n
        assert ((counts - expected) ** 2 / expected).sum() < 19 + 5 * math.sqrt(2 * 19), place


@pytest.mark.parametrize("n", [4095, 5000, 10_007])
def test_fixed_points_and_neighbours_are_those_of_random_permutations(n: int) -> None:
    count = 200
    found = np.array([epoch_of(Order(n, seed), 0) for seed in range(count)])
    # fixed points of a random permutation: mean 1, variance 1
    fixed = (found == np.arange(n)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 4 / math.sqrt(count)
    assert fixed.var() < 2
    # neighbours lie n/3 apart, and their places are not correlated
    apart = np.abs(np.diff(found, axis=1))
    assert apart.mean() == pytest.approx(n / 3, rel=0.003)
    assert (apart == 1).mean() == pytest.approx(2 / n, rel=0.2)
    centred = found - found.mean(axis=1, keepdims=True)
    serial = (centred[:, 1:] * centred[:, :-1]).mean(axis=1) / centred.var(axis=1)
    assert abs(serial.mean()) < 5 / math.sqrt(n * count)
    assert serial.std() == pytest.approx(1 / math.sqrt(n), rel=0.25)


def test_neighbouring_seeds_give_unrelated_permutations() -> None:
    n = 5000
    found = np.array([epoch_of(Order(n, seed), 0) for seed in range(30)]).astype(float)
    relation = np.corrcoef(found)[~np.eye(30, dtype=bool)]
    assert np.abs(relation).max() < 5 / math.sqrt(n)


def test_workers_with_orders_of_their_own_read_from_the_whole_set() -> None:
    n, workers = 1000, 4
    order, positions = Order(n, 7), np.arange(2 * n)
    assert order.for_worker(0) is order
    orders = [order.for_worker(worker) for worker in range(workers)]
    assert len({one.seed for one in orders}) == workers
    # A step of 20 positions gives each worker five.
    epochs, served = np.empty_like(positions), np.empty_like(positions)
    for worker, one in enumerate(orders):
        own = positions % 20 // 5 == worker
        epochs[own], served[own] = one(positions[own])
        for epoch in range(2):
            samples = served[own & (epochs == epoch)]
            # A worker takes no sample twice in an epoch, and its samples come from all of the set.
            assert len(np.unique(samples)) == len(samples) == n // workers
            assert samples.min() < 50
            assert samples.max() > 950
    missed = [1 - len(np.unique(served[epochs == epoch])) / n for epoch in range(2)]
    assert missed == pytest.approx([0.75**4] * 2, abs=0.05)
    # Anew in the second epoch.
    assert (served[:n] != served[n:]).mean() > 0.99


def test_small_ranges_get_more_rounds() -> None:
    assert [count_rounds(n) for n in (1, SMALL_RANGE_SIZE - 1, SMALL_RANGE_SIZE, 2**62)] == [20, 20, 6, 6]


@given(n=st.integers(2, 500), key=st.integers(0, MASK), salts=st.lists(st.integers(0, 2**32), min_size=2, max_size=2))
def test_a_salt_makes_another_permutation(n: int, key: int, salts: list[int]) -> None:
    x = np.arange(n, dtype=np.uint64)
    rows = [permute(x, n, key, np.full(n, salt, np.uint64)) for salt in salts]
    for row in rows:
        assert (np.sort(row) == x).all()
    if salts[0] == salts[1]:
        assert (rows[0] == rows[1]).all()
    elif n > 30:
        assert (rows[0] != rows[1]).any()
    mixed = permute(x, n, key, np.where(x % 2 == 0, *np.array(salts, np.uint64)))
    assert (mixed == np.where(x % 2 == 0, *rows)).all()  # each entry by its own salt


# Shares of a step


@given(total=st.integers(0, 10**7), world=st.integers(1, 3000))
def test_shares_tile_a_step_and_differ_by_at_most_one(total: int, world: int) -> None:
    shares = [get_rank_slots(total, rank, world) for rank in range(world)]
    assert shares[0][0] == 0
    assert shares[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    lengths = {high - low for low, high in shares}
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) == -(-total // world)


@few
@given(
    n=st.integers(1, 300),
    seed=seeds,
    window=st.none() | st.integers(1, 300),
    batch=st.integers(1, 80),
    world=st.integers(1, 12),
    steps=st.integers(1, 12),
)
def test_a_world_of_any_size_serves_what_one_rank_serves(
    n: int, seed: int, window: int | None, batch: int, world: int, steps: int
) -> None:
    order = Order(n, seed, window)
    alone = np.stack(order(np.arange(steps * batch)))
    served, positions = [], []
    for step in range(steps):
        for rank in range(world):
            low, high = get_rank_slots(batch, rank, world)
            positions.append(np.arange(step * batch + low, step * batch + high))
            served.append(np.stack(order(positions[-1])))
    assert (np.concatenate(served, axis=1) == alone).all()
    assert (np.concatenate(positions) == np.arange(steps * batch)).all()  # each position once
    for epoch in range(steps * batch // n):  # so that a whole epoch has each sample once
        assert (np.sort(alone[1][alone[0] == epoch]) == np.arange(n)).all()


@pytest.mark.parametrize(("n", "window", "said"), [(0, None, "an empty data set"), (10, 0, "a window of 0 samples")])
def test_impossible_orders_are_refused(n: int, window: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Order(n, 0, window)
