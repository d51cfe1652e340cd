"""Rows of an export: from its outputs to the columns of `headway predict`, by the manifest alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.export.manifest import Manifest
from headway.setup.prediction_columns import (
    THRESHOLD,
    Columns,
    make_class_columns,
    make_label_columns,
    make_number_columns,
)
from headway.training.prediction_rows import expect_ranking

if TYPE_CHECKING:
    from headway.setup.task import Task


def check_task(task: Task) -> None:
    """Raises UsageError if an export cannot hold a task: one of the user's own that states no activation."""
    if task.activation is None:
        what = (
            "this task of your own does not state how outputs become probabilities, so an export would lack that step"
        )
        raise UsageError(what, where="task", fix='Set the attribute activation = "softmax", "sigmoid" or "identity".')


def make_columns(manifest: Manifest, outputs: NDArray[np.float32], top: int | None = None) -> list[Columns]:
    """Returns the columns of each sample, which `headway predict` writes.

    Args:
        outputs: [b, outputs], after the activation.
        top: number of best classes, in place of the task's columns; see `check_ranking`.
    """
    if manifest.activation == "softmax":
        return make_class_columns(outputs, manifest.names, top or 1)
    if manifest.activation == "sigmoid":
        return make_label_columns(outputs, manifest.names, manifest.threshold or THRESHOLD)
    return make_number_columns(outputs, manifest.names)


def check_ranking(manifest: Manifest, top: int | None) -> None:
    """Raises UsageError if the export cannot name so many best classes."""
    expect_ranking(manifest.outputs if manifest.activation == "softmax" else None, top)
