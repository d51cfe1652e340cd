"""Figures of an ensemble: each member alone, the first k members together, and how far members disagree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.errors import DataError
from headway.core.text_format import align_table
from headway.data.dataset import Dataset
from headway.setup.task import Task
from headway.setup.train_setup import TrainSetup
from headway.training.average_outputs import average_outputs
from headway.training.evaluate import predict_outputs

ECE_BINS = 15
# Passes over one batch, of which the fastest counts: the first one allocates memory.
TIMED_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one network, or of several together, over an evaluation set.

    Attributes:
        name: run folder of a member, or `first k`.
        metrics: the task's metrics; with classes also `nll` and `ece`, otherwise `loss`.
        ms: milliseconds of inference an image: CPU time of all threads, on a GPU wall time. None: not measured.
    """

    name: str
    metrics: dict[str, float]
    ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class EnsembleStudy:
    """The figures of an ensemble.

    Attributes:
        data: folder of the evaluation set.
        samples, damaged: samples counted, and samples left out.
        members: figures of each member alone.
        first: figures of the first k members together, k = 1, 2, ..., all.
        disagreement: share of the samples for which two members predict different classes (or labels), mean over all
            pairs of members. None if labels are numbers.
        clock: `CPU` or `GPU`, the time that `ms` counts.
    """

    data: str
    samples: int
    damaged: int
    members: tuple[Figures, ...]
    first: tuple[Figures, ...]
    disagreement: float | None
    clock: str

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all members together."""
        return self.first[-1].metrics

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes by name."""
        return asdict(self)

    def describe(self) -> str:
        """Returns the table, for the terminal."""
        names = list(self.metrics)
        # The loss is what an ensemble improves for certain; accuracy may move either way.
        loss = names[-2] if names[-1] == "ece" else names[-1]
        rows = [["alone", *names, f"ms an image ({self.clock})", ""]]
        rows += [[*_format_figures(one, names), ""] for one in self.members]
        rows.append(["together", *[""] * len(names), "", f"{loss} added"])
        # The first member together with nobody is the first row above.
        for before, one in pairwise(self.first):
            rows.append([*_format_figures(one, names), f"{one.metrics[loss] - before.metrics[loss]:+.4f}"])
        lines = [f"{self.samples:,} images of {shorten_path(self.data)}", *align_table(rows)]
        if self.disagreement is not None:
            what = "images" if loss == "nll" else "labels"
            lines.append(f"Two members disagree on {self.disagreement:.1%} of the {what}, on average over all pairs.")
        return "\n".join(lines)


