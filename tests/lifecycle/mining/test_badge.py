"""BADGE: distances are those of gradients that were built, and draws follow them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lifecycle.mining.badge import Badge


def draw(seed: int, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(3), count).astype(np.float32)
    return p, generator.normal(size=(count, 5)).astype(np.float32)


def build_gradients(p: np.ndarray, h: np.ndarray) -> np.ndarray:
    a = p.astype(np.float64)
    a[np.arange(len(a)), p.argmax(axis=1)] -= 1
    return (a[:, :, None] * h[:, None, :]).reshape(len(a), -1)


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_distances_are_those_of_the_gradients(seed: int, count: int) -> None:
    p, h = draw(seed)
    gradients = build_gradients(p, h)
    picker = Badge(p, h, seed=seed)
    chosen = picker.take(np.ones(12, np.bool_), count)
    places = [place for place, _ in chosen]
    assert len(set(places)) == count
    assert places[0] == (gradients**2).sum(axis=1).argmax(), "the largest gradient comes first"
    expected = ((gradients[:, None] - gradients[None, places]) ** 2).sum(axis=2).min(axis=1)
    assert picker.distances == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for number, (place, distance) in enumerate(chosen[1:], 1):
        own = np.sqrt(((gradients[places[:number]] - gradients[place]) ** 2).sum(axis=1).min())
        assert distance == pytest.approx(own, rel=1e-3, abs=1e-3)
    assert chosen == Badge(p, h, seed=seed).take(np.ones(12, np.bool_), count)


def test_draws_are_proportional_to_the_squared_distance() -> None:
    p, h = draw(3)
    counts = np.zeros(12)
    for seed in range(1500):
        picker = Badge(p, h, seed=seed)
        picker.add(0)
        counts[picker.take(np.arange(12) > 0, 1)[0][0]] += 1
    picker = Badge(p, h)
    picker.add(0)
    expected = np.where(np.arange(12) > 0, picker.distances, 0)
    expected = expected / expected.sum()
    # Four standard deviations of each count.
    assert np.abs(counts / 1500 - expected).max() < 4 * np.sqrt(0.25 / 1500)
    assert counts[0] == 0


def test_equal_gradients_are_drawn_once_each_when_nothing_else_is_left() -> None:
    p, h = draw(4, 2)
    p, h = np.repeat(p, 4, axis=0), np.repeat(h, 4, axis=0)
    chosen = [place for place, _ in Badge(p, h).take(np.ones(8, np.bool_), 8)]
    assert sorted(chosen) == list(range(8))
    assert chosen[0] // 4 != chosen[1] // 4, "the other gradient comes before the copies of the first"


def test_a_weight_of_a_class_changes_what_is_drawn() -> None:
    p, h = draw(5)
    heavy = np.where(np.arange(12) == 7, 1e6, 1).astype(np.float32)
    picker = Badge(p, h, heavy)
    assert picker.take(np.ones(12, np.bool_), 1)[0][0] == 7
