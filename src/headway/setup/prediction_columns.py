"""The columns of `headway predict`, from a network's outputs after the task's activation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, Any]
Float32 = NDArray[np.float32]

THRESHOLD = 0.5
"""A label is predicted above this probability."""

# Digits of a probability. More of them differ between machines.
_DIGITS = 6


def make_class_columns(probabilities: Float32, classes: Sequence[str], top: int = 1) -> list[Columns]:
    """Returns `label` and `probability` of each sample; with `top`, also `label_2`, `probability_2` and so on.

    Args:
        probabilities: [b, classes].
        top: number of best classes.
    """
    # The highest probability of equal ones is that of the first class, as in argmax.
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top] if top > 1 else probabilities.argmax(1)[:, None]
    # As take_along_axis, which needs three times as long for one sample.
    found = probabilities[np.arange(len(best))[:, None], best]
    rows = []
    for class_ids, values in zip(best.tolist(), found.tolist(), strict=True):
        row: Columns = {}
        for number, (class_id, probability) in enumerate(zip(class_ids, values, strict=True), 1):
            # The first pair has no number: other tools read it, whatever `top` is.
            ending = f"_{number}" if number > 1 else ""
            row |= {f"label{ending}": classes[class_id], f"probability{ending}": round(probability, _DIGITS)}
        rows.append(row)
    return rows


def make_label_columns(probabilities: Float32, names: Sequence[str], threshold: float = THRESHOLD) -> list[Columns]:
    """Returns `labels`, the names above the threshold, and `probability_NAME` of each sample. Args: [b, labels]."""
    return [
        {"labels": [name for name, probability in zip(names, row, strict=True) if probability > threshold]}
        | {f"probability_{name}": round(probability, _DIGITS) for name, probability in zip(names, row, strict=True)}
        for row in probabilities.tolist()
    ]


def make_number_columns(numbers: Float32, names: Sequence[str]) -> list[Columns]:
    """Returns a column for each number of each sample. Args: numbers: [b, numbers]."""
    return [dict(zip(names, row, strict=True)) for row in numbers.tolist()]


def name_numbers(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns the names that the data set gives to numbers; without them `value`, or 0, 1, 2 and so on."""
    return tuple(names) or (("value",) if count == 1 else tuple(map(str, range(count))))
