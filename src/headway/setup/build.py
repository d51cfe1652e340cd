"""Setup: everything a recipe names, opened, built and checked, before the first step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headway.comm.batch_norm import convert_sync
from headway.core.errors import DataError, HeadwayError, RecipeError, UserCodeError, suggest_nearest
from headway.core.malloc import keep_freed_memory
from headway.core.recipe import LoadedRecipe
from headway.core.user_code import import_user_object
from headway.core.world import World
from headway.data import dataset as data
from headway.data.augment import Augment
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.data_recipe import SYNTHETIC
from headway.data.resolution import describe_sizes, list_sizes
from headway.launch.ranks import Ranks
from headway.model.builder import build_model as build_model
from headway.model.builder import find_initialiser
from headway.model.fake_tensors import use_fake_tensors
from headway.model.freezing import FreezeSchedule
from headway.model.model_size import ModelSize, measure_model_size
from headway.observe.activations import ActivationPercentiles
from headway.optim import MasterWeights, Schedule, build_optimizer
from headway.optim.batch_scaling import require_number
from headway.setup import task as tasks
from headway.setup.compilation import called, checkpoint_activations_of
from headway.setup.inputs import Inputs, Rehearsal, Say, open_inputs
from headway.setup.micro_batch import largest_micro_batch
from headway.setup.precision import TYPES, Precision, emulated, fastest, here
from headway.setup.rates import check_length, length, oddities, resolve_rates, warnings
from headway.setup.recipe import NO_GRAPHS, TrainRecipe
from headway.setup.run_log import BESIDES_METRICS
from headway.setup.trial import attempt

LOG = logging.getLogger("headway.train")

ANY_SIZE = "Take a network for images of any size, set it to more, or remove data.progressive."

NARROW = (
    "With half_weights all but norms is 16 bit wide: give tensors that the network makes by itself the type of its "
    "weights, or remove half_weights."
)

LABELS = {"class": "classes", "multi": "sets of names", "value": "numbers"}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a run keeps of its training data, so that its network is built again without them."""

    target: tasks.Target
    samples: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of one run.

    Attributes:
        loaded: the recipe with every `auto` resolved.
        inputs: the data.
        epoch: positions of one epoch.
        plan: how many positions each step takes.
        steps: of the whole run.
        lr: the learning rate that the schedule gives the factor of.
        forward: the network as it is called: `model`, or its compiled form.
        counts: how large it is; None for the resolved recipe of a run.
        masters: what the optimizer steps, where the network is 16 bit wide.
    """

    loaded: LoadedRecipe[TrainRecipe]
    device: torch.device
    inputs: Inputs
    target: tasks.Target
    task: tasks.Task
    augment: Augment
    transform: Callable[..., Any] | None
    model: torch.nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    counts: ModelSize | None
    optimizer: torch.optim.Optimizer
    masters: MasterWeights | None
    freezing: FreezeSchedule
    schedule: Schedule
    precision: Precision
    epoch: int
    plan: BatchPlan
    steps: int
    lr: float

    @property
    def recipe(self) -> TrainRecipe:
        """The validated recipe."""
        return self.loaded.recipe

    @property
    def agreed(self) -> LoadedRecipe[TrainRecipe]:
        """The recipe with the precision that all ranks have."""
        precision = self.precision
        same = precision.name == self.recipe.precision
        return self.loaded if same else self.loaded.resolve("precision", precision.name, precision.reason)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The network's state as it is saved: fp32 masters in the place of 16-bit weights."""
        return self.model.state_dict() if self.masters is None else self.masters.state_dict()

    @property
    def train(self) -> data.Dataset | None:
        """Training set; None if the data are synthetic."""
        return self.inputs.train

    @property
    def eval(self) -> data.Dataset | None:
        """Evaluation set; None if there is none."""
        return self.inputs.eval

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.inputs.size

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return self.inputs.channels

    def batches(self, position: int, rank: int = 0, world: int = 1) -> Iterable[Batch]:
        """Training batches from a position on, without end: a rank's share of each."""
        return self.inputs.build_batches(self.recipe, self.plan, position, rank, world)

    def lr_at(self, position: int) -> float:
        """Learning rate of the step that begins at a position."""
        return self.lr * self.schedule(position)


