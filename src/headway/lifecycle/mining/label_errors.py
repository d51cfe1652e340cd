"""Confident learning: labels that a network contradicts although it has not seen them, as a ranked queue for people.

Source: Northcutt et al. 2021, arXiv 1911.00068.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class LabelErrors:
    """Labels ranked by how wrong they look.

    Attributes:
        thresholds: mean probability of class j over the images labelled j, float64 [classes]; infinite for a class
            without labels.
        joint: estimated share of images with label i (row) and true class j (column), float64 [classes, classes].
        ranking: places of all images, int64 [n]: suspects first, each part by its score, the most doubtful label first.
        is_suspect: True if the image is confidently of another class than its label, bool [n].
        suggested: the class that the network is confident of, or its most probable other one, int64 [n].
        score: (p(label) - p(best other class) + 1) / 2, float32 [n]: 0 looks wrong, 1 right.
    """

    thresholds: NDArray[np.float64]
    joint: NDArray[np.float64]
    ranking: NDArray[np.int64]
    is_suspect: NDArray[np.bool_]
    suggested: NDArray[np.int64]
    score: NDArray[np.float32]

    @property
    def noise(self) -> float:
        """Estimated share of wrong labels: 1 less the trace of the joint distribution."""
        return float(max(0.0, 1 - np.trace(self.joint)))


def find_label_errors(labels: NDArray[np.int64], probabilities: NDArray[np.float32]) -> LabelErrors:
    """Ranks labels by confident learning.

    An image counts as class j if p_j is at least the mean p_j over the images labelled j; of several such classes, as
    the most probable one. It is a suspect if that class is not its label.

    Args:
        labels: class of each image, int64 [n].
        probabilities: of networks that have **not** been trained on these images, float32 [n, classes]. Others have
            learned the wrong labels too.

    Raises:
        UsageError: there are fewer than two classes, or a label is not one of them.
    """
    count, num_classes = probabilities.shape
    if num_classes < 2:
        raise UsageError("label errors need two classes or more", fix="Name a set with several classes.")
    if count and (labels.min() < 0 or labels.max() >= num_classes):
        raise UsageError(f"a label is not one of the {num_classes} classes", fix="Give labels from 0 on.")
    p = probabilities.astype(np.float64)
    rows = np.arange(count)
    counts = np.bincount(labels, minlength=num_classes)
    own = p[rows, labels]
    sums = np.bincount(labels, own, minlength=num_classes)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    # The mean of equal numbers may be a rounding above them.
    above = np.where(p >= thresholds - 1e-9, p, -1.0)
    confident = np.where(above.max(axis=1) >= 0, above.argmax(axis=1), -1)
    is_suspect = (confident >= 0) & (confident != labels)
    others = p.copy()
    others[rows, labels] = -1.0
    best_other = others.argmax(axis=1)
    score = (own - others[rows, best_other] + 1) / 2
    return LabelErrors(
        thresholds=thresholds,
        joint=_estimate_joint(labels, confident, counts),
        # Stable: of equal scores the first image comes first.
        ranking=np.lexsort((rows, score, ~is_suspect)).astype(np.int64),
        is_suspect=is_suspect,
        suggested=np.where(is_suspect, confident, best_other).astype(np.int64),
        score=score.astype(np.float32),
    )


def _estimate_joint(
    labels: NDArray[np.int64], confident: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns the confident counts, each row scaled to its labels, as shares of all images."""
    num_classes, is_counted = len(counts), confident >= 0
    cells = labels[is_counted] * num_classes + confident[is_counted]
    table = np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes).astype(np.float64)
    # A row in which no image is confident says nothing: its labels count as right.
    empty = np.flatnonzero(table.sum(axis=1) == 0)
    table[empty, empty] = 1
    scaled = table / table.sum(axis=1, keepdims=True) * counts[:, None]
    return np.asarray(scaled / max(counts.sum(), 1))
