"""Setup: everything a recipe names, opened, built and checked, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from headway.comm.batch_norm import convert_sync_batchnorm
from headway.core.errors import DataError, RecipeError
from headway.core.malloc import keep_freed_memory
from headway.core.recipe import LoadedRecipe
from headway.core.world import World
from headway.data.augment import Augment
from headway.data.batch_plan import BatchPlan
from headway.data.batch_transform import BatchTransform
from headway.data.data_recipe import SYNTHETIC
from headway.data.resolution import describe_sizes, list_sizes
from headway.launch.ranks import Ranks
from headway.model.builder import build_model, find_initialiser
from headway.model.freezing import FreezeSchedule
from headway.model.model_size import ModelSize
from headway.model.winograd import MIN_CHANNELS, use_winograd
from headway.observe.activations import ActivationPercentiles
from headway.optim import MasterWeights, Schedule, build_optimizer, convert_to_bf16
from headway.optim.batch_scaling import require_number
from headway.optim.layer_decay import describe_layer_rates
from headway.parallel.owners import Owners
from headway.parallel.parallel_recipe import AsyncRecipe, SpatialRecipe, divides_weights
from headway.parallel.rounds import Rounds
from headway.setup import checks
from headway.setup.assign_parameters import advise_owners, assign_parameters
from headway.setup.choose_layers import resolve_layers
from headway.setup.compilation import apply_activation_checkpointing, compile_model
from headway.setup.device import resolve_device
from headway.setup.divide_layers import check_network_divides, divide_layers
from headway.setup.first_batch import FirstBatch, load_first_batch
from headway.setup.follow_weights import follow_weights
from headway.setup.inputs import LOG, DryRunOptions, open_inputs
from headway.setup.local_steps import build_outer_optimizer, describe_rounds, plan_rounds
from headway.setup.micro_batch import find_largest_micro_batch
from headway.setup.precision import (
    DTYPE_BY_NAME,
    Precision,
    PrecisionName,
    choose_fastest,
    describe_emulation,
    explain_unused_winograd,
    measure_precisions,
)
from headway.setup.rates import (
    check_length,
    describe_batch,
    find_batch_warnings,
    find_step_warnings,
    plan_steps,
    resolve_batch,
    resolve_rates,
)
from headway.setup.recipe import NO_GRAPHS, TrainRecipe
from headway.setup.seeding import seed_generators
from headway.setup.shared_inputs import SharedInputs
from headway.setup.strips import resolve_until
from headway.setup.task import LABEL_PHRASES, TargetSpec, Task
from headway.setup.task_builder import BUILT_IN, build_task
from headway.setup.train_setup import TrainSetup
from headway.setup.trial import build_trial_pass, count_network
from headway.setup.user_transforms import import_batch_transform


@dataclass(frozen=True, kw_only=True)
class RecordedData:
    """Facts about the training data in a run folder, with which the network is built again without the data.

    Attributes:
        target: kind and number of the labels.
        samples: number of samples of the training set.
    """

    target: TargetSpec
    samples: int


def build_setup(
    loaded: LoadedRecipe[TrainRecipe],
    *,
    fresh: bool = True,
    recorded: RecordedData | None = None,
    ranks: Ranks | None = None,
    dry_run: DryRunOptions | None = None,
    shared: SharedInputs | None = None,
) -> TrainSetup:
    """Builds the parts of a run, and resolves every `auto` of its recipe.

    Seeds the global random generators of torch, numpy and Python, and makes the run's GPU the current device. The
    caller closes `inputs` of the result. If building fails, they are closed already.

    Args:
        loaded: the recipe as the user gave it, or as a run recorded it.
        fresh: start from the recipe's weights and `init`. False if a checkpoint or trained weights will be loaded.
        recorded: facts about the training data that a run recorded with its resolved recipe; the data are not opened.
        ranks: the ranks of this run; each uses the GPU of its local rank. None if one process trains.
        dry_run: set for a dry run. The network is checked on shapes alone if it allows that, its size is not counted,
            and `micro_batch: auto` stays unresolved.
        shared: inputs that this run shares with others; it opens none of its own.

    Raises:
        HeadwayError: something is wrong with recipe, data, network or task.
    """
    return _SetupBuilder(loaded, fresh, recorded, ranks, dry_run, shared).build()


@final
class _SetupBuilder:
    """Builds the parts of a setup, one method each, in the order of `build`.

    The order matters: it decides which of several mistakes is reported, and the state of the random generators.
    """

    def __init__(
        self,
        loaded: LoadedRecipe[TrainRecipe],
        fresh: bool,
        recorded: RecordedData | None,
        ranks: Ranks | None,
        dry_run: DryRunOptions | None,
        shared: SharedInputs | None,
    ) -> None:
        # First the keys that follow the weights, while keys of the user can be told from resolved ones; then the batch.
        num_ranks = 1 if ranks is None else ranks.launched_size
        if not isinstance(batch := loaded.recipe.batch, int):
            LOG.info(f"The batch of a step: {describe_batch(batch.per_device, num_ranks)}.")
        self.loaded = resolve_rates(resolve_batch(follow_weights(loaded) if fresh else loaded, num_ranks))
        self.fresh, self.recorded, self.ranks = fresh, recorded, ranks
        self.dry_run = dry_run
        for text in find_batch_warnings(self.loaded.recipe) if fresh else ():
            LOG.warning(text)
        self.is_dry_run = dry_run is not None
        self.device = self._prepare_device()
        self.loaded, self.inputs = (
            open_inputs(self.loaded, self.device, opens_data=recorded is None, dry_run=dry_run)
            if shared is None
            else shared.open(self.loaded, self.device)
        )
        # `self.loaded` is updated as each further `auto` is resolved; `self.recipe` keeps the state at this point.
        self.recipe = self.loaded.recipe
        self.samples = self.inputs.samples if recorded is None else recorded.samples

    def build(self) -> TrainSetup:
        """Builds the setup. If that fails, the data is closed before the error is raised."""
        try:
            return self._build()
        except BaseException:
            self.inputs.close()
            raise

    def _build(self) -> TrainSetup:
        recipe = self.recipe
        checks.check_sets(self.inputs.train, self.inputs.eval)
        seed_generators(recipe.seed)
        target = self._read_target()
        augment = self._build_augment(target)
        task = self._build_task(target)
        model = self._build_model(task)
        self._check_combinations()
        transform = self._import_transform()
        # Without data there is nothing to try the network on: its recipe was resolved by an earlier run.
        first_batch = load_first_batch(self.inputs, self.loaded.recipe, augment) if self.recorded is None else None
        if first_batch is not None and self.fresh:
            initialise = find_initialiser(recipe.model, model, base=self.loaded.base)
            if initialise is not None:
                initialise(first_batch.images)
        step_seconds = self._resolve_precision(model, task, first_batch)
        base = self.loaded.base
        optimizer = build_optimizer(
            recipe.optimizer.resolve_paths(base), model, self.samples / recipe.global_batch, seed=recipe.seed
        )
        if self.fresh and (layer_rates := describe_layer_rates(model, recipe.optimizer.layer_decay)):
            LOG.info(layer_rates)
        owners = assign_parameters(recipe.parallel, model, optimizer, ranks=self.ranks)
        masters = self._convert_weights(model, optimizer, owners)
        precision = Precision(
            self.loaded.recipe.precision,  # type: ignore[arg-type]
            self.device,
            seconds=step_seconds,
            masters=masters,
            is_narrow=recipe.half_weights,
        )
        counts = None
        if first_batch is not None:
            counts = self._try_network(model, task, precision, first_batch)
            if self.fresh and self.ranks is not None:
                stepped = model if masters is None else masters
                if advice := advise_owners(recipe, stepped, optimizer, counts, self.ranks.launched_size):
                    LOG.info(advice)
            self._resolve_micro_batch(model, precision, first_batch)
            if self.fresh and self.ranks is not None:
                self.loaded = resolve_until(self.loaded, model, self.inputs, self.ranks.launched_size)
            self.loaded = resolve_layers(self.loaded, model, first_batch.images, precision.autocast, self.ranks)
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
            forward=compile_model(model, recipe.compile),
            counts=counts,
            optimizer=optimizer,
            masters=masters,
            freezing=FreezeSchedule(model, recipe.model, self.samples),
            schedule=Schedule(recipe.schedule.resolve_paths(base), total=plan.find_position(steps), epoch=self.samples),
            precision=precision,
            epoch=self.samples,
            plan=plan,
            steps=steps,
            lr=require_number(recipe.optimizer.lr, "optimizer.lr"),
            rounds=(rounds := self._plan_rounds(plan, steps)),
            outer=build_outer_optimizer(recipe.parallel, model, masters, rounds, self.ranks),
            divided=divide_layers(
                self.loaded.recipe.parallel,
                model,
                optimizer,
                ranks=self.ranks,
                blocks=recipe.activation_checkpointing,
            ),
            owners=owners,
        )

    def _prepare_device(self) -> torch.device:
        """Resolves `device`, makes it the current CUDA device and returns it."""
        recipe, ranks = self.loaded.recipe, self.ranks
        device = resolve_device(recipe, is_dry_run=self.is_dry_run)
        if recipe.compile == "graphs" and device.type == "cpu" and not self.is_dry_run:
            raise RecipeError(NO_GRAPHS, where="compile", fix="Set it to true or false.")
        # Trained weights may be used on a machine of another kind, so only a fresh run is bound to its device.
        if self.fresh and recipe.device == "auto" and not self.is_dry_run:
            if device.type == "cpu" and recipe.precision == "fp16":
                what = "fp16 on a CPU is emulated and slow, and PyTorch sees no GPU here"
                raise RecipeError(what, where="precision", fix="Set it to bf16, fp32 or auto.")
            self._resolve("device", device.type, f"PyTorch sees {'a' if device.type == 'cuda' else 'no'} GPU")
        if device.type == "cpu" and not self.is_dry_run:
            keep_freed_memory()
        if str(device) == "cuda":
            # A launcher may show each process all GPUs of the host, or only its own.
            number = torch.cuda.current_device() if ranks is None else ranks.local_rank % torch.cuda.device_count()
            device = torch.device("cuda", number)
        # Streams, events and generators are created on the current device.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _read_target(self) -> TargetSpec:
        """Returns the kind of the labels: the recorded one, that of the training set, or that of synthetic data."""
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
        checks.check_views(self.recipe, task)
        if self.recipe.task.factory == "auto":
            # Recorded by import path, so that the run is rebuilt with this task whatever its labels are then.
            name = f"{Task.__module__}:{BUILT_IN[target.kind].__name__}"
            self._resolve("task.factory", name, f"labels are {LABEL_PHRASES[target.kind]}")
        return task

    def _build_model(self, task: Task) -> torch.nn.Module:
        recipe, ranks = self.recipe, self.ranks
        channels, base = self.inputs.channels, self.loaded.base
        model = build_model(
            recipe.model, num_outputs=task.outputs, in_channels=channels, base=base, loads_weights=self.fresh
        )
        model = model.to(device=self.device)
        # Built only to refuse patterns that match no layer, before there is a run folder.
        ActivationPercentiles(model, recipe.observe.activations)
        check_network_divides(recipe.parallel, model, 1 if ranks is None else ranks.launched_size)
        # Before the rendezvous the layers get a group of this process alone; `Ranks.meet` replaces it.
        if ranks is not None and recipe.comm.batch_norm == "sync":
            model = convert_sync_batchnorm(model, World.create_single(self.device).create_group(name="not met yet"))
        # FSDP2 divides contiguous weights alone.
        if recipe.channels_last and not (ranks is not None and divides_weights(recipe.parallel)):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if recipe.winograd:
            model, changed = use_winograd(model)
            if not changed:
                what = f"the network has no 3x3 convolution with stride 1 and {MIN_CHANNELS} channels or more"
                raise RecipeError(what, where="winograd", fix="Remove it.")
        apply_activation_checkpointing(model, recipe.activation_checkpointing)
        return model

    def _convert_weights(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, owners: Owners | None
    ) -> MasterWeights | None:
        """Converts the network to 16 bits if the recipe says so. Returns its fp32 masters; None: it has none."""
        if not self.recipe.half_weights:
            return None
        if self.recipe.optimizer.precision == "bf16":
            convert_to_bf16(model)
            return None
        kind = DTYPE_BY_NAME[self.recipe.precision]
        if owners is None:
            return MasterWeights(model, optimizer, kind)
        masters = MasterWeights(model, optimizer, kind, is_elsewhere=owners.is_elsewhere)
        owners.saved.set_narrow(masters.list_narrow())
        return masters

    def _check_combinations(self) -> None:
        """Raises RecipeError if a key cannot work with this precision, or on this device."""
        recipe, ranks = self.recipe, self.ranks
        if ranks is not None:
            # The ranks measure the noise scale in their all-reduce, so they must know before they meet.
            ranks.measures_noise = recipe.observe.noise_scale
            ranks.spatial = recipe.parallel if isinstance(recipe.parallel, SpatialRecipe) else None
            ranks.servers = recipe.parallel.servers if isinstance(recipe.parallel, AsyncRecipe) else None
        if recipe.observe.noise_scale and recipe.precision == "fp16":
            what = "gradients in fp16 do not tell the noise scale, as the loss scale changes between steps"
            raise RecipeError(what, where="observe.noise_scale", fix="Set precision to bf16 or fp32, or leave it out.")
        uses_nccl = ranks is not None and self.device.type == "cuda" and not isinstance(recipe.parallel, AsyncRecipe)
        if uses_nccl and recipe.comm.on_rank_failure == "continue":
            what = "NCCL cannot continue after a process is lost"
            raise RecipeError(what, where="comm.on_rank_failure", fix="Set it to restart or auto.")

    def _import_transform(self) -> Callable[..., Any] | None:
        """Returns the transform that the loop calls; the loader calls one of uint8 images."""
        name = self.recipe.transform
        transform = None if name is None else import_batch_transform(name, self.loaded.base)
        if name is None or transform is None or self.recipe.transform_on == "float":
            return transform
        self.inputs.batch_transform = BatchTransform(transform, name)
        return None

    def _resolve_precision(
        self, model: torch.nn.Module, task: Task, first_batch: FirstBatch | None
    ) -> dict[PrecisionName, float] | None:
        """Resolves `precision: auto`; returns the seconds that it measured."""
        recipe, device = self.recipe, self.device
        step_seconds = None
        if recipe.precision == "auto":
            if first_batch is not None and not self.is_dry_run:
                # A network that fails in fp32 too must be reported as such, and not as slow.
                checks.check_network(model, *first_batch.take(2), task, Precision("fp32", device))
                step_seconds = measure_precisions(model, first_batch.images, recipe, device, self.ranks)
            name, reason = choose_fastest([step_seconds] if step_seconds else [])
            if self.is_dry_run:
                reason = "as a dry run measures nothing; the run chooses what is fastest on its device"
            LOG.info(f"Precision: {name}, {reason}.")
            self._resolve("precision", name, reason)
        elif self.fresh and not self.is_dry_run and (warning := describe_emulation(recipe.precision, device)):
            LOG.warning(warning)
        if self.fresh and (said := explain_unused_winograd(self.loaded.recipe, device)):
            LOG.info(said)
        return step_seconds

    def _try_network(
        self, model: torch.nn.Module, task: Task, precision: Precision, first_batch: FirstBatch
    ) -> ModelSize | None:
        """Runs two samples through network and task at the largest and the smallest image size.

        Returns the parameters and multiply-adds of the network; None in a dry run.
        """
        recipe, inputs = self.recipe, self.inputs
        check = checks.check_network_shapes if self.is_dry_run else checks.check_network
        # Batch norm needs two samples.
        images, labels = first_batch.take(2)
        metric_names = check(model, images, labels, task, precision)
        height, width = inputs.find_smallest_size(recipe)
        # Progressive resolution starts with smaller images, on which the network may fail.
        if (height, width) != inputs.size:
            layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
            small_images = images[:, :, :height, :width].contiguous(memory_format=layout)
            check(model, small_images, labels, task, precision, where="data.progressive.start")
        counts = None
        if not self.is_dry_run:
            counts = count_network(model, first_batch.images[:1], precision.autocast)
            per_image = "" if counts.multiply_adds is None else f" an image of {checks.format_shape(images)}"
            LOG.info(f"Network: {counts.describe()}{per_image}.")
        if recipe.task.loss is not None or task.set_metrics:
            mixes = recipe.augment.mixup is not None or recipe.augment.cutmix is not None
            checks.check_loss_and_metrics(task, first_batch.labels, task.outputs if mixes else None)
        checks.check_metrics(metric_names, task)
        checks.check_stop_at(recipe, metric_names)
        return counts

    def _resolve_micro_batch(self, model: torch.nn.Module, precision: Precision, first_batch: FirstBatch) -> None:
        recipe = self.recipe
        if recipe.micro_batch != "auto" or self.is_dry_run:
            return
        # The ranks agree on a precision later, and it may be a wider one than is fastest here.
        context = precision.autocast if self.ranks is None else precision.autocast_widest
        run_trial = build_trial_pass(model, first_batch.images, context)
        micro_batch, reason = find_largest_micro_batch(recipe.largest_batch, self.device, run_trial)
        checks.check_ghost_groups(recipe, micro_batch)
        self._resolve("micro_batch", micro_batch, reason)

    def _plan_steps(self) -> tuple[BatchPlan, int]:
        """Returns the number of samples in each step and the number of steps; warns of anything unusual about them."""
        recipe, ranks = self.recipe, self.ranks
        plan, steps = plan_steps(recipe, self.samples)
        check_length(recipe, steps)
        if self.fresh:
            for text in find_step_warnings(recipe, self.samples, plan, steps):
                LOG.warning(text)
            if (progressive := recipe.data.progressive) is not None:
                epochs = plan.find_position(steps) / self.inputs.samples
                LOG.info(describe_sizes(list_sizes(progressive, self.inputs.size, epochs)))
            if ranks is not None and (
                idle_ghost := checks.describe_idle_ghost(self.loaded.recipe, ranks.launched_size)
            ):
                LOG.warning(idle_ghost)
        return plan, steps

    def _plan_rounds(self, plan: BatchPlan, steps: int) -> Rounds:
        rounds = plan_rounds(self.recipe, plan, steps, self.samples)
        if self.fresh and (text := describe_rounds(rounds, plan, self.samples)):
            LOG.info(text)
        return rounds

    def _resolve(self, key: str, value: Any, reason: str) -> None:
        self.loaded = self.loaded.resolve(key, value, reason)