def set_up(
    loaded: LoadedRecipe[TrainRecipe],
    *,
    say: Say,
    fresh: bool = True,
    known: Known | None = None,
    ranks: Ranks | None = None,
    rehearsal: Rehearsal | None = None,
) -> Setup:
    """Builds a run's parts, and resolves every `auto`.

    Args:
        say: told what the user should know once.
        fresh: begin with the recipe's weights and `init`; False where a checkpoint or trained weights will be loaded.
        known: open no data, take this of them; for the resolved recipe of a run.
        ranks: of several processes, each takes the device of its number on its host.
        rehearsal: nothing will be trained: see there. The network is tried without values where it lets itself, and is
            not counted; `micro_batch: auto` stays so.

    Raises:
        HeadwayError: whatever is wrong with recipe, data, network or task, in a sentence.
    """
    loaded = resolve_rates(loaded)
    recipe = loaded.recipe
    for text in warnings(recipe) if fresh else ():
        say(text)
    device = _device(recipe, rehearsed=rehearsal is not None)
    if recipe.compile == "graphs" and device.type == "cpu" and rehearsal is None:
        raise RecipeError(NO_GRAPHS, where="compile", fix="Set it to true or false.")
    # Trained weights may be used on a machine of another kind.
    if fresh and recipe.device == "auto" and rehearsal is None:
        if device.type == "cpu" and recipe.precision == "fp16":
            what = "fp16 on a CPU is emulated and slow, and PyTorch sees no GPU here"
            raise RecipeError(what, where="precision", fix="Set it to bf16, fp32 or auto.")
        reason = "PyTorch sees a GPU" if device.type == "cuda" else "PyTorch sees no GPU"
        loaded = loaded.resolve("device", device.type, reason)
    if device.type == "cpu" and rehearsal is None:
        keep_freed_memory()
    if ranks is not None and str(device) == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())  # a launcher may show one to each
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams, events and generators are those of the current device
    loaded, inputs = open_inputs(loaded, device, say=say, opened=known is None, rehearsal=rehearsal)
    try:
        return _built(loaded, device, inputs, say=say, fresh=fresh, known=known, ranks=ranks, rehearsal=rehearsal)
    except BaseException:
        inputs.close()
        raise


