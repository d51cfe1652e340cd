"""Precision, recall and F1 from counts: of one class, and over all classes. Defined as in scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """Samples of each class in an evaluation, int64 [classes].

    Attributes:
        count: samples that belong to the class.
        predicted: samples that the network takes for it.
        right: samples that both is true of.
    """

    count: NDArray[np.int64]
    predicted: NDArray[np.int64]
    right: NDArray[np.int64]

    @staticmethod
    def from_classes(labels: NDArray[Any], predicted: NDArray[Any], classes: int) -> ClassCounts:
        """Counts class numbers, [n] each."""
        return ClassCounts(
            count=np.bincount(labels, minlength=classes),
            predicted=np.bincount(predicted, minlength=classes),
            right=np.bincount(labels[labels == predicted], minlength=classes),
        )

    @staticmethod
    def from_labels(labels: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> ClassCounts:
        """Counts several labels of each sample, bool [n, classes]."""
        return ClassCounts(
            count=labels.sum(0, dtype=np.int64),
            predicted=predicted.sum(0, dtype=np.int64),
            # A class that does not occur still gets its zero: the three arrays are indexed by the number of the class.
            right=(labels & predicted).sum(0, dtype=np.int64),
        )

    @property
    def precision(self) -> NDArray[np.float64]:
        """Share of the samples predicted as a class that belong to it; 0 if there is none."""
        return _divide(self.right, self.predicted)

    @property
    def recall(self) -> NDArray[np.float64]:
        """Share of the samples of a class that are predicted as it; 0 if there is none."""
        return _divide(self.right, self.count)

    @property
    def f1(self) -> NDArray[np.float64]:
        """Harmonic mean of precision and recall of each class; 0 if the class occurs nowhere."""
        # Equal to 2 P R / (P + R), without the division by zero where a class is never predicted or never occurs.
        return _divide(2 * self.right, self.count + self.predicted)

    @property
    def occurs(self) -> NDArray[np.bool_]:
        """True for classes among the labels or the predictions. Means over the classes are taken over these."""
        return self.count + self.predicted > 0

    def compute_means(self) -> dict[str, float]:
        """Returns `precision`, `recall` and `f1` as means over the classes, `micro_f1` and `balanced_accuracy`."""
        occurs, has_samples = self.occurs, self.count > 0
        total = int(self.count.sum() + self.predicted.sum())
        return {
            "precision": _mean(self.precision[occurs]),
            "recall": _mean(self.recall[occurs]),
            "f1": _mean(self.f1[occurs]),
            # Summed before the division, so that frequent classes weigh more. The means above weigh all classes alike.
            "micro_f1": 2 * int(self.right.sum()) / total if total else 0.0,
            # A class without samples has no recall; scikit-learn leaves it out here too.
            "balanced_accuracy": _mean(self.recall[has_samples]),
        }

    def to_json(self) -> dict[str, list[int]]:
        """Returns the counts as lists, in the order of the classes."""
        return {name: getattr(self, name).tolist() for name in ("count", "predicted", "right")}

    def describe(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Returns `count`, `precision`, `recall` and `f1` of each class by its name."""
        columns = zip(names, self.count, self.precision, self.recall, self.f1, strict=True)
        return {
            name: {"count": int(count), "precision": float(precision), "recall": float(recall), "f1": float(f1)}
            for name, count, precision, recall, f1 in columns
        }

    @staticmethod
    def from_json(found: dict[str, list[int]]) -> ClassCounts:
        """Returns the counts of `to_json`."""
        return ClassCounts(**{name: np.array(found[name], np.int64) for name in ("count", "predicted", "right")})


def _divide(above: NDArray[np.int64], below: NDArray[np.int64]) -> NDArray[np.float64]:
    # `out` is needed: NumPy leaves the places that `where` skips as they lay in memory.
    return np.divide(above, below, out=np.zeros(len(above)), where=below > 0)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0
