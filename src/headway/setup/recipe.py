"""The training recipe: a tree of parts. Each part is defined beside the code that it configures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from headway.comm.comm_recipe import CommRecipe
from headway.core.errors import RecipeError
from headway.core.key_suggestions import KeySynonym
from headway.core.recipe import RecipePart, check_patterns
from headway.data.augment_recipe import AugmentRecipe
from headway.data.batch_plan import BatchGrowthRecipe, BatchSize
from headway.data.data_recipe import DataRecipe
from headway.model.model_recipe import ModelRecipe
from headway.observe.observe_recipe import ObserveRecipe
from headway.optim.batch_scaling import BatchScaledRecipe, Scalable
from headway.optim.optimizer_recipe import AnyOptimizerRecipe
from headway.optim.schedule import AnyScheduleRecipe, ConstantScheduleRecipe
from headway.parallel.parallel_recipe import AnyParallelRecipe, DataParallelRecipe, LocalRecipe
from headway.setup.callback_recipe import CallbackRecipe, EarlyStoppingRecipe, expand_callback
from headway.setup.parallel_checks import check_parallel
from headway.setup.recipe_synonyms import KEY_SYNONYMS, VALUE_SYNONYMS

MACHINE_KEYS = ("device", "data.cache", "augment.where")
"""Keys whose `auto` depends on the machine. It is resolved again on the machine that continues a run."""

NO_GRAPHS = "graphs are CUDA graphs, which need a GPU"


class MetricRecipe(RecipePart):
    """A metric beside those of the task. A text alone stands for the name of a built-in metric, or an import path."""

    name: str = ""
    """Name of the metric in records and reports: a built-in one, or with `factory` any name. Unset: that of the
    function."""
    factory: str | None = None
    """Import path of a function metric(outputs, labels, **args) that returns one number for each sample, of which the
    mean is reported; or of a class derived from headway.setup.set_metrics.SetMetric, for a metric of the whole set."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function or the class."""
    higher_is_better: bool | None = None
    """False for your own metric that is better when lower. Used by `stop_at` and `task.primary`. Unset: true, or what a
    SetMetric says."""

    @model_validator(mode="after")
    def _check_keys(self) -> MetricRecipe:
        if self.factory is None:
            if not self.name:
                raise ValueError(
                    "it has neither name nor factory: write for example top5, or my_metrics.py:recall_at_3"
                )
            if self.args or self.higher_is_better is not None:
                raise ValueError(f"args and higher_is_better are for your own metric, and {self.name!r} is built in")
        return self


def _expand_metric(value: Any) -> Any:
    # `top5` is short for `{name: top5}`, and `my_metrics.py:mine` for `{factory: ...}`.
    return {"factory" if ":" in value else "name": value} if isinstance(value, str) else value


class TaskRecipe(RecipePart):
    """The task, which turns the network's outputs into loss and metrics."""

    factory: str = "auto"
    """Import path of a task. auto: chosen by the labels: Classification (one class), MultiLabel (several) or Regression
    (numbers)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the task, for example {label_smoothing: 0.1}."""
    loss: str | None = None
    """Loss of a sample: cross_entropy or hinge for classes and for several labels; l1, l2, huber or rmse for numbers.
    Or the import path of your own: a function loss(outputs, labels, **loss_args), or a class such as
    torch.nn:SmoothL1Loss, that returns one number for each sample; a parameter `reduction` is set to 'none'. Unset: the
    loss of the task."""
    loss_args: dict[str, Any] = {}
    """Keyword arguments of `loss`: delta of huber, margin of hinge, label_smoothing of cross_entropy, or your own."""
    metrics: tuple[Annotated[MetricRecipe, BeforeValidator(_expand_metric)], ...] = ()
    """Metrics beside those of the task. Classes: top2, top3, ..., precision, recall, f1, balanced_accuracy, auc;
    several labels: precision, recall, f1, micro_f1, auc, mean_average_precision; numbers: mae, rmse, r2. Or import
    paths."""
    primary: str | None = None
    """Metric by which the best weights are kept: one of this task's, or loss. Unset: the first metric of the task."""

    @model_validator(mode="after")
    def _check_loss(self) -> TaskRecipe:
        if self.loss is None and self.loss_args:
            raise ValueError("loss_args are for the loss that you name: set loss, or remove loss_args")
        return self