def _built(
    loaded: LoadedRecipe[TrainRecipe],
    device: torch.device,
    inputs: Inputs,
    *,
    say: Say,
    fresh: bool,
    known: Known | None,
    ranks: Ranks | None,
    rehearsal: Rehearsal | None,
) -> Setup:
    train_set, channels = inputs.train, inputs.channels
    if train_set is not None:
        check_range(train_set)
        if inputs.eval is not None:
            check_labels(_target_of(train_set), inputs.eval)
    recipe = loaded.recipe
    torch.manual_seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    random.seed(recipe.seed)
    target = _target(inputs) if known is None else known.target
    num_classes = len(target.classes) if target.kind == "class" else None
    done = recipe.augment.select_host_augmentations(device.type) if recipe.data.train != SYNTHETIC else frozenset()
    augment = Augment(
        recipe.augment,
        device,
        recipe.channels_last,
        num_classes=num_classes,
        done_by_loader=done,
        reuse_output=device.type == "cpu",
    )
    samples = inputs.samples if known is None else known.samples
    if target.kind == "class" and len(target.classes) < 2:
        what = f"the data has one class only ({', '.join(target.classes)}): there is nothing to tell apart"
        raise DataError(what, where=recipe.data.train, fix="Was a folder packed that lies one level too high?")
    task = tasks.build(recipe.task, target, loaded.base)
    if recipe.task.factory == "auto":
        name = f"{tasks.__name__}:{type(task).__name__}"
        loaded = loaded.resolve("task.factory", name, f"labels are {LABELS[target.kind]}")
    model_recipe = recipe.model if fresh else recipe.model.model_copy(update={"weights": None})
    model = build_model(model_recipe, num_outputs=task.outputs, in_channels=channels, base=loaded.base, say=say)
    model = model.to(device=device)
    ActivationPercentiles(model, recipe.observe.activations)  # refuses what does not fit, before there is a run
    if ranks is not None and recipe.comm.batch_norm == "sync":
        model = convert_sync(model, World.create_single(device).group(name="not met yet"))
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    checkpoint_activations_of(model, recipe.activation_checkpointing, say)
    if ranks is not None:
        ranks.noise_scale = recipe.observe.noise_scale
    if recipe.observe.noise_scale and recipe.precision == "fp16":
        what = "gradients that fp16 scales by another factor in each step do not tell the noise scale"
        raise RecipeError(what, where="observe.noise_scale", fix="Set precision to bf16 or fp32, or leave it out.")
    if ranks is not None and recipe.comm.on_rank_failure == "continue" and device.type == "cuda":
        what = "NCCL cannot go on without a lost process"
        raise RecipeError(what, where="comm.on_rank_failure", fix="Set it to restart or auto.")
    transform = None
    if recipe.transform is not None:
        transform = import_user_object(recipe.transform, base=loaded.base, what="transform")
        if not callable(transform):
            raise RecipeError(f"{recipe.transform!r} cannot be called", where="transform", fix="Name a function.")

    counts = masters = seconds = None
    if known is None:
        first = inputs.read_first_batch(loaded.recipe)
        images, labels = augment.normalise(first.images), first.labels.clone()
        initialise = find_initialiser(recipe.model, model, base=loaded.base) if fresh else None
        if initialise is not None:
            initialise(images)
    check = _check_network if rehearsal is None else _check_without_values
    if recipe.precision == "auto":
        if known is None and rehearsal is None:
            _check_network(model, images[:2], labels[:2], task, Precision("fp32", device))
            seconds = here(model, images, recipe, device, ranks)
        name, reason = fastest([seconds] if seconds else [])
        if rehearsal is not None:
            reason = "as a dry run measures nothing; the run chooses what is fastest on its device"
        say(f"Precision: {name}, {reason}.")
        loaded = loaded.resolve("precision", name, reason)
    elif fresh and rehearsal is None and (slower := emulated(recipe.precision, device)):
        say(slower)
    optimizer = build_optimizer(recipe.optimizer, model, samples / recipe.batch)
    if recipe.half_weights:
        masters = MasterWeights(model, optimizer, TYPES[recipe.precision])
    precision = Precision(loaded.recipe.precision, device, seconds=seconds, masters=masters)  # type: ignore[arg-type]
    if known is None:
        names = check(model, images[:2], labels[:2], task, precision)
        height, width = inputs.find_smallest_size(recipe)
        if (height, width) != inputs.size:
            layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
            small = images[:2, :, :height, :width].contiguous(memory_format=layout)
            check(model, small, labels[:2], task, precision, where="data.progressive.start")
        if rehearsal is None:
            counts = _counted(model, images[:1], precision)
            of_image = "" if counts.multiply_adds is None else f" an image of {_shape(images)}"
            say(f"Network: {counts.describe()}{of_image}.")
        _check_metrics(names, task)
        _check_stop(recipe, names)
        if recipe.micro_batch == "auto" and rehearsal is None:
            tried = attempt(model, images, precision.autocast if ranks is None else precision.widest)
            micro, reason = largest_micro_batch(recipe.largest_batch, device, tried)
            _check_ghost(recipe, micro)
            loaded = loaded.resolve("micro_batch", micro, reason)

    plan, steps = length(recipe, samples)
    check_length(recipe, steps)
    for text in (*oddities(recipe, samples, plan, steps), *_grows(recipe, inputs, steps, plan)) if fresh else ():
        say(text)
    if fresh and ranks is not None:
        _say_ghost(loaded.recipe, ranks.launched_size, say)
    return Setup(
        loaded=loaded,
        device=device,
        inputs=inputs,
        target=target,
        task=task,
        augment=augment,
        transform=transform,
        model=model,
        forward=called(model, recipe.compile, say),
        counts=counts,
        optimizer=optimizer,
        masters=masters,
        freezing=FreezeSchedule(model, recipe.model.freeze_after, samples),
        schedule=Schedule(recipe.schedule, total=plan.find_position(steps), epoch=samples),
        precision=precision,
        epoch=samples,
        plan=plan,
        steps=steps,
        lr=require_number(recipe.optimizer.lr, "optimizer.lr"),
    )


