"""Checks of data, network and task against each other, so that a mistake shows before the first step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from headway.core.errors import DataError, HeadwayError, RecipeError, UsageError, UserCodeError, suggest_nearest
from headway.core.recipe import LoadedRecipe
from headway.data.data_recipe import SYNTHETIC, DataRecipe
from headway.data.dataset import Dataset
from headway.data.set_warnings import NO_EVALUATION, describe_shared_images, list_class_warnings
from headway.launch.hosts import check_batch_covers_ranks
from headway.model.fake_tensors import use_fake_tensors
from headway.parallel.parallel_recipe import AnyParallelRecipe, AsyncRecipe, ExpertsRecipe, SpatialRecipe
from headway.parallel.place import describe_counts
from headway.setup.metric_catalog import SHARES, TOP, collect_set_metrics, compute_set_metrics
from headway.setup.precision import Precision
from headway.setup.recipe import TrainRecipe
from headway.setup.run_log import NON_METRIC_KEYS
from headway.setup.task import TargetSpec, Task

SIZE_FIX = "Take a network for images of any size, set it to more, or remove data.progressive."

HALF_WEIGHTS_FIX = (
    "With half_weights all but norms is 16 bit wide: give tensors that the network makes by itself the type of its "
    "weights, or remove half_weights."
)


def check_cache_options(loaded: LoadedRecipe[TrainRecipe]) -> None:
    """Raises RecipeError if options of the disk cache are set and another cache is used."""
    # A value that `auto` resolved is not the user's, so the disk options of a resumed run are no mistake.
    data_recipe = loaded.recipe.data
    defaults = DataRecipe(train=SYNTHETIC)
    if data_recipe.cache in ("auto", "disk") or loaded.origins["data.cache"].startswith("auto: "):
        return
    for key in ("cache_folder", "cache_gb"):
        if getattr(data_recipe, key) != getattr(defaults, key):
            what = f"cache: {data_recipe.cache} does not use it"
            raise RecipeError(what, where=f"data.{key}", fix="Remove it, or set data.cache to disk or auto.")


def check_shifts(recipe: TrainRecipe, smallest_size: tuple[int, int], size: tuple[int, int]) -> None:
    """Raises RecipeError if images are too small for a shift in training or in evaluation.

    Args:
        smallest_size: (height, width) at the beginning of training.
        size: (height, width) at the end of training, and in evaluation.
    """
    side = min(smallest_size)
    translate = recipe.augment.translate
    if translate >= side:
        what = f"translate {translate} is no less than the image's side of {side}"
        if side < min(size):
            what += " at the beginning of training"
        raise RecipeError(what, where="augment.translate", fix=f"Set it to at most {side - 1}.")
    # Evaluation always has the full size, so its shift is compared with that.
    side = min(size)
    shift = recipe.evaluate.shift
    if shift >= side:
        what = f"a shift of {shift} is no less than the image's side of {side}"
        raise RecipeError(what, where="evaluate.shift", fix=f"Set it to at most {side - 1}.")


def check_views(recipe: TrainRecipe, task: Task) -> None:
    """Raises RecipeError if `evaluate.views_below` needs probabilities of classes, and the task has none."""
    if recipe.evaluate.views_below is not None and task.activation != "softmax":
        what = "views_below compares probabilities of classes, which this task does not have"
        fix = "Remove it; a task of your own that has them sets the attribute activation = 'softmax'."
        raise RecipeError(what, where="evaluate.views_below", fix=fix)


def list_set_warnings(train: Dataset | None, evaluation: Dataset | None) -> list[str]:
    """Returns sentences about data that can be trained on, and probably should not be as they are.

    Args:
        train: the training set; None if the data are synthetic.
        evaluation: the evaluation set; None if there is none.
    """
    if train is None:
        return []
    warnings = list_class_warnings(train.description.label_kind, train.classes)
    if evaluation is None:
        fix = "The last weights are kept. Set data.eval, or hold images out: headway pack SRC DST --split 0.1"
        return [*warnings, f"{NO_EVALUATION} {fix}"]
    return [*warnings, *filter(None, [describe_shared_images(train, evaluation)])]


def check_sets(train: Dataset | None, evaluation: Dataset | None) -> None:
    """Raises DataError if labels of a data set are damaged, or those of the evaluation set are of another kind."""
    if train is not None:
        check_label_range(train)
        if evaluation is not None:
            check_labels(TargetSpec.from_dataset(train), evaluation)


def check_labels(target: TargetSpec, dataset: Dataset) -> None:
    """Raises DataError if the labels of a data set are not those that a network was built for."""
    other_target = TargetSpec.from_dataset(dataset)
    check_label_range(dataset)
    # Numbers have no names to compare, but vectors may differ in length.
    if target.kind != other_target.kind or (target.kind == "value" and target.numbers != other_target.numbers):
        what = f"its labels ({other_target.kind}) are of another kind than those of the training data ({target.kind})"
        raise DataError(what, where=str(dataset.folder), fix="Pack both from one source.")
    if target.classes != other_target.classes:
        # The first five names are enough to see the mistake.
        extra = sorted(set(other_target.classes) - set(target.classes))
        missing = sorted(set(target.classes) - set(other_target.classes))
        parts = [
            f"{word} {', '.join(map(repr, names[:5]))}{' and more' if len(names) > 5 else ''}"
            for word, names in (("has also", extra), ("lacks", missing))
            if names
        ]
        what = f"its classes are unlike those of the training data: it {' and '.join(parts) or 'has another order'}"
        raise DataError(what, where=str(dataset.folder), fix="Pack both from one source: headway pack SRC DST.")


def check_label_range(dataset: Dataset) -> None:
    """Raises DataError if a label is not the number of a class.

    The loss would index beyond the network's outputs; on a GPU that ends the process.
    """
    labels = dataset.label
    classes = len(dataset.classes)
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
    """Runs two samples through network and task. Returns `loss` and the names of the task's metrics.

    The network runs in evaluation mode, and is in training mode afterwards.

    Args:
        images: float [2, C, H, W].
        labels: their labels.
        where: the recipe key that decides the size of these images, for the error. Empty: the network is at fault.

    Raises:
        RecipeError: outputs, loss or metrics have the wrong shape.
        UserCodeError: network or task failed.
    """
    part = "the network"
    shape = format_shape(images)
    # In evaluation mode and with forked generators, so that a check leaves no trace in the run.
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with precision.autocast():
                outputs = model(images)
            if not isinstance(outputs, torch.Tensor) or tuple(outputs.shape[1:]) != (task.outputs,):
                message = f"it gives {_describe_outputs(outputs)}, and the data need [{len(images)}, {task.outputs}]"
                if where:
                    raise RecipeError(f"{part} takes no images of {shape}: {message}", where=where, fix=SIZE_FIX)
                message += f" for {len(images)} images of {shape}"
                fix = f"Make the network give {task.outputs} outputs; a factory that takes num_classes gets it."
                if not isinstance(outputs, torch.Tensor):
                    fix = "Let it return the tensor of outputs alone, for example by a small module around it."
                raise RecipeError(message, where="model", fix=fix)
            # From here on a failure is one of the task.
            part = "the task"
            # As in training, where loss and metrics are computed in fp32.
            outputs = outputs.float()
            metrics = task.metrics(outputs, labels)
            if "loss" in metrics:
                raise RecipeError("a metric cannot be called 'loss'", where="task", fix="The loss is reported anyway.")
            values = {"loss": task.loss(outputs, labels), **metrics}
    except HeadwayError:
        raise
    except Exception as error:
        message = f"{part} failed on images of {shape} (channels x height x width): {type(error).__name__}: {error}"
        fix = SIZE_FIX if where else HALF_WEIGHTS_FIX if precision.is_narrow and part == "the network" else ""
        raise UserCodeError(message, where=where or part.removeprefix("the "), fix=fix) from error
    finally:
        model.train()
    # One number per sample: the Trainer weighs and sums them itself.
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != (len(images),):
            description = (
                f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            )
            message = f"{name} has the {description} for {len(images)} samples, and ({len(images)},) is needed"
            fix = "Return one number for each sample, for example with reduction='none'."
            raise RecipeError(message, where="task", fix=fix)
    return [*values, *(name for metric in task.set_metrics for name in metric.names)]


def check_loss_and_metrics(task: Task, labels: torch.Tensor, soft_classes: int | None) -> None:
    """Tries a loss and metrics that a recipe adds on random outputs for a batch of labels.

    Args:
        labels: labels of the data set.
        soft_classes: number of classes if training blends labels, as mixup does; else None.

    Raises:
        RecipeError: the losses have the wrong shape or no gradient, or a metric gives no numbers.
        UserCodeError: the user's code failed.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(len(labels), task.outputs, generator=generator).to(labels.device).requires_grad_()
    task.loss(outputs, labels)
    if soft_classes is not None:
        try:
            task.loss(outputs, torch.nn.functional.one_hot(labels, soft_classes).float())
        except HeadwayError as error:
            fix = f"{error.fix} With mixup or cutmix, labels are float [b, classes]: take them too.".strip()
            raise type(error)(error.what, where=error.where, fix=fix) from error.__cause__
    collected = collect_set_metrics(task.set_metrics, outputs.detach(), labels)
    compute_set_metrics(task.set_metrics, [kept.cpu().numpy() for kept in collected])