class EvaluateRecipe(RecipePart):
    """Evaluations on the evaluation set."""

    every_epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Epochs between two evaluations. Another one follows the last step."""
    at_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps after which there is an evaluation too."""
    batch: int | None = Field(default=None, ge=1)
    """Samples per forward pass. Unset: as in training, with its micro-batch if there is one."""
    flip: bool = False
    """Average the outputs for each image and its mirror image, which doubles the time (Krizhevsky et al. 2012, section
    4.1). `headway predict` does the same."""
    shift: int = Field(default=0, ge=0)
    """Pixels by which two copies of each image are moved: one up and left, one down and right; reflection fills the
    border. The outputs are averaged, where the two copies together weigh as much as the image. It triples the time.
    With `flip`, all three are mirrored too. 1 is the evaluation of airbench94 (Jordan 2024, arXiv 2404.00498)."""
    views_below: float | None = Field(default=None, gt=0, le=1)
    """Compute these views only for images whose highest class probability without them is below this. All other images
    take a single pass. It depends on the image alone, not on its batch, up to rounding. For networks that tell classes
    apart."""

    @model_validator(mode="after")
    def _check_views(self) -> EvaluateRecipe:
        if self.views_below is not None and not (self.flip or self.shift):
            raise ValueError("views_below chooses images for flip and shift, and neither is set: set one, or remove it")
        return self


