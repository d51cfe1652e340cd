"""Importance of parameters: how much of the differences between scores a random forest explains by each of them.

The forest is Breiman's (2001), over histograms: parameters are divided into at most BINS bins once, so that all nodes
of a level are split by a few sums. Deterministic: its random numbers come from keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.random_keys import draw_uniform, make_keys

TREES = 64
BINS = 32
LEAST_IN_LEAF = 3
MOST_LEVELS = 12
# Below this number of scores, no forest is grown: a leaf has at least three of those that a tree has seen.
LEAST_SCORES = 12

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True)
class Importance:
    """Result of a forest.

    Attributes:
        shares: for each parameter its share of the explained variance, adding up to 1; all 0 if none helps.
        r2: share of the variance of scores that the forest predicts for trials that it has not seen (out of bag). At 0
            or below, the shares mean nothing.
        scores: number of scores.
    """

    shares: tuple[float, ...]
    r2: float
    scores: int


def measure_importance(columns: ArrayLike, scores: ArrayLike, *, seed: int = 0) -> Importance | None:
    """Measures how much of the variance of scores each parameter explains, by permutation (Breiman 2001, section 10).

    Each tree predicts the trials that it has not seen, once as they are and once with the values of one parameter
    exchanged between them. The growth of the squared error is the importance of that parameter.

    Args:
        columns: values of parameters, shape [trials, parameters]; NaN if a trial lacks one. Only their order counts.
        scores: one finite score for each trial.

    Returns:
        None for fewer than LEAST_SCORES scores, or equal ones.
    """
    values, targets = np.asarray(columns, np.float64), np.asarray(scores, np.float64)
    count = len(targets)
    if count < LEAST_SCORES or np.ptp(targets) == 0:
        return None
    # Scores of any size: the splits are the same, and no square overflows.
    targets = (targets - targets.mean()) / np.ptp(targets)
    bins = np.stack([_divide_into_bins(column) for column in values.T], axis=1)
    sums, votes = np.zeros(count), np.zeros(count)
    growth = np.zeros(values.shape[1])
    for tree in range(TREES):
        key = make_keys(seed, 0, tree)
        drawn = (draw_uniform(make_keys(seed, tree, np.arange(count)), 0) * count).astype(np.int64)
        weights = np.bincount(drawn, minlength=count).astype(np.float64)
        splits = list(_grow_tree(bins, targets, weights))
        unseen = np.flatnonzero(weights == 0)
        if not len(unseen):
            continue
        # The trials as they are, and once for each parameter with its values exchanged: one walk down the tree for all.
        cases = np.repeat(bins[unseen][None], 1 + values.shape[1], axis=0)
        for place in range(values.shape[1]):
            order = np.argsort(draw_uniform(make_keys(int(key[0]), place, np.arange(len(unseen))), 1))
            cases[1 + place, :, place] = cases[0, order, place]
        predicted = _predict(splits, cases.reshape(-1, bins.shape[1])).reshape(len(cases), -1)
        sums[unseen] += predicted[0]
        votes[unseen] += 1
        error, *errors = np.square(predicted - targets[unseen]).mean(axis=1)
        growth += np.array(errors) - error
    seen = votes > 0
    rest = np.square(sums[seen] / votes[seen] - targets[seen]).sum()
    r2 = 1 - rest / np.square(targets[seen] - targets[seen].mean()).sum()
    # A parameter that only misleads the forest has a negative growth.
    growth = np.maximum(growth, 0)
    total = growth.sum()
    shares = growth / total if total > 0 else growth
    return Importance(shares=tuple(shares.tolist()), r2=float(r2), scores=count)


def _divide_into_bins(column: Floats) -> Integers:
    """Returns the bin of each value: 0 if there is none, else from 1 up, with about as many trials in each."""
    known = np.unique(column[~np.isnan(column)])
    edges = known[1:] if len(known) <= BINS else np.quantile(known, np.linspace(0, 1, BINS + 1)[1:-1])
    bins = 1 + np.searchsorted(edges, column, side="right")
    return np.where(np.isnan(column), 0, bins)


@final
@dataclass(frozen=True)
class _Level:
    """The splits of all nodes of one level: a trial at a node goes right if its bin is above `edge`.

    The children of a node are `child` and `child + 1` on the next level. A leaf has the feature -1.
    """

    feature: Integers
    edge: Integers
    child: Integers
    mean: Floats


def _grow_tree(bins: Integers, targets: Floats, weights: Floats) -> Iterator[_Level]:
    """Yields the levels of a regression tree on weighted trials, the root first; the last one has only leaves."""
    trials = np.flatnonzero(weights)
    nodes, weights, targets, bins = np.zeros(len(trials), np.int64), weights[trials], targets[trials], bins[trials]
    places, features = int(bins.max()) + 1, bins.shape[1]
    children = 1
    for level in range(MOST_LEVELS + 1):
        count = children
        mass = np.bincount(nodes, weights, count)
        total = np.bincount(nodes, weights * targets, count)
        mean = total / mass
        feature, edge = np.full(count, -1), np.zeros(count, np.int64)
        if level < MOST_LEVELS:
            cells = (nodes[:, None] * features + np.arange(features)) * places + bins
            shape = (count, features, places)
            masses = np.bincount(cells.ravel(), np.repeat(weights, features), count * features * places)
            totals = np.bincount(cells.ravel(), np.repeat(weights * targets, features), count * features * places)
            left_mass = masses.reshape(shape).cumsum(axis=2)
            left_total = totals.reshape(shape).cumsum(axis=2)
            right_mass, right_total = mass[:, None, None] - left_mass, total[:, None, None] - left_total
            fits = (left_mass >= LEAST_IN_LEAF) & (right_mass >= LEAST_IN_LEAF)
            gain = np.square(left_total) / np.maximum(left_mass, 1) + np.square(right_total) / np.maximum(right_mass, 1)
            gain = np.where(fits, gain - (np.square(total) / mass)[:, None, None], 0).reshape(count, -1)
            # Two parameters may divide a node alike: which is taken should not depend on the last bits of their sums.
            gain = gain.round(10)
            best = gain.argmax(axis=1)
            splits = gain[np.arange(count), best] > 0
            feature, edge = np.where(splits, best // places, -1), np.where(splits, best % places, 0)
        # Nodes are numbered anew on each level, so that only those with trials take memory.
        is_split = feature >= 0
        child = 2 * (is_split.cumsum() - 1)
        yield _Level(feature, edge, child, mean)
        if not is_split.any():
            return
        kept = is_split[nodes]
        nodes, bins, weights, targets = nodes[kept], bins[kept], weights[kept], targets[kept]
        nodes = child[nodes] + (bins[np.arange(len(nodes)), feature[nodes]] > edge[nodes])
        children = 2 * int(is_split.sum())


def _predict(levels: list[_Level], bins: Integers) -> Floats:
    nodes, rows = np.zeros(len(bins), np.int64), np.arange(len(bins))
    predicted = np.zeros(len(bins))
    active = np.ones(len(bins), bool)
    for level in levels:
        feature = level.feature[nodes]
        predicted = np.where(active, level.mean[nodes], predicted)
        active &= feature >= 0
        right = bins[rows, np.maximum(feature, 0)] > level.edge[nodes]
        nodes = np.where(active, level.child[nodes] + right, 0)
    return predicted
