"""A task with a loss or metrics that a recipe adds, around a built-in or a user's task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from headway.core.errors import RecipeError
from headway.setup.metric_catalog import AddedMetrics
from headway.setup.own_loss import PerSample
from headway.setup.task import TargetSpec, Task


@final
class ComposedTask(Task):
    """A task whose loss is replaced, or that reports more metrics.

    Labels of numbers have the shape of the outputs in the added loss and metrics, [b, numbers]: with [b] a difference
    would be broadcast to [b, b]. The added metrics get class numbers, also where mixup gives soft labels.

    Args:
        inner: gives everything that is not replaced.
        target: the labels.
        loss: the loss of each sample; None: that of the inner task.
        metrics: more metrics.
        primary: the metric by which the best weights are kept; None: that of the inner task.
    """

    def __init__(
        self, inner: Task, target: TargetSpec, *, loss: PerSample | None, metrics: AddedMetrics, primary: str | None
    ) -> None:
        self._inner, self._kind, self._loss, self._metrics = inner, target.kind, loss, metrics
        self.activation = inner.activation
        self.set_metrics = (*inner.set_metrics, *metrics.of_set)
        of_inner = {inner.primary} if not inner.higher_is_better else set()
        self.lower_is_better = frozenset(metrics.lower_is_better | inner.lower_is_better | of_inner)
        self.primary = inner.primary if primary is None else primary
        self.higher_is_better = self.primary != "loss" and self.primary not in self.lower_is_better

    @property
    def outputs(self) -> int:
        return self._inner.outputs

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self._loss is None:
            return self._inner.loss(outputs, labels)
        return self._loss(outputs, labels.reshape(outputs.shape) if self._kind == "value" else labels)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        found = dict(self._inner.metrics(outputs, labels))
        # A user's task may report any names.
        if twice := found.keys() & set(self._metrics.list_names()):
            what = f"the task reports {min(twice)!r} already"
            raise RecipeError(what, where="task.metrics", fix="Remove it, or give your own metric another name.")
        labels = self._prepare_labels(outputs, labels)
        return found | {name: compute(outputs, labels) for name, compute in self._metrics.per_sample.items()}

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return self._inner.predict(outputs)

    def _prepare_labels(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns labels in the form that added metrics get."""
        if self._kind == "value":
            return labels.reshape(outputs.shape)
        return labels.argmax(dim=1) if self._kind == "class" and labels.ndim == 2 else labels