class CheckpointRecipe(RecipePart):
    """Checkpoints, from which a run continues after a stop or a crash."""

    every_epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Epochs between two checkpoints. Others are written after the last step, and on SIGTERM or Ctrl-C."""
    every_steps: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints. Replaces `every_epochs`."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. With two, the run survives a damaged one."""
    asynchronous: bool = True
    """Write checkpoints in a thread, from a copy of the state in host memory, while training continues. False: training
    waits, and no copy is made."""
    folder: str | None = Field(default=None, min_length=1)
    """Folder for checkpoints instead of checkpoints/ in the run folder, or an address that fsspec can write to, such as
    s3://bucket/run. If not all hosts can reach it, rank 0 writes alone. Two runs must not share it."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str | None) -> str | None:
        # fsspec chains URLs with `::`, so memory:// may stand inside.
        if folder is not None and re.search(r"(^|::)memory://", folder, re.IGNORECASE):
            raise ValueError(
                f"{folder} is memory of the process, which ends with it, so that nothing could go on from there: "
                "name a folder, or an address such as s3://bucket/run"
            )
        return folder


class TrainRecipe(RecipePart):
    """The recipe of a training run."""

    # For the messages about unknown keys and values.
    key_synonyms: ClassVar[Mapping[str, KeySynonym]] = KEY_SYNONYMS
    value_synonyms: ClassVar[Mapping[str, Mapping[str, str]]] = VALUE_SYNONYMS

    name: str = "run"
    """Name of the run folder in runs/. Not used if --run names another folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sample order, the augmentation, and the random generators of torch, NumPy and Python."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:1`; auto: cuda if PyTorch sees a GPU."""
    data: DataRecipe
    augment: AugmentRecipe = AugmentRecipe()
    transform: str | None = None
    """Import path of your function `transform(images, labels, keys) -> (images, labels)`. It receives each training
    batch, with images as `transform_on` says. Draw random numbers from `keys` (uint64 [b], NumPy): see
    headway.core.random_keys."""
    transform_on: Literal["float", "uint8"] = "float"
    """Images that `transform` gets. `float`: float32 [b, C, H, W] on the device, after augmentation and normalisation.
    `uint8`: uint8 [b, C, H, W] before them; it returns uint8 of the same shape, and runs in the loader's thread, beside
    the training loop, unless the images are kept on the device."""
    model: ModelRecipe
    task: TaskRecipe = TaskRecipe()
    optimizer: AnyOptimizerRecipe
    schedule: AnyScheduleRecipe = ConstantScheduleRecipe()
    batch: BatchSize
    """Global batch: samples per step over all ranks. If it is larger than the data set, a step spans several epochs. Or
    {per_device: 64}: so many times the ranks."""
    batch_growth: BatchGrowthRecipe | None = None
    """Increase the batch at milestones, instead of lowering the learning rate: `milestones_epochs` and `factor`."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Samples per forward and backward pass; gradients accumulate over a step. Unset: the whole batch. auto: the
    largest that fits into memory. Batch norm takes its statistics of one micro-batch."""
    epochs: Scalable
    """Length of the run in epochs, rounded to whole steps. Or {base, per, scale}, to scale it with the batch."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of forward and backward; parameters stay fp32. auto: the faster of fp32 and bf16, as measured with this
    network at the start (fp16 instead of bf16 on a GPU without units for bf16)."""
    half_weights: bool = False
    """Keep parameters and gradients in 16 bits too, except those of norms. The optimizer updates fp32 copies of the
    parameters, unless `optimizer.precision` is bf16. Needs `precision` bf16 or fp16."""
    channels_last: bool = True
    """Use the channels-last memory format for images and filters: faster for convolutions on CPUs and on GPUs with
    tensor cores."""
    winograd: bool = False
    """On a CPU in fp32, compute 3x3 convolutions with stride 1 by Winograd's minimal filtering: a fifth to a half
    of the products, at a relative error of up to 7e-5. On a GPU, in bf16 and in a compiled network it changes nothing.
    Needs `channels_last`."""
    compile: bool | Literal["graphs", "max-autotune"] = False
    """Compile the network with torch.compile, which makes the first step longer. `graphs`: also replay CUDA graphs.
    `max-autotune`: time several kernels for each operation, which takes minutes."""
    activation_checkpointing: bool | tuple[str, ...] = False
    """Modules whose activations are recomputed in the backward pass instead of kept: less memory, more time. Regular
    expressions (re.search on a module's full name), or true for the blocks of Headway's networks."""
    parallel: AnyParallelRecipe = DataParallelRecipe()
    """How several processes share the work: `data`, each its own samples; `spatial`, some share each image; `hybrid`,
    all share fully connected layers; `towers`, each computes one; `experts`, some share experts; `sharded`, all share
    the optimizer's state, or all training state; `async`, nobody waits; or `local`, each makes several steps alone
    before they average their weights."""
    comm: CommRecipe = CommRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    observe: ObserveRecipe = ObserveRecipe()
    log_every_steps: int = Field(default=50, ge=1)
    """Steps between two records of loss and metrics. Each record waits for the device."""
    stop_at: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    """End the run once an evaluation reaches all of these metrics, for example {accuracy: 0.98}. The summary holds the
    time."""
    early_stopping: EarlyStoppingRecipe | None = None
    """End a run that no longer improves: `patience_epochs` without a better `metric`. The best weights are kept."""
    callbacks: tuple[Annotated[CallbackRecipe, BeforeValidator(expand_callback)], ...] = ()
    """Your own objects, which the run calls after each step, evaluation and epoch, by import path. They log numbers,
    images and tables, and can end the run."""
    log_ids: bool = False
    """Write (position, asked, served) of every sample to ids.bin: its place in the run, the sample of the order, and
    the one that was used."""
    sinks: tuple[Literal["tensorboard", "mlflow", "wandb", "prometheus"], ...] = ()
    """More outputs of metrics besides metrics.jsonl. `tensorboard`, `mlflow` and `wandb` need the packages tensorboard,
    mlflow-skinny and wandb. `prometheus` serves them at `observe.prometheus_address` and `observe.prometheus_port`."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        # The run folder is runs/NAME, which must be visible and directly in runs/.
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} cannot name a folder")
        return name

    @field_validator("sinks")
    @classmethod
    def _check_sinks(cls, sinks: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # Absent if it was refused itself.
        observe = info.data.get("observe")
        for name in ("prometheus_port", "prometheus_address"):
            if getattr(observe, name, None) is not None and "prometheus" not in sinks:
                raise ValueError(f"observe.{name} is for the sink prometheus: add it to sinks, or remove {name}")
        return sinks

    @field_validator("activation_checkpointing")
    @classmethod
    def _check_patterns(cls, patterns: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
        check_patterns(*(() if isinstance(patterns, bool) else patterns))
        return patterns

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainRecipe:
        # These checks compare keys of several parts; each part checks its own keys beside its code.
        # A batch per device is checked once the number of devices is known: `resolve_batch` validates the recipe again.
        if isinstance(self.batch, int):
            self._check_batch(self.batch)
        self._check_speed()
        if self.transform is None and self.transform_on != "float":
            raise ValueError("transform_on counts only with a transform: remove it, or set transform")
        if self.winograd and not self.channels_last:
            raise ValueError("winograd works on images in the channels-last format: set channels_last: true")
        if self.stop_at is not None and self.data.eval is None:
            raise ValueError("stop_at needs an evaluation set: set data.eval, or remove stop_at")
        self._check_early_stopping()
        self._check_epochs()
        if self.schedule.warmup.start == "base" and not isinstance(self.optimizer.lr, BatchScaledRecipe):
            fix = "write for example optimizer.lr: {base: 0.1, per: 256}, or give schedule.warmup_start a number"
            raise ValueError(f"schedule.warmup_start: base needs a learning rate that follows the batch: {fix}")
        self._check_batch_norm()
        check_parallel(self)
        if self.optimizer.lookahead is not None and self.model.ema is not None:
            what = "optimizer.lookahead and model.ema both say which weights are evaluated"
            raise ValueError(f"{what}: remove one of them")
        # An empty goal would be reached at the first evaluation.
        if self.stop_at == {}:
            raise ValueError("stop_at names no metric: write for example stop_at: {accuracy: 0.98}")
        return self

    def _check_batch(self, batch: int) -> None:
        """Checks the parts of a step against the global batch."""
        largest, norm = self.largest_batch, self.model.batch_norm
        if isinstance(self.micro_batch, int) and self.micro_batch > largest:
            raise ValueError(f"micro_batch {self.micro_batch} is larger than batch {largest}: set it to at most that")
        if self.observe.noise_scale and batch < 4:
            raise ValueError(
                f"observe.noise_scale needs two halves of a batch, and batch is {batch}: set it to 4 or more"
            )
        if norm is not None and norm.ghost is not None and norm.ghost >= largest:
            what = f"model.batch_norm.ghost {norm.ghost} is no smaller than the batch of {largest}"
            raise ValueError(f"{what}, so there would be one group: set it to less, or remove it")

    def _check_early_stopping(self) -> None:
        stopping = self.early_stopping
        if stopping is None:
            return
        if self.data.eval is None:
            raise ValueError("early_stopping needs an evaluation set: set data.eval, or remove early_stopping")
        # The second evaluation would have to be better than the first one, or end the run.
        if stopping.patience_epochs < self.evaluate.every_epochs:
            what = f"early_stopping.patience_epochs {stopping.patience_epochs:g} is shorter than the time between two"
            every = f"evaluations, evaluate.every_epochs {self.evaluate.every_epochs:g}"
            raise ValueError(f"{what} {every}: set it to at least that")

    def _check_epochs(self) -> None:
        """Raises ValueError if something is to happen at an epoch after the end of the run."""
        # If the epochs follow the batch, the other epochs are scaled with them, so the unscaled ones are compared.
        epochs = self.epochs.base if isinstance(self.epochs, BatchScaledRecipe) else self.epochs
        schedule, growth = self.schedule, self.batch_growth
        if schedule.warmup.epochs > epochs:
            raise ValueError(
                f"schedule.warmup_epochs {schedule.warmup.epochs:g} is longer than the run of {epochs:g} "
                "epochs: set it to less, or train for longer"
            )
        for key, milestones in {
            **{f"schedule.{key}": epochs for key, epochs in schedule.first_decay_epochs.items()},
            **{
                f"model.freeze_after.{index}.after_epochs": (part.after_epochs,)
                for index, part in enumerate(self.model.freeze_after)
            },
            **{
                f"model.unfreeze_at.{index}.at_epoch": (late.at_epoch,)
                for index, late in enumerate(self.model.unfreeze_at)
            },
            "batch_growth.milestones_epochs": () if growth is None else growth.milestones_epochs,
            "parallel.from_epoch": (
                (local.from_epoch,)
                if isinstance(local := self.parallel, LocalRecipe) and local.from_epoch != "auto"
                else ()
            ),
        }.items():
            # A milestone at the end itself would never take effect either.
            unreachable = [epoch for epoch in milestones if epoch >= epochs]
            if unreachable:
                what = f"{key} has {unreachable[0]:g}, and the run ends at epoch {epochs:g}"
                raise ValueError(f"{what}: remove it, or train for longer")
        settled_epoch, settled_keys = self.optimizer.settled_epochs
        progressive = self.data.progressive
        for key, end in {
            settled_keys: settled_epoch,
            "data.progressive.until_epoch": 0 if progressive is None else progressive.until_epoch,
        }.items():
            # The end may be a sum of scaled epochs, with their rounding errors.
            if end > epochs * (1 + 1e-9):
                what = f"{key} is {end:g}, and the run ends at epoch {epochs:g}"
                raise ValueError(f"{what}: set it to at most that, or train for longer")

    def _check_speed(self) -> None:
        """Checks precision, compilation and activation checkpointing against each other."""
        if self.precision == "fp16" and self.device == "cpu":
            raise ValueError("fp16 on a CPU is emulated and slow: set precision to bf16 or fp32")
        if self.half_weights and self.precision not in ("bf16", "fp16"):
            what = f"half_weights are 16 bit wide, and precision is {self.precision}"
            raise ValueError(f"{what}: set precision to bf16 or fp16, or remove half_weights")
        if self.half_weights and self.optimizer.precision == "bf16":
            if self.precision == "fp16":
                what = "half_weights are fp16 here, and optimizer.precision: bf16 rounds weights to bf16"
                raise ValueError(f"{what}: set precision to bf16, or optimizer.precision to fp32")
            if self.optimizer.lookahead is not None:
                what = "optimizer.lookahead writes fp32 weights into 16-bit ones, which loses small updates"
                raise ValueError(f"{what}: remove it, or set optimizer.precision to fp32")
        if self.compile == "graphs":
            if self.device == "cpu":
                raise ValueError(f"compile: {NO_GRAPHS}: set it to true or false")
            # All micro-batches replay one graph, whose gradients lie at fixed addresses.
            if self.micro_batch is not None:
                what = "compile: graphs keeps gradients where the next micro-batch's replay writes"
                raise ValueError(f"{what}: remove micro_batch, or set compile to true")
        if self.activation_checkpointing is not False and self.compile is not False:
            what = "torch.compile decides itself which activations are kept for backward"
            raise ValueError(f"{what}: remove activation_checkpointing, or compile")
        if self.observe.layer_times:
            for key, is_set in (
                ("compile", self.compile is not False),
                ("activation_checkpointing", self.activation_checkpointing is not False),
            ):
                if is_set:
                    what = f"observe.layer_times measures layers as they run one after another, not with {key}"
                    raise ValueError(f"{what}: remove one of them")
        # An empty list would silently checkpoint nothing.
        if self.activation_checkpointing == ():
            fix = "write for example activation_checkpointing: ['^layer1'], or true"
            raise ValueError(f"activation_checkpointing names no module: {fix}")

    def _check_batch_norm(self) -> None:
        """Checks the groups and statistics of batch norm against micro-batch and evaluation set."""
        # Ghost batch norm splits a batch into groups; synchronised batch norm joins those of all ranks.
        norm = self.model.batch_norm
        if norm is None:
            return
        if norm.ghost is not None and self.comm.batch_norm == "sync":
            what = "model.batch_norm.ghost takes statistics over fewer samples, comm.batch_norm: sync over more"
            raise ValueError(f"{what}: remove one of them")
        if norm.ghost is not None and isinstance(self.micro_batch, int) and norm.ghost > self.micro_batch:
            what = f"model.batch_norm.ghost {norm.ghost} is more than micro_batch {self.micro_batch}, which is all that"
            raise ValueError(f"{what} batch norm sees at once: set it to at most that, or remove it")
        if norm.recompute_batches is not None and self.data.eval is None:
            what = "model.batch_norm.recompute_batches is done before evaluations, and there is no evaluation set"
            raise ValueError(f"{what}: set data.eval, or remove it")

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks, before any growth. Raises RecipeError if the number of ranks is needed."""
        if isinstance(self.batch, int):
            return self.batch
        what = f"it is {self.batch.per_device} per device, and the number of devices is not known here"
        raise RecipeError(what, where="batch", fix="Set it to the samples of all devices together.")

    def enlarge_batch(self, factor: int) -> dict[str, int]:
        """Returns the value, by its key, that makes the batch so many times as large."""
        if isinstance(self.batch, int):
            return {"batch": factor * self.batch}
        return {"batch.per_device": factor * self.batch.per_device}

    @property
    def largest_batch(self) -> int:
        """The global batch at the end of the run, after all growth."""
        batch, growth = self.global_batch, self.batch_growth
        return batch if growth is None else growth.compute_largest_batch(batch)