def _describe_outputs(outputs: object) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a tensor of the shape {list(outputs.shape)}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}" if outputs is not None else "nothing"


def check_network_shapes(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    task: Task,
    precision: Precision,
    where: str = "",
) -> list[str]:
    """Does the same as `check_network` on fake tensors, which takes no computation.

    A network or task that needs values fails on such tensors, so after a failure the check is repeated with values.
    """
    # Code that reads a value of a fake tensor may raise any exception.
    with suppress(Exception), use_fake_tensors(model, images, labels) as (fake_images, fake_labels):
        return check_network(model, fake_images, fake_labels, task, precision, where)
    return check_network(model, images, labels, task, precision, where)


def format_shape(images: torch.Tensor) -> str:
    """Returns channels, height and width of a batch as text, for example `3x32x32`."""
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
    """Raises RecipeError if `stop_at` or `early_stopping` names a metric that no evaluation reports, or if a goal of
    `stop_at` is above all that its metric can be."""
    # Otherwise the run would never reach its goal.
    named = [("stop_at", name) for name in recipe.stop_at or {}]
    if recipe.early_stopping is not None and recipe.early_stopping.metric != "auto":
        named.append(("early_stopping.metric", recipe.early_stopping.metric))
    for key, name in named:
        if name not in metrics:
            raise RecipeError(f"no evaluation reports {name!r}", where=key, fix=suggest_nearest(name, metrics))
    for name, goal in (recipe.stop_at or {}).items():
        if is_share(name, recipe) and goal > 1:
            what, fix = explain_share(name, goal)
            raise RecipeError(what, where=f"stop_at.{name}", fix=fix)


