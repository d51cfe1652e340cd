"""Counts right answers among the best classes, with numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rank_labels(outputs: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Returns for each sample how many classes come before its label: 0 if the label is the best class.

    Of equal outputs the first class comes first, as in argmax. Where an output is NaN, all classes come before.

    Args:
        outputs: scores or probabilities [n, classes].
        labels: classes [n], from 0 to classes - 1.
    """
    own = np.take_along_axis(outputs, labels[:, None].astype(np.int64), axis=1)
    before = (outputs > own) | ((outputs == own) & (np.arange(outputs.shape[1]) < labels[:, None]))
    ranks: NDArray[np.int64] = before.sum(axis=1, dtype=np.int64)
    ranks[np.isnan(outputs).any(axis=1)] = outputs.shape[1]
    return ranks


def compute_top_share(outputs: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]], count: int) -> float:
    """Returns the share of samples whose label is among the `count` best classes."""
    return float((rank_labels(outputs, labels) < count).mean())
