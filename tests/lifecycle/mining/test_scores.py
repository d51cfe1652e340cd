"""Scores: their largest and smallest values, and what does not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lifecycle.mining.scores import compute_bald, compute_entropy, compute_margin


def draw(seed: int, members: int, count: int, classes: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(classes, 0.5), (members, count)).astype(np.float32)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(2, 6))
def test_scores_are_within_their_bounds_and_know_no_order_of_classes(seed: int, members: int, classes: int) -> None:
    p = draw(seed, members, 20, classes)
    mean, mean_entropy = p.mean(axis=0), compute_entropy(p).mean(axis=0)
    margin, entropy, bald = compute_margin(mean), compute_entropy(mean), compute_bald(mean, mean_entropy)
    for score, most in ((margin, 1), (entropy, math.log(classes)), (bald, math.log(min(classes, members)))):
        assert score.shape == (20,)
        assert (score >= 0).all()
        assert (score <= most + 1e-5).all()
    turned = np.roll(mean, 1, axis=1)
    assert compute_margin(turned) == pytest.approx(margin)
    assert compute_entropy(turned) == pytest.approx(entropy, abs=1e-6)
    # Jensen: the entropy of the mean is at least the mean of the entropies.
    assert (entropy >= mean_entropy - 1e-5).all()


def test_sure_and_unsure() -> None:
    p = np.array([[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]], np.float32)
    assert compute_margin(p) == pytest.approx([0, 1, 1])
    assert compute_entropy(p) == pytest.approx([0, math.log(2), math.log(3)], abs=1e-6)


def test_bald_is_zero_without_disagreement_and_largest_where_members_are_sure_of_different_classes() -> None:
    alike = np.array([[[0.5, 0.5]], [[0.5, 0.5]]], np.float32)
    apart = np.array([[[1, 0]], [[0, 1]]], np.float32)
    for p, expected in ((alike, 0.0), (apart, math.log(2))):
        assert compute_bald(p.mean(axis=0), compute_entropy(p).mean(axis=0)) == pytest.approx([expected], abs=1e-6)
