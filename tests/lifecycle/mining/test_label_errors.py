"""Confident learning: its definition by a slow loop, planted errors, and sets without errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.lifecycle.mining.label_errors import find_label_errors


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 60))
def test_the_definition(seed: int, classes: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(classes), count).astype(np.float32)
    labels = generator.integers(0, classes, count)
    found = find_label_errors(labels, p)
    own = [p[labels == j, j].astype(np.float64) for j in range(classes)]
    thresholds = [one.mean() if len(one) else np.inf for one in own]
    table = np.zeros((classes, classes))
    for place in range(count):
        above = [j for j in range(classes) if p[place, j] >= thresholds[j] - 1e-9]
        confident = max(above, key=lambda j: p[place, j]) if above else -1
        assert found.is_suspect[place] == (confident not in (-1, labels[place]))
        if confident >= 0:
            table[labels[place], confident] += 1
            if found.is_suspect[place]:
                assert found.suggested[place] == confident
        assert found.suggested[place] != labels[place]
    for i in range(classes):
        row = table[i] if table[i].any() else np.eye(classes)[i]
        assert found.joint[i] == pytest.approx(row / row.sum() * (labels == i).sum() / count)
    assert found.joint.sum() == pytest.approx(1)
    assert 0 <= found.noise <= 1
    # Suspects first, and each part by its score.
    assert sorted(found.ranking) == list(range(count))
    keys = [(not found.is_suspect[place], found.score[place]) for place in found.ranking]
    assert keys == sorted(keys)


def test_planted_errors_are_found() -> None:
    """The network is right on most images; a tenth of the labels is not."""
    generator = np.random.default_rng(1)
    truth = generator.integers(0, 5, 2000)
    p = (0.6 * np.eye(5)[truth] + 0.4 * generator.dirichlet(np.ones(5), 2000)).astype(np.float32)
    is_wrong = generator.random(2000) < 0.1
    labels = np.where(is_wrong, (truth + generator.integers(1, 5, 2000)) % 5, truth)
    found = find_label_errors(labels, p)
    suspects = found.is_suspect
    assert (suspects & is_wrong).sum() / suspects.sum() > 0.95
    assert (suspects & is_wrong).sum() / is_wrong.sum() > 0.7
    assert found.noise == pytest.approx(is_wrong.mean(), rel=0.2)
    assert (found.suggested[suspects & is_wrong] == truth[suspects & is_wrong]).mean() > 0.95
    # The order does not depend on the order of the images.
    turned = find_label_errors(labels[::-1], p[::-1])
    assert set((1999 - turned.ranking[:50]).tolist()) == set(found.ranking[:50].tolist())


def test_right_labels_are_no_errors() -> None:
    labels = np.arange(30) % 3
    p = np.full((30, 3), 0.1, np.float32)
    p[np.arange(30), labels] = 0.8
    found = find_label_errors(labels, p)
    assert not found.is_suspect.any()
    assert found.noise == 0
    assert found.score == pytest.approx(np.full(30, 0.85))


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="two classes"):
        find_label_errors(np.zeros(3, np.int64), np.ones((3, 1), np.float32))
    with pytest.raises(UsageError, match="not one of the 2 classes"):
        find_label_errors(np.array([0, 2]), np.full((2, 2), 0.5, np.float32))