def shorten_path(path: str) -> str:
    """Returns a path relative to the current folder if it lies inside, for messages."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _format_figures(one: Figures, names: Sequence[str]) -> list[str]:
    return [one.name, *(f"{one.metrics[name]:.4f}" for name in names), "" if one.ms is None else f"{one.ms:.3g}"]


def compute_ece(confidence: Tensor, is_right: Tensor, bins: int = ECE_BINS) -> float:
    """Returns the expected calibration error: |accuracy - confidence| in bins of equal width, weighted by samples.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3. It is 0 to 1, and 0 at best.

    Args:
        confidence: probability of the predicted class, float [n].
        is_right: 1 where the prediction is right, [n].
    """
    # Bins are closed above, as in the paper: (0, 1/15], (1/15, 2/15], ...
    places = (confidence.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gaps.index_add_(0, places, is_right.double() - confidence.double())
    return float(gaps.abs().sum() / max(len(confidence), 1))


def count_differences(predicted: Tensor) -> Tensor:
    """Counts the pairs of members that differ, for each sample: from [members, b, ...] to [b, ...]."""
    pairs = torch.combinations(torch.arange(len(predicted), device=predicted.device), 2)
    return (predicted[pairs[:, 0]] != predicted[pairs[:, 1]]).sum(0)


@final
class _Collector:
    """Collects the figures of one network batch by batch; values stay on the device until the end."""

    def __init__(self, name: str, task: Task, has_classes: bool) -> None:
        self._name, self._task, self._has_classes = name, task, has_classes
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        values = dict(self._task.metrics(outputs, labels))
        if self._has_classes:
            log_p = F.log_softmax(outputs, dim=1)
            best, predicted = log_p.max(dim=1)
            values |= {"nll": F.nll_loss(log_p, labels, reduction="none")}
            values |= {"confidence": best.exp(), "right": predicted == labels}
        else:
            values["loss"] = self._task.loss(outputs, labels)
        for name, value in values.items():
            self._parts.setdefault(name, []).append(value.float())

    def summarise(self, ms: float | None = None) -> Figures:
        values = {name: torch.cat(parts) for name, parts in self._parts.items()}
        confidence, is_right = values.pop("confidence", None), values.pop("right", None)
        metrics = {name: float(value.double().mean()) for name, value in values.items()}
        if confidence is not None and is_right is not None:
            metrics["ece"] = compute_ece(confidence, is_right)
        return Figures(name=self._name, metrics=metrics, ms=ms)


def study_ensemble(
    setup: TrainSetup,
    names: Sequence[str],
    dataset: Dataset,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EnsembleStudy:
    """Evaluates an ensemble, each of its members, and the first k members for each k, in one pass over a data set.

    Args:
        setup: the ensemble; see `join_members`.
        names: names of the members.

    Raises:
        DataError: more than `data.max_bad_share` of the samples are damaged.
    """
    task, has_classes = setup.task, setup.target.kind == "class" and setup.task.activation == "softmax"
    alone = [_Collector(name, task, has_classes) for name in names]
    together = [_Collector(f"first {count}", task, has_classes) for count in range(1, len(names) + 1)]
    differences, served, damaged = [], 0, 0
    pixels = None
    with torch.no_grad():
        for batch in setup.inputs.build_evaluation_loader(setup.recipe, dataset):
            # Masked samples have been served as -1.
            good = torch.from_numpy(batch.served >= 0).to(batch.labels.device)
            # Copies, since a loader uses the memory of its batches again.
            images, labels = batch.images[good], batch.labels[good]
            served, damaged = served + len(batch.served), damaged + int((batch.served < 0).sum())
            if not len(labels):
                continue
            outputs = [predict_outputs(member, images) for member in setup.members]
            for place, one in enumerate(outputs):
                alone[place].add(one, labels)
                together[place].add(average_outputs(task.activation, outputs[: place + 1]), labels)
            if task.activation != "identity":
                stacked = torch.stack(outputs)
                predicted = stacked.argmax(2) if has_classes else stacked > 0
                differences.append(count_differences(predicted).float())
            pixels = images if pixels is None else pixels
            progress(served, len(dataset))
        if pixels is None or damaged > setup.recipe.data.max_bad_share * served:
            what = f"{damaged} of {served} samples are damaged, more than data.max_bad_share"
            raise DataError(what, where=str(dataset.folder), fix="Run headway verify on it, and pack the data again.")
        # Timed after the pass: while the loader decodes, its threads use CPU time too.
        ms = [time_inference(member, pixels) for member in (*setup.members, setup)]
    pairs = len(names) * (len(names) - 1) // 2
    together_ms = [None] * (len(names) - 1) + ms[-1:]
    return EnsembleStudy(
        data=str(dataset.folder),
        samples=served - damaged,
        damaged=damaged,
        members=tuple(one.summarise(cost) for one, cost in zip(alone, ms[:-1], strict=True)),
        first=tuple(one.summarise(cost) for one, cost in zip(together, together_ms, strict=True)),
        disagreement=float(torch.cat(differences).double().mean()) / pairs if differences else None,
        clock="CPU" if setup.device.type == "cpu" else "GPU",
    )


def time_inference(setup: TrainSetup, pixels: Tensor) -> float:
    """Measures the milliseconds of inference an image, without decoding: CPU time of all threads, on a GPU wall time.

    Args:
        pixels: uint8 [b, H, W, C], on the device.
    """
    is_cpu = setup.device.type == "cpu"
    read = time.process_time if is_cpu else time.perf_counter
    taken = []
    for _ in range(TIMED_PASSES):
        started = read()
        predict_outputs(setup, pixels)
        if not is_cpu:
            torch.cuda.synchronize(setup.device)
        taken.append(read() - started)
    return min(taken) * 1e3 / len(pixels)