def is_share(name: str, recipe: TrainRecipe) -> bool:
    """Returns True if a metric is one of Headway's own that lie between 0 and 1."""
    # One of the user's may have any name.
    own = {metric.name for metric in recipe.task.metrics if metric.factory is not None}
    is_built_in = recipe.task.factory == "auto" or recipe.task.factory.startswith("headway.")
    return is_built_in and name not in own and (name in SHARES or TOP.fullmatch(name) is not None)


def explain_share(name: str, goal: float) -> tuple[str, str]:
    """Returns what is wrong with a goal above 1, and how to mend it."""
    fix = f"For {goal:g} % write {goal / 100:g}." if goal <= 100 else "Give a value from 0 to 1."
    return f"{name} lies between 0 and 1, so {goal:g} is never reached", fix


def check_ghost_groups(recipe: TrainRecipe, micro_batch: int) -> None:
    """Raises RecipeError if ghost batch norm needs larger groups than the micro-batch that fits into memory."""
    norm = recipe.model.batch_norm
    if norm is not None and norm.ghost is not None and norm.ghost > micro_batch:
        what = f"groups of {norm.ghost} samples are asked for, and {micro_batch} at once are all that fit into memory"
        raise RecipeError(what, where="model.batch_norm.ghost", fix=f"Set it to at most {micro_batch}.")


def describe_idle_ghost(recipe: TrainRecipe, ranks: int) -> str:
    """Returns a warning if ghost batch norm has no effect on so many ranks; else an empty text."""
    norm = recipe.model.batch_norm
    # Rounded up: the rank with the most samples counts.
    rank_batch = -(-recipe.largest_batch // ranks)
    if norm is None or norm.ghost is None or norm.ghost <= rank_batch:
        return ""
    what = f"Batch norm sees at most {rank_batch} samples at once on each of {ranks} processes"
    return f"{what}, so that model.batch_norm.ghost {norm.ghost} divides nothing. Set it to less, or remove it."


def check_batch_size(recipe: TrainRecipe, ranks: int) -> None:
    """Raises UsageError if a step has too few samples for so many processes."""
    if not recipe.parallel.takes_whole_batches:
        check_batch_covers_ranks(recipe.global_batch, ranks, recipe.parallel.sharing)


def check_places(parallel: AnyParallelRecipe, ranks: int) -> None:
    """Raises UsageError if there are too few processes, or no whole places of those that share an image
    or experts."""
    if isinstance(parallel, AsyncRecipe) and parallel.servers > ranks:
        what = f"{parallel.servers} servers need as many processes, and there {'is' if ranks == 1 else 'are'} {ranks}"
        fix = f"Set it to at most {ranks}, or start more processes with --procs."
        raise UsageError(what, where="parallel.servers", fix=fix)
    if not isinstance(parallel, SpatialRecipe | ExpertsRecipe) or ranks % parallel.ranks == 0:
        return
    shared = "each image" if isinstance(parallel, SpatialRecipe) else "the experts"
    what = f"{parallel.ranks} processes share {shared}, and there {'is' if ranks == 1 else 'are'} {ranks}"
    raise UsageError(what, where="parallel.ranks", fix=describe_counts(parallel.ranks))
