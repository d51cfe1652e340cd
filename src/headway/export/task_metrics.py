"""Metrics of an export over labelled samples: those of the built-in tasks, from outputs after the activation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.export.manifest import Manifest
from headway.export.top_classes import rank_labels
from headway.setup.prediction_columns import THRESHOLD

Values = dict[str, NDArray[np.float64]]

# Smallest probability whose logarithm counts: a float32 that is rounded to 0 would make a mean infinite.
_SMALLEST = float(np.finfo(np.float32).tiny)


def compute_metrics(manifest: Manifest, outputs: NDArray[np.float32], labels: NDArray[Any]) -> Values:
    """Returns the metrics of each sample by name, float64 [b]; `loss` comes first.

    - classes: `loss` is the negative logarithm of the probability of the right class (label smoothing, weights of
      classes and a loss of the user's own are left out), `accuracy`, and with more than five classes `top5`.
    - several labels: binary cross-entropy as `loss`, `label_accuracy` and `exact`.
    - numbers: squared error as `loss`, and `absolute_error`.

    Args:
        outputs: [b, outputs], after the activation.
        labels: as in a data set: class numbers [b], labels [b, classes], or numbers [b] or [b, numbers].

    Raises:
        UsageError: the task is the user's own.
    """
    check_metrics(manifest)
    if manifest.task == "class":
        return _measure_classes(outputs, labels)
    if manifest.task == "multi":
        return _measure_labels(outputs, labels, manifest.threshold or THRESHOLD)
    difference = outputs.astype(np.float64) - labels.reshape(outputs.shape)
    return {"loss": np.square(difference).mean(axis=1), "absolute_error": np.abs(difference).mean(axis=1)}


def check_metrics(manifest: Manifest) -> None:
    """Raises UsageError if the task is the user's own, whose metrics only its code knows."""
    if manifest.task == "own":
        what = "an export has no metrics of a task of your own"
        raise UsageError(what, fix="Evaluate the run that it was made of: headway evaluate RUN.")


def _measure_classes(probabilities: NDArray[np.float32], labels: NDArray[Any]) -> Values:
    right = np.take_along_axis(probabilities, labels[:, None].astype(np.int64), axis=1)
    ranks = rank_labels(probabilities, labels)
    values = {
        "loss": -np.log(np.maximum(right[:, 0].astype(np.float64), _SMALLEST)),
        "accuracy": (ranks == 0).astype(np.float64),
    }
    return values | ({"top5": (ranks < 5).astype(np.float64)} if probabilities.shape[1] > 5 else {})


def _measure_labels(probabilities: NDArray[np.float32], labels: NDArray[Any], threshold: float) -> Values:
    found = probabilities.astype(np.float64)
    # float32 rounds probabilities near 1 to 1, so both ends are cut.
    likelihood = np.clip(np.where(labels > 0.5, found, 1 - found), _SMALLEST, None)
    is_right = (probabilities > threshold) == (labels > 0.5)
    return {
        "loss": -np.log(likelihood).mean(axis=1),
        "label_accuracy": is_right.mean(axis=1),
        "exact": is_right.all(axis=1).astype(np.float64),
    }
