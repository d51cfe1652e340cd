"""Checks of data, network and task against each other, so that a mistake shows before the first step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from headway.core.errors import DataError, HeadwayError, RecipeError, UserCodeError, suggest_nearest
from headway.data.dataset import Dataset
from headway.model.fake_tensors import use_fake_tensors
from headway.setup.precision import Precision
from headway.setup.recipe import TrainRecipe
from headway.setup.run_log import NON_METRIC_KEYS
from headway.setup.task import TargetSpec, Task

ANY_SIZE = "Take a network for images of any size, set it to more, or remove data.progressive."

NARROW = (
    "With half_weights all but norms is 16 bit wide: give tensors that the network makes by itself the type of its "
    "weights, or remove half_weights."
)


def check_labels(target: TargetSpec, held_out: Dataset) -> None:
    """Raises DataError if the labels of a data set are not those that a network is made for."""
    theirs = TargetSpec.from_dataset(held_out)
    check_label_range(held_out)
    if target.kind != theirs.kind or (target.kind == "value" and target.numbers != theirs.numbers):
        what = f"its labels ({theirs.kind}) are of another kind than those of the training data ({target.kind})"
        raise DataError(what, where=str(held_out.folder), fix="Pack both from one source.")
    if target.classes != theirs.classes:
        # The first five names are enough to see the mistake.
        extra = sorted(set(theirs.classes) - set(target.classes))
        lacking = sorted(set(target.classes) - set(theirs.classes))
        parts = [
            f"{word} {', '.join(map(repr, names[:5]))}{' and more' if len(names) > 5 else ''}"
            for word, names in (("has also", extra), ("lacks", lacking))
            if names
        ]
        what = f"its classes are unlike those of the training data: it {' and '.join(parts) or 'has another order'}"
        raise DataError(what, where=str(held_out.folder), fix="Pack both from one source: headway pack SRC DST.")


def check_label_range(dataset: Dataset) -> None:
    """Raises DataError if a label is not the number of a class.

    The loss would index beyond the network's outputs; on a GPU that ends the process.
    """
    labels, classes = dataset.label, len(dataset.classes)
    if dataset.description.label_kind == "class" and len(labels) and (labels.min() < 0 or labels.max() >= classes):
        sample = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        what = f"sample {sample} ({dataset.name(sample)}) has the label {labels[sample]}"
        raise DataError(
            f"{what}, and there are {classes} classes", where=str(dataset.folder), fix="Pack the data again."
        )


def check_network(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    task: Task,
    precision: Precision,
    where: str = "",
) -> list[str]:
    """Puts two samples through network and task; returns `loss` and the names of the task's metrics.

    Args:
        where: the recipe key that decides the size of these images, for the error. Empty: the network is at fault.

    Raises:
        RecipeError: outputs, loss or metrics have the wrong shape. UserCodeError: network or task failed.
    """
    what, shape = "the network", format_shape(images)
    # In evaluation mode and with forked generators, so that a check leaves no trace in the run.
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with precision.autocast():
                outputs = model(images)
            gave = tuple(outputs.shape[1:]) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            if gave != (task.outputs,):
                wrong = f"it gives {gave} for a sample, the data needs ({task.outputs},)"
                if where:
                    raise RecipeError(f"{what} takes no images of {shape}: {wrong}", where=where, fix=ANY_SIZE)
                fix = f"Make the network give {task.outputs} outputs; a factory that takes num_classes gets it."
                raise RecipeError(wrong, where="model", fix=fix)
            # From here on a failure is one of the task.
            what = "the task"
            outputs = outputs.float()
            metrics = task.metrics(outputs, labels)
            if "loss" in metrics:
                raise RecipeError("a metric cannot be called 'loss'", where="task", fix="The loss is reported anyway.")
            outputs_by_name = {"loss": task.loss(outputs, labels), **metrics}
    except HeadwayError:
        raise
    except Exception as error:
        wrong = f"{what} failed on images of {shape} (channels x height x width): {type(error).__name__}: {error}"
        fix = ANY_SIZE if where else NARROW if precision.is_narrow and what == "the network" else ""
        raise UserCodeError(wrong, where=where or what.removeprefix("the "), fix=fix) from error
    finally:
        model.train()
    # One number per sample: the Trainer weighs and sums them itself.
    for name, value in outputs_by_name.items():
        if not isinstance(value, torch.Tensor) or value.shape != (len(images),):
            form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            wrong = f"{name} has the {form} for {len(images)} samples"
            raise RecipeError(wrong, where="task", fix="A task gives one number a sample.")
    return list(outputs_by_name)


def check_network_shapes(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    task: Task,
    precision: Precision,
    where: str = "",
) -> list[str]:
    """Does the same as `check_network` on tensors without values, which takes no computation.

    A network or task that needs values fails on such tensors, so every failure is checked again with values.
    """
    with suppress(Exception), use_fake_tensors(model, images, labels) as (some_images, some_labels):
        return check_network(model, some_images, some_labels, task, precision, where)
    return check_network(model, images, labels, task, precision, where)


def format_shape(images: torch.Tensor) -> str:
    """Formats channels, height and width, for example `3x32x32`."""
    return "x".join(str(side) for side in images.shape[1:])


def check_metrics(names: list[str], task: Task) -> None:
    """Raises RecipeError if a metric has a forbidden name, or the primary metric is missing."""
    # The first name is `loss`.
    for name in names[1:]:
        if name in NON_METRIC_KEYS or not name.isidentifier():
            fix = "Rename it: letters, digits and _, and none of the names that a record has already."
            raise RecipeError(f"a metric cannot be called {name!r}", where="task", fix=fix)
    if task.primary not in names:
        what = f"its primary metric {task.primary!r} is not reported"
        raise RecipeError(what, where="task", fix=suggest_nearest(task.primary, names))


def check_stop_at(recipe: TrainRecipe, metrics: list[str]) -> None:
    """Raises RecipeError if `stop_at` names a metric that no evaluation reports."""
    for name in recipe.stop_at or {}:
        if name not in metrics:
            raise RecipeError(f"no evaluation reports {name!r}", where="stop_at", fix=suggest_nearest(name, metrics))


def check_ghost_groups(recipe: TrainRecipe, micro_batch: int) -> None:
    """Raises RecipeError if ghost batch norm needs larger groups than the micro-batch that fits into memory."""
    norm = recipe.model.batch_norm
    if norm is not None and norm.ghost is not None and norm.ghost > micro_batch:
        what = f"groups of {norm.ghost} samples are asked for, and {micro_batch} at once are all that fit into memory"
        raise RecipeError(what, where="model.batch_norm.ghost", fix=f"Set it to at most {micro_batch}.")


def describe_idle_ghost(recipe: TrainRecipe, ranks: int) -> str:
    """Returns a warning if ghost batch norm has no effect on so many ranks; else an empty text."""
    # Rounded up: the largest share of any rank counts.
    norm, share = recipe.model.batch_norm, -(-recipe.largest_batch // ranks)
    if norm is None or norm.ghost is None or norm.ghost <= share:
        return ""
    what = f"Batch norm sees at most {share} samples at once on each of {ranks} processes"
    return f"{what}, so that model.batch_norm.ghost {norm.ghost} divides nothing. Set it to less, or remove it."
