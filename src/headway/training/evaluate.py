"""Evaluation: one pass over a data set in index order, each sample counted once. The last batch may be short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from headway.core.errors import DataError, UsageError
from headway.data import dataset as data
from headway.data.batch import Batch
from headway.launch.ranks import Ranks
from headway.setup.checks import check_labels
from headway.setup.class_counts import ClassCounts
from headway.setup.inputs import open_dataset
from headway.setup.metric_catalog import collect_set_metrics, compute_set_metrics
from headway.setup.train_setup import TrainSetup
from headway.training.average_outputs import average_outputs

POSITIONS, PREDICTED, COLLECTED = "places of samples", "classes predicted", "collected for metric "
"""Arrays gathered with those of the metrics. Their names have spaces, which the names of metrics cannot have."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: means of `loss` and of the task's metrics over the samples counted, and its metrics of the whole set.
        samples: indices of the samples counted, int64 [n]; masked ones are left out.
        damaged: number of samples left out.
        losses: loss of each sample, float32 [n].
        predicted: predicted class of each sample, int64 [n]; None if labels are not classes.
        counts: samples, predictions and right ones of each class or label; None if labels are numbers.
    """

    metrics: dict[str, float]
    samples: NDArray[np.int64]
    damaged: int
    losses: NDArray[np.float32]
    predicted: NDArray[np.int64] | None
    counts: ClassCounts | None


def evaluate_batches(
    setup: TrainSetup, dataset: data.Dataset, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Batch]]:
    """Yields (outputs, labels, batch) for a data set, or for a rank's share of it.

    The network is in evaluation mode, and gradients are off.
    """
    recipe = setup.recipe
    loader = setup.inputs.build_evaluation_loader(recipe, dataset, rank, world)
    # The network is left as it was found, also after an error.
    training = setup.model.training
    setup.model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                # The last batch may have fewer samples than there are ranks.
                if not len(batch.images):
                    if setup.divided is not None and not setup.divided.is_whole_in_evaluation:
                        _answer_other_ranks(setup, batch.images)
                    continue
                yield predict_outputs(setup, batch.images), batch.labels, batch
    finally:
        setup.model.train(training)


def _answer_other_ranks(setup: TrainSetup, images: torch.Tensor) -> None:
    """Runs the network on an image of zeros, as the other ranks need what this one holds of it."""
    compute_outputs(setup, setup.augment.normalise(images.new_zeros((1, *images.shape[1:]))))


def predict_outputs(setup: TrainSetup, pixels: torch.Tensor) -> torch.Tensor:
    """Computes the outputs for uint8 images [b, H, W, C], as float32 [b, outputs]; of an ensemble, the average."""
    if setup.members:
        # Each member normalises with its own mean and std.
        outputs = [predict_outputs(member, pixels) for member in setup.members]
        return average_outputs(setup.task.activation, outputs)
    return compute_outputs(setup, setup.augment.normalise(pixels))


def compute_outputs(setup: TrainSetup, images: torch.Tensor) -> torch.Tensor:
    """Computes the network's outputs for normalised images, as float32 [b, outputs].

    With `evaluate.flip` or `evaluate.shift` it returns their weighted mean over the views of `build_views`; with
    `evaluate.views_below`, for unsure images only.
    """
    options = setup.recipe.evaluate

    def run(view: torch.Tensor) -> torch.Tensor:
        with setup.precision.autocast():
            return setup.forward(view).float()

    # Ranks that share a network need each other in every pass, and a CUDA graph is captured for one batch size.
    is_alone = setup.divided is None or setup.divided.is_whole_in_evaluation
    selects = is_alone and setup.recipe.compile != "graphs"
    return average_views(
        run, images, flip=options.flip, shift=options.shift, below=options.views_below, selects=selects
    )


def average_views(
    run: Callable[[torch.Tensor], torch.Tensor],
    images: torch.Tensor,
    *,
    flip: bool,
    shift: int,
    below: float | None = None,
    selects: bool = True,
) -> torch.Tensor:
    """Returns the weighted mean of a network's outputs over the views of `build_views`.

    Args:
        run: computes the outputs of one view.
        images: [b, C, H, W].
        below: takes the mean only for images whose highest class probability without the other views is below this;
            the others keep their own outputs (github.com/hiverge/cifar10-speedrun takes the least sure quarter).
        selects: run the other views on those images alone. False: run all views on all images, for the same result
            without a batch size that depends on values.
    """
    outputs = run(images)
    if below is None:
        return _average_views(run, outputs, images, flip=flip, shift=shift)
    is_unsure = outputs.softmax(dim=1).amax(dim=1) < below
    if not selects:
        return torch.where(is_unsure[:, None], _average_views(run, outputs, images, flip=flip, shift=shift), outputs)
    unsure = is_unsure.nonzero().squeeze(1)
    if len(unsure):
        outputs[unsure] = _average_views(run, outputs[unsure], images[unsure], flip=flip, shift=shift)
    return outputs


def _average_views(
    run: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor, images: torch.Tensor, *, flip: bool, shift: int
) -> torch.Tensor:
    """Returns the weighted mean over all views; `outputs` are those of the images themselves."""
    views = build_views(images, flip=flip, shift=shift)
    # The first view is the images themselves.
    weight, _ = next(views)
    mean = outputs * weight
    for weight, view in views:
        mean.add_(run(view), alpha=weight)
    return mean


def build_views(images: torch.Tensor, *, flip: bool, shift: int) -> Iterator[tuple[float, torch.Tensor]]:
    """Yields (weight, images) for each view at test time. The weights add up to 1.

    With `shift`, the images themselves weigh 1/2, and their copies moved by `shift` pixels up and left, and down and
    right, 1/4 each; the border is filled by reflection. With `flip`, half of each weight goes to the mirror image.

    Args:
        images: [b, C, H, W], H and W above `shift`; memory format and type are kept.
    """
    # Only slices and flips: no interpolation, so the pixels stay those of the data set.
    moved = [(1.0, images)]
    if shift:
        up = torch.cat([images[:, :, shift:], images[:, :, -shift - 1 : -1].flip(2)], 2)
        up = torch.cat([up[..., shift:], up[..., -shift - 1 : -1].flip(3)], 3)
        down = torch.cat([images[:, :, 1 : shift + 1].flip(2), images[:, :, :-shift]], 2)
        down = torch.cat([down[..., 1 : shift + 1].flip(3), down[..., :-shift]], 3)
        moved = [(0.5, images), (0.25, up), (0.25, down)]
    for weight, one in moved:
        yield from ((weight / 2, one), (weight / 2, one.flip(3))) if flip else ((weight, one),)


def evaluate(setup: TrainSetup, dataset: data.Dataset, ranks: Ranks | None = None) -> Evaluation:
    """Computes loss and metrics over a data set. Damaged samples are left out, or raise if `on_bad` is `stop`.

    Args:
        ranks: each rank evaluates its share, and all of them return the whole evaluation.

    Raises:
        DataError: more than `max_bad_share` of the samples are damaged. CommunicationError: a rank was lost.
    """
    rank, world = (0, 1) if ranks is None else (ranks.world.rank, ranks.world.size)
    # A user's task may have other outputs than one per class, even if the labels are classes.
    task, kind = setup.task, setup.target.kind
    has_classes = kind != "value" and task.outputs == len(setup.target.classes)
    positions: list[NDArray[np.int64]] = []
    kept: dict[str, list[torch.Tensor]] = {}
    for outputs, labels, batch in evaluate_batches(setup, dataset, rank, world):
        positions.append(np.stack([batch.positions, batch.served]))
        # Values stay on the device until the whole set is through.
        kept.setdefault("loss", []).append(task.loss(outputs, labels).float())
        for name, values in task.metrics(outputs, labels).items():
            kept.setdefault(name, []).append(values.float())
        for index, values in enumerate(collect_set_metrics(task.set_metrics, outputs, labels)):
            kept.setdefault(f"{COLLECTED}{index}", []).append(values)
        if has_classes:
            kept.setdefault(PREDICTED, []).append(outputs.argmax(dim=1) if kind == "class" else outputs > 0)
    arrays = {name: torch.cat(parts).cpu().numpy() for name, parts in kept.items()}
    if positions:
        arrays[POSITIONS] = np.concatenate(positions, axis=1).T
    if ranks is not None:
        # safetensors 0.8 writes the memory of an array whatever its strides, and positions are a transpose.
        own = save_arrays({name: np.ascontiguousarray(values) for name, values in arrays.items()})
        arrays = _merge_ranks(ranks.world.control.gather_bytes(own), list(arrays))
    samples = arrays.pop(POSITIONS)[:, 1]
    # Masked samples have been served as -1.
    counted = samples >= 0
    damaged = expect_few_damaged(samples, setup.recipe.data.max_bad_share, dataset)
    by_name = {name: values[counted] for name, values in arrays.items()}
    predicted = by_name.pop(PREDICTED, None)
    collected = [by_name.pop(f"{COLLECTED}{index}") for index in range(len(task.set_metrics))]
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in by_name.items()}
    return Evaluation(
        metrics=metrics | compute_set_metrics(task.set_metrics, collected),
        samples=samples[counted],
        damaged=damaged,
        losses=by_name["loss"],
        predicted=predicted if kind == "class" else None,
        counts=None if predicted is None else _count_classes(dataset, samples[counted], predicted),
    )


def expect_few_damaged(samples: NDArray[np.int64], limit: float, dataset: data.Dataset) -> int:
    """Returns the number of damaged samples in an evaluation.

    Args:
        samples: the samples served; -1 stands for a damaged one.
        limit: largest share of them, `data.max_bad_share`.

    Raises:
        DataError: there are more, or every sample is damaged.
    """
    damaged = int((samples < 0).sum())
    if damaged > limit * len(samples) or damaged == len(samples):
        what = f"{damaged} of {len(samples)} samples are damaged, more than data.max_bad_share {limit}"
        raise DataError(what, where=str(dataset.folder), fix="Run headway verify on it, and pack the data again.")
    return damaged


def open_evaluation_set(setup: TrainSetup, folder: str | None, where: Path) -> data.Dataset:
    """Opens the evaluation set of a run, or another packed folder; close it after use.

    Args:
        folder: the other folder; None: that of the recipe.
        where: the run folder, for messages.

    Raises:
        UsageError: there is nothing to evaluate on, or it has other labels.
    """
    base, uri = (setup.loaded.base, setup.recipe.data.eval) if folder is None else (Path(), folder)
    if uri is None:
        raise UsageError("this run has no evaluation set", where=str(where), fix="Name one as --data or data=.")
    dataset = open_dataset(base, uri)
    try:
        check_labels(setup.target, dataset)
    except BaseException:
        dataset.close()
        raise
    return dataset


def _count_classes(dataset: data.Dataset, samples: NDArray[np.int64], predicted: NDArray[Any]) -> ClassCounts:
    """Counts predictions by class. Args: predicted: class numbers [n], or several labels as bool [n, classes]."""
    labels = np.asarray(dataset.label[samples])
    if predicted.ndim == 2:
        return ClassCounts.from_labels(labels > 0.5, predicted)
    return ClassCounts.from_classes(labels, predicted, len(dataset.classes))


def _merge_ranks(shares: list[bytes], names: list[str]) -> dict[str, NDArray[Any]]:
    """Merges the arrays of all ranks in the order of the data set."""
    # In that order the means have the same bits as on a single rank.
    parts = [arrays for share in shares if (arrays := load_arrays(share))]
    order = np.argsort(np.concatenate([arrays[POSITIONS][:, 0] for arrays in parts]))
    return {name: np.concatenate([arrays[name] for arrays in parts])[order] for name in names or parts[0]}