def _grows(recipe: TrainRecipe, inputs: Inputs, steps: int, plan: BatchPlan) -> list[str]:
    """Which sizes progressive resolution will meet."""
    if (progressive := recipe.data.progressive) is None:
        return []
    return [describe_sizes(list_sizes(progressive, inputs.size, plan.find_position(steps) / inputs.samples))]


def _device(recipe: TrainRecipe, *, rehearsed: bool) -> torch.device:
    """Where it trains; or, where it will not, where it is built."""
    name = recipe.device
    if rehearsed and not torch.cuda.is_available():
        name = "cpu" if name.startswith("cuda") else name
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"there is no device {name!r}", where="device", fix="Set cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError("PyTorch sees no GPU here", where="device", fix="Set device to cpu or auto.")
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"training on {device.type} is not supported", where="device", fix="Set cpu or cuda.")
    return device


def check_labels(mine: tasks.Target, held_out: data.Dataset) -> None:
    """Raises DataError where a data set's labels are not what a network is made for."""
    theirs = _target_of(held_out)
    check_range(held_out)
    if mine.kind != theirs.kind or (mine.kind == "value" and mine.numbers != theirs.numbers):
        what = f"its labels ({theirs.kind}) are of another kind than those of the training data ({mine.kind})"
        raise DataError(what, where=str(held_out.folder), fix="Pack both from one source.")
    if mine.classes != theirs.classes:
        extra = sorted(set(theirs.classes) - set(mine.classes))
        lacking = sorted(set(mine.classes) - set(theirs.classes))
        parts = [
            f"{word} {', '.join(map(repr, names[:5]))}{' and more' if len(names) > 5 else ''}"
            for word, names in (("has also", extra), ("lacks", lacking))
            if names
        ]
        what = f"its classes are unlike those of the training data: it {' and '.join(parts) or 'has another order'}"
        raise DataError(what, where=str(held_out.folder), fix="Pack both from one source: headway pack SRC DST.")


def check_range(dataset: data.Dataset) -> None:
    """Raises DataError where a label is none of the classes: a loss would read beyond the network's outputs, which a
    GPU does not survive."""
    found, classes = dataset.label, len(dataset.classes)
    if dataset.description.label_kind == "class" and len(found) and (found.min() < 0 or found.max() >= classes):
        sample = int(np.flatnonzero((found < 0) | (found >= classes))[0])
        what = (
            f"sample {sample} ({dataset.name(sample)}) has the label {found[sample]}, and there are {classes} classes"
        )
        raise DataError(what, where=str(dataset.folder), fix="Pack the data again.")


def _target(inputs: Inputs) -> tasks.Target:
    if inputs.train is None:
        assert inputs.synthetic is not None
        return tasks.Target(kind="class", classes=tuple(map(str, range(inputs.synthetic.classes))), numbers=1)
    return _target_of(inputs.train)


def _target_of(dataset: data.Dataset) -> tasks.Target:
    shape, description = dataset.label.shape, dataset.description
    numbers = int(shape[1]) if len(shape) > 1 else 1
    return tasks.Target(kind=description.label_kind, classes=description.classes, numbers=numbers)


