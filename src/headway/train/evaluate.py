"""Evaluation: the set once in index order, the last batch short, each sample counted once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data import dataset as data
from headway.train.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        metrics: means over the samples counted: `loss` and the task's.
        samples: numbers of the samples counted, int64 [n] (masked ones are left out).
        damaged: how many were left out.
        losses: loss of each, float32 [n].
        predicted: class of each, int64 [n]; None where labels are no classes.
    """

    metrics: dict[str, float]
    samples: NDArray[np.int64]
    damaged: int
    losses: NDArray[np.float32]
    predicted: NDArray[np.int64] | None


def batches_of(setup: Setup, dataset: data.Dataset) -> Iterator[tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]]:
    """(outputs, labels, served) of every batch of a data set, without gradients, the network in evaluation mode."""
    recipe = setup.recipe
    loader = setup.inputs.evaluation(recipe, dataset)
    training = setup.model.training
    setup.model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                images = setup.augment.normalise(batch.images)
                with setup.precision.autocast():
                    outputs = setup.forward(images)
                yield outputs.float(), batch.labels, batch.served
    finally:
        setup.model.train(training)


def evaluate(setup: Setup, dataset: data.Dataset) -> Evaluation:
    """Loss and metrics of the network over a data set; damaged samples are left out (or stop it, as `on_bad` says).

    Raises:
        DataError: more than `max_bad_share` of them are.
    """
    served: list[NDArray[np.int64]] = []
    found: dict[str, list[torch.Tensor]] = {"loss": []}
    predicted: list[torch.Tensor] = []
    # A task of the user's may give something else than a number a class.
    by_class = setup.target.kind == "class" and setup.task.outputs == len(setup.target.classes)
    for outputs, labels, numbers in batches_of(setup, dataset):
        served.append(numbers)
        found["loss"].append(setup.task.loss(outputs, labels).float())
        for name, values in setup.task.metrics(outputs, labels).items():
            found.setdefault(name, []).append(values.float())
        if by_class:
            predicted.append(outputs.argmax(dim=1))
    samples = np.concatenate(served)
    counted = samples >= 0
    damaged, limit = int((~counted).sum()), setup.recipe.data.max_bad_share
    if damaged > limit * len(samples) or not counted.any():
        what = f"{damaged} of {len(samples)} samples are damaged, more than data.max_bad_share {limit}"
        raise DataError(what, where=str(dataset.folder), fix="Run headway verify on it, and pack the data again.")
    by_name = {name: torch.cat(parts).cpu().numpy()[counted] for name, parts in found.items()}
    return Evaluation(
        metrics={name: float(value.mean(dtype=np.float64)) for name, value in by_name.items()},
        samples=samples[counted],
        damaged=damaged,
        losses=by_name["loss"],
        predicted=torch.cat(predicted).cpu().numpy()[counted] if predicted else None,
    )
