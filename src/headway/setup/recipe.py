"""The tree of a training recipe, composed of the parts that live beside the code they configure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headway.comm.comm_recipe import CommRecipe
from headway.core.recipe import RecipePart, check_patterns
from headway.data.augment_recipe import AugmentRecipe
from headway.data.batch_plan import BatchGrowthRecipe
from headway.data.data_recipe import DataRecipe
from headway.model.model_recipe import ModelRecipe
from headway.observe.observe_recipe import ObserveRecipe
from headway.optim.batch_scaling import BatchScaledRecipe, Scalable
from headway.optim.optimizer_recipe import AnyOptimizerRecipe
from headway.optim.schedule import AnyScheduleRecipe, ConstantScheduleRecipe

NO_GRAPHS = "graphs are CUDA graphs, which a CPU has none of"


class TaskRecipe(RecipePart):
    """What makes a loss and metrics of the network's output."""

    factory: str = "auto"
    """Import path of a task; auto, by the labels: Classification, MultiLabel (several), Regression (numbers)."""
    args: dict[str, Any] = {}
    """Its keyword arguments, for example {label_smoothing: 0.1}."""


class EvaluateRecipe(RecipePart):
    """When the evaluation set is gone through."""

    every_epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Also after the last step."""
    batch: int | None = Field(default=None, ge=1)
    """Samples at once; unset: as in training, the micro-batch where there is one."""
    flip: bool = False
    """Every image also as its mirror image: the mean of the network's two outputs counts, in twice the time; `headway
    predict` does it too. Of Krizhevsky et al. 2012, section 4.1."""
    shift: int = Field(default=0, ge=0)
    """Every image also moved by so many pixels up and to the left, and down and to the right, its border filled by
    reflection: the two together count as much as the image itself, in three times the time; with `flip`, all three
    mirrored too. The multi-crop evaluation of airbench94 (Jordan 2024, arXiv 2404.00498) with 1."""


class CheckpointRecipe(RecipePart):
    """When the state is saved, so that a run can go on after a stop or a crash."""

    every_epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Also after the last step and on SIGTERM or Ctrl-C."""
    every_steps: int | None = Field(default=None, ge=1)
    """Instead of by epochs."""
    keep: int = Field(default=2, ge=1)
    """How many are kept; two, so that a damaged one does not lose the run."""
    asynchronous: bool = True
    """Written by a thread while training goes on, from a copy of the state in the host's memory. False: training waits,
    and there is no copy."""
    folder: str | None = Field(default=None, min_length=1)
    """Where they go instead of checkpoints/ in the run folder: a folder, or an address that fsspec writes to, such as
    s3://bucket/run. Of several hosts, each needs to see it; where one does not, rank 0 writes alone. No two runs can
    have the same."""

    @field_validator("folder")
    @classmethod
    def _outlives_the_process(cls, folder: str | None) -> str | None:
        if folder is not None and re.search(r"(^|::)memory://", folder, re.IGNORECASE):
            raise ValueError(
                f"{folder} is memory of the process, which ends with it, so that nothing could go on from there: "
                "name a folder, or an address such as s3://bucket/run"
            )
        return folder


class TrainRecipe(RecipePart):
    """Everything that one training run needs."""

    name: str = "run"
    """Name of the run folder under runs/, where --run names none."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the order, the keys, and the generators of torch, numpy and Python."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; auto: cuda where there is one."""
    data: DataRecipe
    augment: AugmentRecipe = AugmentRecipe()
    transform: str | None = None
    """Import path of your function transform(images, labels, keys) -> (images, labels), on a device batch after
    normalisation (float [b, C, H, W]); `keys` (uint64 [b], numpy) give random numbers: see headway.core.random_keys.
    Training only."""
    model: ModelRecipe
    task: TaskRecipe = TaskRecipe()
    optimizer: AnyOptimizerRecipe
    schedule: AnyScheduleRecipe = ConstantScheduleRecipe()
    batch: int = Field(ge=1)
    """Global batch: samples of one step, over all ranks. May be larger than the data set: it then spans epochs."""
    batch_growth: BatchGrowthRecipe | None = None
    """Let the batch grow in place of a learning rate that falls; see below."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Samples that go through the network at once; the rest of the step accumulates. Unset: the whole batch; auto: the
    largest that fits into memory. Batch norm sees one micro-batch at a time."""
    epochs: Scalable
    """The run ends at the step nearest to so many epochs; every step is full. Or {base, per, scale}, which follows the
    batch; see below."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of forward and backward; parameters stay fp32. auto: the faster of fp32 and bf16 (on a GPU without units for
    bf16: fp16), as measured with this network at the start."""
    half_weights: bool = False
    """With bf16 or fp16: parameters, activations and gradients are 16 bit wide, and the optimizer steps fp32 copies of
    the parameters; see above."""
    channels_last: bool = True
    """Memory format of images and filters: faster for convolutions on CPUs and on GPUs with tensor cores."""
    compile: bool | Literal["graphs", "max-autotune"] = False
    """torch.compile the network; the first step takes longer by the compilation. `graphs`: replay CUDA graphs too;
    `max-autotune`: try several kernels for each operation, which takes minutes."""
    activation_checkpointing: bool | tuple[str, ...] = False
    """Modules whose activations are computed again in the backward pass and not kept: regular expressions (re.search on
    a module's full name), or true for the blocks of our networks. Less memory, more time."""
    comm: CommRecipe = CommRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    observe: ObserveRecipe = ObserveRecipe()
    log_every_steps: int = Field(default=50, ge=1)
    """Steps between two waits for the device, where loss and metrics are read."""
    stop_at: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    """Stop once an evaluation reaches all of these, for example {accuracy: 0.98}; the summary has the time it took."""
    log_ids: bool = False
    """Write (position, asked, served) of every sample to ids.bin."""
    sinks: tuple[Literal["tensorboard", "mlflow", "wandb", "prometheus"], ...] = ()
    """Where metrics go besides metrics.jsonl. The first three take the packages tensorboard, mlflow-skinny and wandb;
    prometheus answers whoever asks at `observe.prometheus_address` and `observe.prometheus_port`."""

    @field_validator("name")
    @classmethod
    def _is_file_name(cls, name: str) -> str:
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} cannot name a folder")
        return name

    @field_validator("sinks")
    @classmethod
    def _serve_what_is_configured(cls, sinks: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        observe = info.data.get("observe")  # absent where it is wrong itself
        for name in ("prometheus_port", "prometheus_address"):
            if getattr(observe, name, None) is not None and "prometheus" not in sinks:
                raise ValueError(f"observe.{name} is of the sink prometheus: add that, or remove {name}")
        return sinks

    @field_validator("activation_checkpointing")
    @classmethod
    def _are_patterns(cls, found: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
        check_patterns(*(() if isinstance(found, bool) else found))
        return found

    @model_validator(mode="after")
    def _fits(self) -> TrainRecipe:
        if isinstance(self.micro_batch, int) and self.micro_batch > self.largest_batch:
            what = f"micro_batch {self.micro_batch} is larger than batch {self.largest_batch}"
            raise ValueError(f"{what}: set it to at most that")
        self._check_speed()
        if self.stop_at is not None and self.data.eval is None:
            raise ValueError("stop_at needs an evaluation set: set data.eval, or remove stop_at")
        # Epochs that follow the batch take those of the schedules with them, so the bases are what is compared.
        epochs = self.epochs.base if isinstance(self.epochs, BatchScaledRecipe) else self.epochs
        schedule, growth = self.schedule, self.batch_growth
        if schedule.warmup.epochs > epochs:
            raise ValueError(
                f"schedule.warmup_epochs {schedule.warmup.epochs:g} is longer than the run of {epochs:g} "
                "epochs: set it to less, or train for longer"
            )
        for key, milestones in {
            **{f"schedule.{key}": falls for key, falls in schedule.falls_epochs.items()},
            **{
                f"model.freeze_after.{place}.after_epochs": (part.after_epochs,)
                for place, part in enumerate(self.model.freeze_after)
            },
            "batch_growth.milestones_epochs": () if growth is None else growth.milestones_epochs,
        }.items():
            late = [epoch for epoch in milestones if epoch >= epochs]
            if late:
                what = f"{key} has {late[0]:g}, and the run ends at epoch {epochs:g}"
                raise ValueError(f"{what}: remove it, or train for longer")
        settled, fields = self.optimizer.settled_epochs
        progressive = self.data.progressive
        for key, end in {
            fields: settled,
            "data.progressive.until_epoch": 0 if progressive is None else progressive.until_epoch,
        }.items():
            if end > epochs * (1 + 1e-9):  # of a sum, each part of which may have been scaled
                what = f"{key} is {end:g}, and the run ends at epoch {epochs:g}"
                raise ValueError(f"{what}: set it to at most that, or train for longer")
        if schedule.warmup.start == "base" and not isinstance(self.optimizer.lr, BatchScaledRecipe):
            fix = "write for example optimizer.lr: {base: 0.1, per: 256}, or give schedule.warmup_start a number"
            raise ValueError(f"schedule.warmup_start: base is that of a learning rate that follows the batch: {fix}")
        self._check_batch_norm()
        if self.observe.noise_scale and self.batch < 4:
            raise ValueError(
                f"observe.noise_scale needs two halves of a batch, not of {self.batch}: set it to 4 or more"
            )
        if self.optimizer.lookahead is not None and self.model.ema is not None:
            what = "optimizer.lookahead and model.ema both say which weights are evaluated"
            raise ValueError(f"{what}: remove one of them")
        if self.stop_at == {}:
            raise ValueError("stop_at names no metric: write for example stop_at: {accuracy: 0.98}")
        return self

    def _check_speed(self) -> None:
        if self.precision == "fp16" and self.device == "cpu":
            raise ValueError("fp16 on a CPU is emulated and slow: set precision to bf16 or fp32")
        if self.half_weights and self.precision not in ("bf16", "fp16"):
            what = f"half_weights are 16 bit wide, and precision is {self.precision}"
            raise ValueError(f"{what}: set precision to bf16 or fp16, or remove half_weights")
        if self.compile == "graphs":
            if self.device == "cpu":
                raise ValueError(f"compile: {NO_GRAPHS}: set it to true or false")
            if self.micro_batch is not None:
                what = "compile: graphs keeps gradients where the next micro-batch's replay writes"
                raise ValueError(f"{what}: remove micro_batch, or set compile to true")
        if self.activation_checkpointing is not False and self.compile is not False:
            what = "torch.compile chooses by itself what is kept for the backward pass"
            raise ValueError(f"{what}: remove activation_checkpointing, or compile")
        if self.activation_checkpointing == ():
            fix = "write for example activation_checkpointing: ['^layer1'], or true"
            raise ValueError(f"activation_checkpointing names no module: {fix}")

    def _check_batch_norm(self) -> None:
        norm = self.model.batch_norm
        if norm is None:
            return
        if norm.ghost is not None and self.comm.batch_norm == "sync":
            what = "model.batch_norm.ghost takes statistics over fewer samples, comm.batch_norm: sync over more"
            raise ValueError(f"{what}: remove one of them")
        if norm.ghost is not None and norm.ghost >= self.largest_batch:
            what = f"model.batch_norm.ghost {norm.ghost} is no smaller than the batch of {self.largest_batch}"
            raise ValueError(f"{what}, so there would be one group: set it to less, or remove it")
        if norm.ghost is not None and isinstance(self.micro_batch, int) and norm.ghost > self.micro_batch:
            what = f"model.batch_norm.ghost {norm.ghost} is more than micro_batch {self.micro_batch}, which is all that"
            raise ValueError(f"{what} batch norm sees at once: set it to at most that, or remove it")
        if norm.recompute_batches is not None and self.data.eval is None:
            what = "model.batch_norm.recompute_batches is done before evaluations, and there is no evaluation set"
            raise ValueError(f"{what}: set data.eval, or remove it")

    @property
    def largest_batch(self) -> int:
        """The global batch at the end of the run, after all growth."""
        return self.batch if self.batch_growth is None else self.batch_growth.compute_largest_batch(self.batch)
