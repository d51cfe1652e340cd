"""Scores of images by what networks say about them. A higher score is labelled first; none is negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def compute_margin(probabilities: Floats) -> NDArray[np.float32]:
    """Returns 1 - (p1 - p2) of the two most probable classes: 1 where they are equally probable.

    Source: Scheffer et al. 2001, "Active hidden Markov models for information extraction".

    Args:
        probabilities: [n, classes], two classes or more.
    """
    # A partial sort: only the two largest are needed.
    best = np.partition(probabilities, -2, axis=1)[:, -2:]
    return np.asarray(1 - (best[:, 1] - best[:, 0]), np.float32)


def compute_entropy(probabilities: Floats) -> NDArray[np.float32]:
    """Returns the entropy -sum p log p in nats, from 0 to log(classes).

    Args:
        probabilities: [..., classes].
    """
    # The limit of p log p at 0 is 0.
    logs = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    return np.asarray(np.maximum(-(probabilities * logs).sum(axis=-1), 0), np.float32)


def compute_bald(mean: Floats, mean_entropy: Floats) -> NDArray[np.float32]:
    """Returns the mutual information of label and network: entropy of the mean less the mean entropy of the members.

    It is high where members are sure of different classes, and 0 for one member.

    Source: Houlsby et al. 2011, arXiv 1112.5745; with ensembles Beluch et al. 2018.

    Args:
        mean: mean of the members' probabilities, [n, classes].
        mean_entropy: mean of the members' entropies, [n].
    """
    # Jensen: never negative but for rounding.
    return np.asarray(np.maximum(compute_entropy(mean) - mean_entropy, 0), np.float32)
