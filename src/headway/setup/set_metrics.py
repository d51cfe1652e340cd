"""Metrics of a whole set that are no means over its samples: F1, AUC, R2, and the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.setup.class_counts import ClassCounts


class SetMetric(ABC):
    """One or more metrics that are computed from all samples of an evaluation at once.

    Each rank collects a few numbers of each of its samples. These are joined in the order of the data set, without
    damaged samples, and the metric is computed from all of them. So it has the same bits on any number of ranks. One by
    import path is built as `factory(target, **args)`.

    Attributes:
        names: the metrics that `compute` returns.
        lower_is_better: those of them that are better when lower.
    """

    names: Sequence[str]
    lower_is_better: frozenset[str] = frozenset()

    @abstractmethod
    def collect(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the numbers that are kept of each sample, [b] or [b, k]. Must not sync with the device.

        Args:
            outputs: float32 [b, outputs].
            labels: as in the data set.
        """

    @abstractmethod
    def compute(self, collected: NDArray[Any]) -> Mapping[str, float]:
        """Returns the value of each of `names`. Args: collected: the kept numbers of all samples, [n] or [n, k]."""


@final
class ClassScores(SetMetric):
    """Precision, recall, F1 and balanced accuracy of predicted classes."""

    def __init__(self, names: Sequence[str], classes: int) -> None:
        self.names, self._classes = names, classes

    def collect(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # Whole numbers of 4 bytes: two for each sample are kept, whatever the number of classes.
        return torch.stack([labels, outputs.argmax(dim=1)], dim=1).int()

    def compute(self, collected: NDArray[Any]) -> Mapping[str, float]:
        labels, predicted = collected.T
        means = ClassCounts.from_classes(labels, predicted, self._classes).compute_means()
        return {name: means[name] for name in self.names}


@final
class LabelScores(SetMetric):
    """Precision, recall and F1 of several labels; a label is predicted above a probability of one half."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def collect(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # An output is a logit, and 0 is a probability of one half.
        return torch.cat([labels > 0.5, outputs > 0], dim=1)

    def compute(self, collected: NDArray[Any]) -> Mapping[str, float]:
        labels, predicted = np.split(collected, 2, axis=1)
        means = ClassCounts.from_labels(labels, predicted).compute_means()
        return {name: means[name] for name in self.names}


@final
class RankingScores(SetMetric):
    """Area under the ROC curve and average precision, each as a mean over the classes.

    It keeps all outputs: 4 bytes for each sample and class. A class that no sample has, or all have, is left out.
    """

    def __init__(self, names: Sequence[str], *, is_multi: bool) -> None:
        self.names, self._is_multi = names, is_multi

    def collect(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # Logarithms of the probabilities: they have the same order, and do not saturate at 1.
        scores = outputs if self._is_multi else outputs.log_softmax(dim=1)
        # Numbers of classes are exact in float32 up to 16 million.
        return torch.cat([scores, labels.to(scores.dtype).reshape(len(labels), -1)], dim=1)

    def compute(self, collected: NDArray[Any]) -> Mapping[str, float]:
        if self._is_multi:
            scores, labels = np.split(collected, 2, axis=1)
            is_positive = labels > 0.5
        else:
            scores, labels = collected[:, :-1], collected[:, -1:]
            is_positive = labels == np.arange(scores.shape[1])
        functions = {"auc": compute_auc, "mean_average_precision": compute_average_precision}
        out = {}
        for name in self.names:
            found = [functions[name](one, positive) for one, positive in zip(scores.T, is_positive.T, strict=True)]
            known = [value for value in found if value is not None]
            out[name] = float(np.mean(known)) if known else float("nan")
        return out


@final
class ValueScores(SetMetric):
    """Root mean squared error, and R2 (the share of the variance that is explained), as means over the numbers."""

    lower_is_better = frozenset({"rmse"})

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def collect(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([labels.reshape(outputs.shape), outputs], dim=1)

    def compute(self, collected: NDArray[Any]) -> Mapping[str, float]:
        labels, outputs = np.split(collected.astype(np.float64), 2, axis=1)
        # In float64, because the squares of a large set are summed.
        squares = ((outputs - labels) ** 2).sum(0)
        variation = ((labels - labels.mean(0)) ** 2).sum(0)
        # As in scikit-learn, a constant label gives 1 if it is met exactly, else 0.
        share = np.divide(squares, variation, out=(squares > 0).astype(np.float64), where=variation > 0)
        found = {"rmse": float(np.sqrt(squares / len(labels)).mean()), "r2": float((1 - share).mean())}
        return {name: found[name] for name in self.names}


def compute_auc(scores: NDArray[Any], is_positive: NDArray[np.bool_]) -> float | None:
    """Returns the probability that a positive sample has a higher score than a negative one; ties count one half.

    None: all samples are positive, or none is. By the ranks of the scores (Mann and Whitney 1947).
    """
    positives = int(is_positive.sum())
    negatives = len(scores) - positives
    if not positives or not negatives:
        return None
    if np.isnan(scores).any():
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Samples with one score share the mean of their ranks, which count from 1.
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(mean_ranks[inverse][is_positive].sum())
    # Less the lowest sum of ranks that so many samples can have; what is left counts the pairs in the right order.
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def compute_average_precision(scores: NDArray[Any], is_positive: NDArray[np.bool_]) -> float | None:
    """Returns the sum of precision times the increase of recall over all thresholds; None: no sample is positive."""
    positives = int(is_positive.sum())
    if not positives:
        return None
    # NaN has no place in an order: the network has diverged, and the metric shall say so.
    if np.isnan(scores).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    # Samples with one score are on the same side of every threshold, so only the last of them counts.
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(is_positive[order])[last]
    return float((np.diff(hits, prepend=0) / positives * hits / (last + 1)).sum())
