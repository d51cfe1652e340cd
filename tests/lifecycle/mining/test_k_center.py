"""k-centre: the greedy choice by a slow loop, labelled images as centres, and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lifecycle.mining.k_center import BLOCK, ROWS, KCenter

SEEDS = st.integers(0, 10_000)


def draw(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def measure(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(((a[:, None].astype(np.float64) - b[None]) ** 2).sum(axis=2))


@given(SEEDS, st.integers(1, 10), st.integers(1, 3000))
def test_the_next_one_is_the_farthest(seed: int, count: int, labelled: int) -> None:
    """From more labelled images than a block holds, too."""
    features, known = draw(seed, 25), draw(seed + 1, labelled)
    eligible = np.random.default_rng(seed).random(25) < 0.8
    chosen = KCenter(features, labelled=known).take(eligible, count)
    assert len(chosen) == min(count, eligible.sum())
    centres = known
    for place, distance in chosen:
        distances = measure(features, centres).min(axis=1)
        assert eligible[place]
        assert distance == pytest.approx(distances[place], rel=1e-3, abs=1e-3)
        left = eligible.copy()
        left[[one for one, _ in chosen[: len(centres) - len(known)]]] = False
        assert distances[place] >= distances[left].max() - 1e-3
        centres = np.concatenate([centres, features[[place]]])
    assert len({place for place, _ in chosen}) == len(chosen)


def test_more_images_than_a_tile_holds() -> None:
    """The memory does not grow with their number, and each is compared with each labelled one."""
    features, known = draw(1, ROWS + 5), draw(2, BLOCK + 3)
    distances = KCenter(features, labelled=known).distances
    for place in (0, ROWS - 1, ROWS, ROWS + 4):
        expected = measure(features[[place]], known).min() ** 2
        assert distances[place] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_without_a_centre_the_first_is_nearest_to_the_mean() -> None:
    features = np.array([[0, 0], [1, 0], [10, 0], [3, 0]], np.float32)
    every = np.ones(4, np.bool_)
    assert [place for place, _ in KCenter(features).take(every, 4)] == [3, 2, 0, 1]
    assert KCenter(features).take(every, 1)[0][1] == 0.0


def test_a_weight_is_a_factor_on_the_distance() -> None:
    features = np.array([[0, 0], [3, 0], [0, 2]], np.float32)
    every, weights = np.ones(3, np.bool_), np.array([1, 1, 2], np.float32)
    known = np.zeros((1, 2), np.float32)
    assert KCenter(features, labelled=known).take(every, 1) == [(1, 3.0)]
    assert KCenter(features, weights, known).take(every, 1) == [(2, 4.0)]


def test_copies_of_a_centre_come_last() -> None:
    features = np.repeat(draw(1, 5), 3, axis=0)
    picker = KCenter(features)
    picker.add(0)
    eligible = np.ones(15, np.bool_)
    eligible[0] = False
    chosen = [place // 3 for place, _ in picker.take(eligible, 4)]
    assert sorted(chosen) == [1, 2, 3, 4]
