"""Task: turns the network's outputs into loss, metrics and predictions. A user's own task is named by import path."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headway.core.errors import RecipeError
from headway.data.columns import LabelKind
from headway.data.dataset import Dataset
from headway.setup.losses import compute_binary_cross_entropy, compute_cross_entropy, compute_l1, compute_l2
from headway.setup.prediction_columns import (
    make_class_columns,
    make_label_columns,
    make_number_columns,
    name_numbers,
)
from headway.setup.set_metrics import SetMetric

LABEL_PHRASES: dict[LabelKind, str] = {"class": "classes", "multi": "sets of names", "value": "numbers"}
"""Each kind of label in words."""


Activation = Literal["softmax", "sigmoid", "identity"]
"""From outputs to probabilities of classes (softmax) or of single labels (sigmoid), or to numbers (identity)."""


def activate_outputs(activation: Activation | None, outputs: torch.Tensor) -> torch.Tensor:
    """Turns a network's outputs [b, outputs] into probabilities or numbers; without an activation they stay."""
    if activation == "softmax":
        return outputs.softmax(dim=1)
    return outputs.sigmoid() if activation == "sigmoid" else outputs


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The kind of labels that a data set has, and how many numbers or classes.

    Attributes:
        kind: `class`, `multi` (several labels) or `value` (numbers).
        classes: names of the classes or of the numbers; empty for a single number.
        numbers: numbers of a label: 1 for a class or a single number, else the length of the vector.
    """

    kind: LabelKind
    classes: tuple[str, ...]
    numbers: int

    @staticmethod
    def from_dataset(dataset: Dataset) -> TargetSpec:
        """Returns the labels' kind of a data set."""
        shape, description = dataset.label.shape, dataset.description
        # A single number is stored as [n], without a second dimension.
        numbers = int(shape[1]) if len(shape) > 1 else 1
        return TargetSpec(kind=description.label_kind, classes=description.classes, numbers=numbers)


class Task(ABC):
    """Loss, metrics and predictions, all per sample.

    The Trainer sums and weighs them, so that uneven ranks and masked samples come out right. A task by import path is
    built as `factory(target, **args)`.
    """

    primary: str
    """The metric by which the best weights are kept, or `loss`."""
    higher_is_better: bool
    lower_is_better: frozenset[str] = frozenset()
    """Metrics beside the primary one that are better when lower; the loss always is."""
    set_metrics: Sequence[SetMetric] = ()
    """Metrics of a whole set, such as F1. Evaluations compute them beside the means of `metrics`."""
    activation: Activation | None = None
    """Function that turns outputs into what an ensemble averages; None: a task of your own that allows no ensemble."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of outputs that the network must give for a sample; passed to its factory as num_classes."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each sample, shape [b]. Outputs: float32 [b, outputs]; labels: as in the data set."""

    @abstractmethod
    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the metrics by name, each of shape [b]; their means are reported. Must not sync with the device."""

    @abstractmethod
    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        """Returns for each sample the columns that `headway predict` writes, by name. Outputs: [b, outputs]."""


class Classification(Task):
    """Softmax cross-entropy; metric `accuracy`.

    Args:
        target: the classes.
        label_smoothing: fraction of the target spread over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    """

    primary, higher_is_better = "accuracy", True
    activation = "softmax"

    def __init__(self, target: TargetSpec, *, label_smoothing: float = 0.0) -> None:
        _expect_kind(target, "class", "Classification")
        if not 0 <= label_smoothing < 1:
            raise RecipeError(f"{label_smoothing} is not in [0, 1)", where="task.args.label_smoothing", fix="Set 0.1.")
        self._classes, self._smoothing = target.classes, label_smoothing

    @property
    def outputs(self) -> int:
        return len(self._classes)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # A loss for each sample, because the trainer weighs them: masked samples, uneven ranks.
        return compute_cross_entropy(outputs, labels, label_smoothing=self._smoothing)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        # A transform such as mixup gives soft labels, of which the largest counts.
        if labels.ndim == 2:
            labels = labels.argmax(dim=1)
        return {"accuracy": (outputs.argmax(dim=1) == labels).float()}

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return make_class_columns(outputs.softmax(dim=1).numpy(force=True), self._classes)


class MultiLabel(Task):
    """Binary cross-entropy, mean over the labels; metrics `label_accuracy` and `exact` (every label is right)."""

    primary, higher_is_better = "label_accuracy", True
    activation = "sigmoid"

    def __init__(self, target: TargetSpec) -> None:
        _expect_kind(target, "multi", "MultiLabel")
        self._classes = target.classes

    @property
    def outputs(self) -> int:
        return len(self._classes)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return compute_binary_cross_entropy(outputs, labels)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        # A logit above 0 is a probability above 0.5.
        is_right = ((outputs > 0) == (labels > 0.5)).float()
        return {"label_accuracy": is_right.mean(dim=1), "exact": is_right.amin(dim=1)}

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return make_label_columns(outputs.sigmoid().numpy(force=True), self._classes)


class Regression(Task):
    """Squared error, mean over the numbers; metric `absolute_error`."""

    primary, higher_is_better = "absolute_error", False
    activation = "identity"

    def __init__(self, target: TargetSpec) -> None:
        _expect_kind(target, "value", "Regression")
        self._numbers = target.numbers
        self._names = name_numbers(target.classes, target.numbers)

    @property
    def outputs(self) -> int:
        return self._numbers

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return compute_l2(outputs, labels)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"absolute_error": compute_l1(outputs, labels)}

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return make_number_columns(outputs.numpy(force=True), self._names)


def _expect_kind(target: TargetSpec, kind: LabelKind, name: str) -> None:
    """Raises RecipeError if the labels are not of the kind that the task `name` needs."""
    words = {"class": "a class", "multi": "several labels", "value": "numbers"}
    if target.kind != kind:
        fix = "Leave task.factory out, and it is chosen by the labels."
        what = f"{name} wants {words[kind]} for a label, the data has {words[target.kind]}"
        raise RecipeError(what, where="task", fix=fix)


def reaches_goal(task: Task, name: str, value: float, goal: float) -> bool:
    """Returns True if the mean of a metric, or of the loss, is at least as good as a goal."""
    # The loss is always better when lower.
    is_lower_primary = name == task.primary and not task.higher_is_better
    lower_is_better = name == "loss" or name in task.lower_is_better or is_lower_primary
    return value <= goal if lower_is_better else value >= goal


def is_better(task: Task, metrics: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Returns True if an evaluation is better than the best previous one, by the primary metric. NaN never is."""
    name = task.primary
    # On a tie the lower loss decides: a diverged run is as accurate as its untrained network, both by chance.
    if metrics[name] == best[name]:
        return metrics["loss"] < best["loss"] or (math.isnan(best["loss"]) and not math.isnan(metrics["loss"]))
    return not math.isnan(metrics[name]) and not reaches_goal(task, name, best[name], metrics[name])
