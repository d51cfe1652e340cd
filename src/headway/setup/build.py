"""Setup: everything a recipe names, opened, built and checked, before the first step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch

from headway.comm.batch_norm import convert_sync
from headway.core.errors import DataError, RecipeError
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
from headway.model.builder import build_model, find_initialiser
from headway.model.freezing import FreezeSchedule
from headway.model.model_size import ModelSize, measure_model_size
from headway.observe.activations import ActivationPercentiles
from headway.optim import MasterWeights, Schedule, build_optimizer
from headway.optim.batch_scaling import require_number
from headway.optim.layer_decay import describe_layer_rates
from headway.setup import checks
from headway.setup.compilation import apply_activation_checkpointing, compile_model
from headway.setup.follow_weights import follow_weights
from headway.setup.inputs import Inputs, Rehearsal, Say, open_inputs
from headway.setup.micro_batch import largest_micro_batch
from headway.setup.precision import (
    TYPES,
    Precision,
    PrecisionName,
    choose_fastest,
    describe_emulation,
    measure_precisions,
)
from headway.setup.rates import check_length, find_batch_warnings, find_oddities, plan_steps, resolve_rates
from headway.setup.recipe import NO_GRAPHS, TrainRecipe
from headway.setup.task import LABELS, TargetSpec, Task, build_task
from headway.setup.trial import build_attempt

LOG = logging.getLogger("headway.train")


@dataclass(frozen=True, kw_only=True)
class RecordedData:
    """Facts about the training data in a run folder, with which the network is built again without the data."""

    target: TargetSpec
    samples: int


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """The parts of one run.

    Attributes:
        loaded: the recipe with every `auto` resolved.
        epoch: number of samples in an epoch.
        plan: the number of samples in each step. steps: number of steps of the run.
        lr: the learning rate that the schedule multiplies.
        forward: `model`, or its compiled form.
        counts: parameters and multiply-adds of the network; None for the resolved recipe of a run.
        masters: fp32 weights that the optimizer steps, if the network has 16-bit weights.
    """

    loaded: LoadedRecipe[TrainRecipe]
    device: torch.device
    inputs: Inputs
    target: TargetSpec
    task: Task
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
    def agreed_recipe(self) -> LoadedRecipe[TrainRecipe]:
        """The recipe with the precision that all ranks have."""
        precision = self.precision
        same = precision.name == self.recipe.precision
        return self.loaded if same else self.loaded.resolve("precision", precision.name, precision.reason)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the network's state as it is saved: fp32 masters in place of 16-bit weights."""
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
        """Returns endless training batches from a position on, or a rank's share of each."""
        return self.inputs.build_batches(self.recipe, self.plan, position, rank, world)

    def lr_at(self, position: int) -> float:
        """Returns the learning rate of the step that begins at a position."""
        return self.lr * self.schedule(position)


def build_setup(
    loaded: LoadedRecipe[TrainRecipe],
    *,
    say: Say,
    fresh: bool = True,
    recorded: RecordedData | None = None,
    ranks: Ranks | None = None,
    rehearsal: Rehearsal | None = None,
) -> TrainSetup:
    """Builds a run's parts, and resolves every `auto`.

    Args:
        say: called with each sentence that the user should read once.
        fresh: start from the recipe's weights and `init`. False if a checkpoint or trained weights will be loaded.
        recorded: facts about the training data, which are then not opened; for the resolved recipe of a run.
        ranks: the ranks of this run; each takes the device of its number on its host.
        rehearsal: set for a dry run. The network is checked without values if it allows that, and is not counted;
            `micro_batch: auto` stays unresolved.

    Raises:
        HeadwayError: something is wrong with recipe, data, network or task.
    """
    return _SetupBuilder(loaded, say, fresh, recorded, ranks, rehearsal).build()


def _resolve_device(recipe: TrainRecipe, *, rehearsed: bool) -> torch.device:
    """Returns the device that the recipe names. Args: rehearsed: in a dry run a CPU may stand in for a GPU."""
    # A dry run may be made on a machine without the GPU that the recipe names.
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