def _check_network(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    task: tasks.Task,
    precision: Precision,
    where: str = "",
) -> list[str]:
    """Puts two samples through network and task; returns the names of the task's metrics.

    Args:
        where: the recipe's key that makes the images be of this size; empty: the network is what is wrong.
    """
    what, shape = "the network", _shape(images)
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with precision.autocast():
                outputs = model(images)
            gave = tuple(outputs.shape[1:]) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            if gave != (task.outputs,):
                said = f"it gives {gave} for a sample, the data needs ({task.outputs},)"
                if where:
                    raise RecipeError(f"{what} takes no images of {shape}: {said}", where=where, fix=ANY_SIZE)
                fix = f"Make the network give {task.outputs} outputs; a factory that takes num_classes gets it."
                raise RecipeError(said, where="model", fix=fix)
            what = "the task"
            outputs = outputs.float()
            metrics = task.metrics(outputs, labels)
            if "loss" in metrics:
                raise RecipeError("a metric cannot be called 'loss'", where="task", fix="The loss is reported anyway.")
            found = {"loss": task.loss(outputs, labels), **metrics}
    except HeadwayError:
        raise
    except Exception as error:
        said = f"{what} failed on images of {shape} (channels x height x width): {type(error).__name__}: {error}"
        fix = ANY_SIZE if where else NARROW if precision.narrow and what == "the network" else ""
        raise UserCodeError(said, where=where or what.removeprefix("the "), fix=fix) from error
    finally:
        model.train()
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or value.shape != (len(images),):
            form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            said = f"{name} has the {form} for {len(images)} samples"
            raise RecipeError(said, where="task", fix="A task gives one number a sample.")
    return list(found)


def _check_without_values(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    task: tasks.Task,
    precision: Precision,
    where: str = "",
) -> list[str]:
    """The same, without a computation where network and task do not ask for values. Whatever fails is tried again with
    them, and says what is wrong."""
    with suppress(Exception), use_fake_tensors(model, images, labels) as (some_images, some_labels):
        return _check_network(model, some_images, some_labels, task, precision, where)
    return _check_network(model, images, labels, task, precision, where)


def _counted(model: torch.nn.Module, images: torch.Tensor, precision: Precision) -> ModelSize:
    try:
        with torch.random.fork_rng(devices=[]), precision.autocast():
            return measure_model_size(model, images)
    except Exception as error:  # of torch's counter: the network itself was tried before, and can be trained
        LOG.debug("multiply-adds were not counted: %s", error)
        return ModelSize(sum(value.numel() for value in model.parameters()), None)


def _shape(images: torch.Tensor) -> str:
    """`3x32x32`: channels, height and width."""
    return "x".join(str(side) for side in images.shape[1:])


def _check_metrics(names: list[str], task: tasks.Task) -> None:
    for name in names[1:]:
        if name in BESIDES_METRICS or not name.isidentifier():
            fix = "Rename it: letters, digits and _, and none of the names that a record has already."
            raise RecipeError(f"a metric cannot be called {name!r}", where="task", fix=fix)
    if task.primary not in names:
        said = f"its primary metric {task.primary!r} is not reported"
        raise RecipeError(said, where="task", fix=suggest_nearest(task.primary, names))


def _check_ghost(recipe: TrainRecipe, micro: int) -> None:
    norm = recipe.model.batch_norm
    if norm is not None and norm.ghost is not None and norm.ghost > micro:
        what = f"groups of {norm.ghost} samples are asked for, and {micro} at once are all that fit into memory"
        raise RecipeError(what, where="model.batch_norm.ghost", fix=f"Set it to at most {micro}.")


def _say_ghost(recipe: TrainRecipe, ranks: int, say: Say) -> None:
    norm, share = recipe.model.batch_norm, -(-recipe.largest_batch // ranks)
    if norm is not None and norm.ghost is not None and norm.ghost > share:
        said = f"Batch norm sees at most {share} samples at once on each of {ranks} processes, so that "
        say(f"{said}model.batch_norm.ghost {norm.ghost} divides nothing. Set it to less, or remove it.")


def _check_stop(recipe: TrainRecipe, metrics: list[str]) -> None:
    for name in recipe.stop_at or {}:
        if name not in metrics:
            raise RecipeError(f"no evaluation reports {name!r}", where="stop_at", fix=suggest_nearest(name, metrics))