@final
class _SetupBuilder:
    """Builds the parts of a setup, one method each, in the order of `build`.

    The order matters: it decides which of several mistakes is reported, and the state of the random generators.
    """

    def __init__(
        self,
        loaded: LoadedRecipe[TrainRecipe],
        say: Say,
        fresh: bool,
        recorded: RecordedData | None,
        ranks: Ranks | None,
        rehearsal: Rehearsal | None,
    ) -> None:
        # The weights come first: whether the recipe sets a key is known only before other keys are resolved. A resumed
        # run has their values in its recipe.
        if fresh and recorded is None:
            loaded = follow_weights(loaded, say=say)
        # Then rates: the batch decides epochs and learning rate, on which later steps rely.
        self.loaded = resolve_rates(loaded)
        self.say, self.fresh, self.recorded, self.ranks, self.rehearsal = say, fresh, recorded, ranks, rehearsal
        for text in find_batch_warnings(self.loaded.recipe) if fresh else ():
            say(text)
        self.trains = rehearsal is None
        self.device = self._prepare_device()
        self.loaded, self.inputs = open_inputs(
            self.loaded, self.device, say=say, opened=recorded is None, rehearsal=rehearsal
        )
        # `loaded` changes as each further `auto` is resolved; `recipe` keeps them as they were given.
        self.recipe = self.loaded.recipe
        self.samples = self.inputs.samples if recorded is None else recorded.samples

    def build(self) -> TrainSetup:
        """Builds the setup, or closes the data and raises."""
        try:
            return self._build()
        except BaseException:
            self.inputs.close()
            raise

    def _build(self) -> TrainSetup:
        recipe = self.recipe
        self._check_data()
        self._seed_generators()
        target = self._read_target()
        augment = self._build_augment(target)
        task = self._build_task(target)
        model = self._build_model(task)
        self._check_combinations()
        transform = self._import_transform()
        # Without data there is nothing to try the network on: its recipe was resolved by an earlier run.
        first = self._load_first_batch(augment) if self.recorded is None else None
        if first is not None and self.fresh:
            initialise = find_initialiser(recipe.model, model, base=self.loaded.base)
            if initialise is not None:
                initialise(first.images)
        seconds = self._resolve_precision(model, task, first)
        optimizer = build_optimizer(recipe.optimizer, model, self.samples / recipe.batch)
        if self.fresh and (rates := describe_layer_rates(model, recipe.optimizer.layer_decay)):
            self.say(rates)
        masters = MasterWeights(model, optimizer, TYPES[recipe.precision]) if recipe.half_weights else None
        name: Any = self.loaded.recipe.precision
        precision = Precision(name, self.device, seconds=seconds, masters=masters)
        counts = None
        if first is not None:
            counts = self._try_network(model, task, precision, first)
            self._resolve_micro_batch(model, precision, first)
        plan, steps = self._plan_steps()
        return TrainSetup(
            loaded=self.loaded,
            device=self.device,
            inputs=self.inputs,
            target=target,
            task=task,
            augment=augment,
            transform=transform,
            model=model,
            forward=compile_model(model, recipe.compile, self.say),
            counts=counts,
            optimizer=optimizer,
            masters=masters,
            freezing=FreezeSchedule(model, recipe.model.freeze_after, self.samples),
            schedule=Schedule(recipe.schedule, total=plan.find_position(steps), epoch=self.samples),
            precision=precision,
            epoch=self.samples,
            plan=plan,
            steps=steps,
            lr=require_number(recipe.optimizer.lr, "optimizer.lr"),
        )

    def _prepare_device(self) -> torch.device:
        """Resolves `device`, makes it the current one and returns it."""
        recipe, ranks = self.loaded.recipe, self.ranks
        device = _resolve_device(recipe, rehearsed=not self.trains)
        if recipe.compile == "graphs" and device.type == "cpu" and self.trains:
            raise RecipeError(NO_GRAPHS, where="compile", fix="Set it to true or false.")
        # Trained weights may be used on a machine of another kind, so only a fresh run is bound to its device.
        if self.fresh and recipe.device == "auto" and self.trains:
            if device.type == "cpu" and recipe.precision == "fp16":
                what = "fp16 on a CPU is emulated and slow, and PyTorch sees no GPU here"
                raise RecipeError(what, where="precision", fix="Set it to bf16, fp32 or auto.")
            reason = "PyTorch sees a GPU" if device.type == "cuda" else "PyTorch sees no GPU"
            self._resolve("device", device.type, reason)
        if device.type == "cpu" and self.trains:
            keep_freed_memory()
        # A launcher may show each process all GPUs of the host, or only its own.
        if ranks is not None and str(device) == "cuda":
            device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        # Streams, events and generators are created on the current device.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _check_data(self) -> None:
        train, held_out = self.inputs.train, self.inputs.eval
        if train is not None:
            checks.check_label_range(train)
            if held_out is not None:
                checks.check_labels(TargetSpec.from_dataset(train), held_out)

    def _seed_generators(self) -> None:
        seed = self.recipe.seed
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def _read_target(self) -> TargetSpec:
        """Returns the kind of labels: as recorded, of the training set, or of synthetic data."""
        inputs = self.inputs
        if self.recorded is not None:
            return self.recorded.target
        if inputs.train is not None:
            return TargetSpec.from_dataset(inputs.train)
        assert inputs.synthetic is not None
        return TargetSpec(kind="class", classes=tuple(map(str, range(inputs.synthetic.classes))), numbers=1)

    def _build_augment(self, target: TargetSpec) -> Augment:
        recipe, device = self.recipe, self.device
        return Augment(
            recipe.augment,
            device,
            recipe.channels_last,
            num_classes=len(target.classes) if target.kind == "class" else None,
            # Augmentations that the loader does on the host are not done again on the device.
            done_by_loader=recipe.augment.select_host_augmentations(device.type)
            if recipe.data.train != SYNTHETIC
            else frozenset(),
            reuse_output=device.type == "cpu",
        )

    def _build_task(self, target: TargetSpec) -> Task:
        if target.kind == "class" and len(target.classes) < 2:
            what = f"the data has one class only ({', '.join(target.classes)}): there is nothing to tell apart"
            fix = "Was a folder packed that lies one level too high?"
            raise DataError(what, where=self.recipe.data.train, fix=fix)
        task = build_task(self.recipe.task, target, self.loaded.base)
        if self.recipe.task.factory == "auto":
            # Recorded by import path, so that the run is rebuilt with this task whatever its labels are then.
            name = f"{Task.__module__}:{type(task).__name__}"
            self._resolve("task.factory", name, f"labels are {LABELS[target.kind]}")
        return task

    def _build_model(self, task: Task) -> torch.nn.Module:
        recipe, ranks, say = self.recipe, self.ranks, self.say
        model = build_model(
            recipe.model,
            num_outputs=task.outputs,
            in_channels=self.inputs.channels,
            base=self.loaded.base,
            say=say,
            loads_weights=self.fresh,
        )
        model = model.to(device=self.device)
        # Built only to refuse patterns that match no layer, before there is a run folder.
        ActivationPercentiles(model, recipe.observe.activations)
        # The ranks have not met yet, so the layers get a group of this process alone; `Ranks.meet` gives them its own.
        if ranks is not None and recipe.comm.batch_norm == "sync":
            model = convert_sync(model, World.create_single(self.device).create_group(name="not met yet"))
        if recipe.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        apply_activation_checkpointing(model, recipe.activation_checkpointing, say)
        return model

    def _check_combinations(self) -> None:
        """Raises RecipeError for keys that cannot work with this precision, or on this device."""
        recipe, ranks = self.recipe, self.ranks
        if ranks is not None:
            # The ranks measure the noise scale in their all-reduce, so they must know before they meet.
            ranks.noise_scale = recipe.observe.noise_scale
        if recipe.observe.noise_scale and recipe.precision == "fp16":
            what = "gradients in fp16 do not tell the noise scale, as the loss scale changes between steps"
            raise RecipeError(what, where="observe.noise_scale", fix="Set precision to bf16 or fp32, or leave it out.")
        if ranks is not None and recipe.comm.on_rank_failure == "continue" and self.device.type == "cuda":
            what = "NCCL cannot continue after a process is lost"
            raise RecipeError(what, where="comm.on_rank_failure", fix="Set it to restart or auto.")

    def _import_transform(self) -> Callable[..., Any] | None:
        name = self.recipe.transform
        if name is None:
            return None
        transform: Callable[..., Any] = import_user_object(name, base=self.loaded.base, what="transform")
        if not callable(transform):
            raise RecipeError(f"{name!r} cannot be called", where="transform", fix="Name a function.")
        return transform

    def _load_first_batch(self, augment: Augment) -> _FirstBatch:
        batch = self.inputs.read_first_batch(self.loaded.recipe)
        # A copy, because synthetic batches are slices of one tensor.
        return _FirstBatch(augment.normalise(batch.images), batch.labels.clone())

    def _resolve_precision(
        self, model: torch.nn.Module, task: Task, first: _FirstBatch | None
    ) -> dict[PrecisionName, float] | None:
        """Resolves `precision: auto`; returns the seconds that it measured."""
        recipe, device = self.recipe, self.device
        seconds = None
        if recipe.precision == "auto":
            if first is not None and self.trains:
                # A network that fails in fp32 too must be reported as such, and not as slow.
                checks.check_network(model, *first.take(2), task, Precision("fp32", device))
                seconds = measure_precisions(model, first.images, recipe, device, self.ranks)
            name, reason = choose_fastest([seconds] if seconds else [])
            if not self.trains:
                reason = "as a dry run measures nothing; the run chooses what is fastest on its device"
            self.say(f"Precision: {name}, {reason}.")
            self._resolve("precision", name, reason)
        elif self.fresh and self.trains and (slower := describe_emulation(recipe.precision, device)):
            self.say(slower)
        return seconds

    def _try_network(
        self, model: torch.nn.Module, task: Task, precision: Precision, first: _FirstBatch
    ) -> ModelSize | None:
        """Puts two samples through network and task, in each image size that differs; counts the network."""
        recipe, inputs = self.recipe, self.inputs
        check = checks.check_network if self.trains else checks.check_network_shapes
        images, labels = first.take(2)
        names = check(model, images, labels, task, precision)
        height, width = inputs.find_smallest_size(recipe)
        # Progressive resolution starts with smaller images, on which the network may fail.
        if (height, width) != inputs.size:
            layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
            small = images[:, :, :height, :width].contiguous(memory_format=layout)
            check(model, small, labels, task, precision, where="data.progressive.start")
        counts = None
        if self.trains:
            counts = _count_network(model, first.images[:1], precision)
            size = "" if counts.multiply_adds is None else f" an image of {checks.format_shape(images)}"
            self.say(f"Network: {counts.describe()}{size}.")
        checks.check_metrics(names, task)
        checks.check_stop_at(recipe, names)
        return counts

    def _resolve_micro_batch(self, model: torch.nn.Module, precision: Precision, first: _FirstBatch) -> None:
        recipe = self.recipe
        if recipe.micro_batch != "auto" or not self.trains:
            return
        # The ranks agree on a precision later, and it may be a wider one than is fastest here.
        context = precision.autocast if self.ranks is None else precision.autocast_widest
        attempt = build_attempt(model, first.images, context)
        micro_batch, reason = largest_micro_batch(recipe.largest_batch, self.device, attempt)
        checks.check_ghost_groups(recipe, micro_batch)
        self._resolve("micro_batch", micro_batch, reason)

    def _plan_steps(self) -> tuple[BatchPlan, int]:
        """Returns the sizes of the steps and their number; tells the user of anything unusual about them."""
        recipe, ranks = self.recipe, self.ranks
        plan, steps = plan_steps(recipe, self.samples)
        check_length(recipe, steps)
        if self.fresh:
            messages = find_oddities(recipe, self.samples, plan, steps)
            if (progressive := recipe.data.progressive) is not None:
                epochs = plan.find_position(steps) / self.inputs.samples
                messages.append(describe_sizes(list_sizes(progressive, self.inputs.size, epochs)))
            if ranks is not None and (idle := checks.describe_idle_ghost(self.loaded.recipe, ranks.launched_size)):
                messages.append(idle)
            for text in messages:
                self.say(text)
        return plan, steps

    def _resolve(self, key: str, value: Any, reason: str) -> None:
        self.loaded = self.loaded.resolve(key, value, reason)


class _FirstBatch(NamedTuple):
    """Normalised images and their labels, for `init` and the checks of the network."""

    images: torch.Tensor
    labels: torch.Tensor

    def take(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[:samples], self.labels[:samples]


def _count_network(model: torch.nn.Module, images: torch.Tensor, precision: Precision) -> ModelSize:
    try:
        # Dropout draws numbers here, which the run must not miss.
        with torch.random.fork_rng(devices=[]), precision.autocast():
            return measure_model_size(model, images)
    # The error is one of torch's counter: the network itself was tried before, and can be trained.
    except Exception as error:
        LOG.debug("multiply-adds were not counted: %s", error)
        return ModelSize(sum(value.numel() for value in model.parameters()), None)
