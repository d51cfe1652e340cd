"""A dry run: all that a recipe names is opened, built and looked at, and nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from headway.checkpoint.checkpoints import state_of
from headway.core.collectives import Algorithm, Link, Network, count_bytes_out_of_host
from headway.core.errors import UsageError, UserCodeError
from headway.core.profile import (
    Workload,
    WorkloadExchange,
    WorkloadInput,
    WorkloadLayer,
    WorkloadPhase,
    WorkloadRun,
    WorkloadStep,
    WorkloadUpdate,
)
from headway.core.recipe import LoadedRecipe
from headway.data.data_recipe import SYNTHETIC, SyntheticRecipe
from headway.data.resolution import compute_size
from headway.launch.hosts import hosts_of, shared
from headway.launch.ranks import running_statistics
from headway.model.fake_tensors import use_fake_tensors
from headway.model.graph_breaks import CompileReport, try_compiling
from headway.model.layer_profile import SAMPLES, profile_layers
from headway.model.model_size import measure_model_size
from headway.optim.footprint import estimate_footprint
from headway.setup.build import Setup, set_up
from headway.setup.inputs import Rehearsal, Say
from headway.setup.micro_batch import fitting
from headway.setup.prepare import prepared
from headway.setup.recipe import TrainRecipe
from headway.train.runs import load_recipe

Where = Literal["device", "host"]

MOST_RATES = 10_000
"""Epochs whose learning rates are kept."""

WITHOUT_DATA = (
    "A dry run needs no data where it is told what they would be: headway train RECIPE --dry-run --samples 1281167"
    " --classes 1000 would be ImageNet's."
)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one kind on one rank, in bytes; of a CPU all of it lies on the host."""

    name: str
    bytes: int
    where: Where
    what: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a recipe would do.

    Attributes:
        loaded: the recipe, with what was resolved.
        hosts, ranks: how many there would be.
        share: samples of a step of the largest batch on one rank, at most.
        micro: samples that go through its network at once. accumulated: such parts of its share.
        rates: (epoch, learning rate of the first step that begins in it); then (epochs, that of the last step).
        memory: of one rank.
        sent_bytes: what the busiest host sends to others in a step; of one host, what a rank sends.
        without_values: the layers were measured without a computation, not on images.
        compilable: what torch.compile makes of the network, or would; None where it was not asked, and with
            `activation_checkpointing`, which goes without it.
        notes: what the reader should know of the numbers.
    """

    loaded: LoadedRecipe[TrainRecipe]
    workload: Workload
    hosts: int
    ranks: int
    share: int
    micro: int
    accumulated: int
    rates: Sequence[tuple[float, float]]
    memory: Sequence[Part]
    sent_bytes: float
    without_values: bool
    compilable: CompileReport | None
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts,
            "ranks": self.ranks,
            "rank_batch": self.share,
            "micro_batch": self.micro,
            "accumulation": self.accumulated,
            "learning_rate": [{"epoch": epoch, "lr": lr} for epoch, lr in self.rates],
            "memory": [asdict(part) for part in self.memory],
            "sent_bytes": self.sent_bytes,
            "compilable": None if (fits := self.compilable) is None else {"whole": fits.is_whole, **asdict(fits)},
            "notes": list(self.notes),
            "workload": self.workload.model_dump(mode="json"),
        }


def dry_run(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    procs: int | None = None,
    hosts: str | None = None,
    samples: int | None = None,
    classes: int | None = None,
    evaluation_samples: int | None = None,
    compiles: bool = True,
    say: Say,
) -> DryRun:
    """Opens and builds what a recipe names, and works out its run. No cache is filled, and no step is made.

    Args:
        procs, hosts: for so many ranks; as of the command line, and nothing is started there.
        samples, classes, evaluation_samples: what the data would be, in place of those that the recipe names.
        compiles: ask what torch.compile makes of the network, which takes seconds.

    Raises:
        HeadwayError: as of `set_up`. UsageError: there are no data, and nothing says what they would be.
    """
    places = hosts_of(procs, hosts)
    if samples is None and (classes, evaluation_samples) != (None, None):
        raise UsageError("--classes and --eval-samples go with --samples", fix=WITHOUT_DATA)
    stated = None if samples is None else SyntheticRecipe(samples=samples, classes=classes or 1000)
    loaded = load_recipe(recipe, overrides)
    try:
        setup = set_up(loaded, say=say, rehearsal=Rehearsal(stated=stated))
    except UsageError as error:
        named = [uri for uri in (loaded.recipe.data.train, loaded.recipe.data.eval) if uri is not None]
        paths = {(loaded.base / Path(uri).expanduser()).resolve() for uri in named}  # of `..`, and of links
        if stated is None and (error.where in named or Path(error.where).resolve() in paths):
            raise UsageError(error.what, where=error.where, fix=f"{error.fix} {WITHOUT_DATA}".strip()) from None
        raise
    with closing(setup.inputs):
        images = _images(setup)
        found, without_values = _layers(setup, images)
        asked = compiles and not setup.recipe.activation_checkpointing
        fits = try_compiling(setup.model, images, setup.precision.autocast) if asked else None
        ranks = sum(host.procs for host in places)
        return _made(setup, found, without_values, fits, len(places), ranks, evaluation_samples)


def _images(setup: Setup) -> torch.Tensor:
    """A few, as the network gets them."""
    images, _ = prepared(setup, setup.inputs.read_first_batch(setup.recipe), 1)
    layout = torch.channels_last if setup.recipe.channels_last else torch.contiguous_format
    return images[torch.arange(max(SAMPLES), device=images.device) % len(images)].contiguous(memory_format=layout)


def _layers(setup: Setup, images: torch.Tensor) -> tuple[tuple[WorkloadLayer, ...], bool]:
    """The network's layers, and whether they could be looked at without a computation."""
    autocast = setup.precision.autocast
    try:
        with use_fake_tensors(setup.model, images) as (given,):
            return profile_layers(setup.model, given, autocast), True
    except Exception:  # a network that decides by values, or takes other ways than torch's
        try:
            return profile_layers(setup.model, images, autocast), False
        except Exception as error:
            what = f"the network failed on {max(SAMPLES)} samples in training: {type(error).__name__}: {error}"
            raise UserCodeError(what, where="model") from error


def _made(
    setup: Setup,
    found: tuple[WorkloadLayer, ...],
    without_values: bool,
    fits: CompileReport | None,
    hosts: int,
    ranks: int,
    evaluation_samples: int | None,
) -> DryRun:
    recipe, notes = setup.recipe, list[str]()
    share = -(-setup.plan.largest_batch // ranks)
    shared(recipe.batch, ranks)
    saved = sum(layer.saved_bytes for layer in found)
    micro = recipe.micro_batch
    if micro == "auto":
        micro, reason = fitting(share, saved, setup.device)
        notes.append(f"micro_batch: auto is estimated ({reason}); a run measures it.")
    parts = 1 if micro is None else -(-share // min(micro, share))
    if not without_values:
        notes.append(f"The layers were measured on {max(SAMPLES)} images: the network asks for values.")
    if recipe.compile:
        notes.append("What is kept for backward was measured without torch.compile, which keeps less.")
    if recipe.activation_checkpointing:
        notes.append("Of what is computed again, the inputs that are kept for it are not counted.")
    if setup.device.type == "cpu" and recipe.precision == "fp16":
        notes.append("There is no GPU here, and training in fp16 wants one.")
    workload = _workload(setup, found, micro, ranks, evaluation_samples)
    if recipe.data.eval is not None and workload.run.evaluation_samples is None:
        notes.append("The evaluation set was not there: --eval-samples 50000 says how large ImageNet's is.")
    exchanged = workload.step.exchange.gradient_bytes
    return DryRun(
        loaded=setup.loaded,
        workload=workload,
        hosts=hosts,
        ranks=ranks,
        share=share,
        micro=-(-share // parts),
        accumulated=parts,
        rates=_rates(setup),
        memory=_memory(setup, workload, share, -(-share // parts), ranks),
        sent_bytes=_sent(workload.step.exchange, exchanged, hosts, ranks),
        without_values=without_values,
        compilable=fits,
        notes=notes,
    )


def _workload(
    setup: Setup, found: tuple[WorkloadLayer, ...], micro: int | None, ranks: int, evaluation_samples: int | None
) -> Workload:
    recipe, inputs = setup.recipe, setup.inputs
    kept = estimate_footprint(setup.optimizer)
    trained = sum(layer.gradient_bytes for layer in found)
    stepped = sum(_size(value) for group in setup.optimizer.param_groups for value in group["params"])
    moved = kept.moved_bytes + 3 * _masters_bytes(setup) + 3 * stepped * (recipe.optimizer.clip_norm is not None)
    statistics = sum(value.numel() * value.element_size() for value in running_statistics(setup.model))
    total, (height, width) = setup.plan.find_position(setup.steps), setup.size
    held_out = len(inputs.eval) if inputs.eval is not None else evaluation_samples
    evaluates, saves = recipe.data.eval is not None, recipe.checkpoint
    train = inputs.train
    on_host = (
        recipe.augment.select_host_augmentations(_device_type(setup)) if recipe.data.train != SYNTHETIC else frozenset()
    )
    return Workload(
        name=recipe.name,
        layers=found,
        input=WorkloadInput(
            height=height,
            width=width,
            channels=setup.channels,
            decoded_bytes=height * width * setup.channels,
            encoded_bytes=None if train is None else float(train.length.mean()),
            source_pixels=None if train is None else float((train.width.astype(np.float64) * train.height).mean()),
            on_host=(*_cropped(recipe), *(name for name in ("flip", "translate") if name in on_host)),
            on_device=_augmented(recipe, on_host),
        ),
        step=WorkloadStep(
            batch=recipe.batch,
            ranks=ranks,
            micro_batch=micro,
            precision=setup.precision.name,
            half_weights=setup.masters is not None,
            compiled=bool(recipe.compile),
            update=WorkloadUpdate(
                optimizer=recipe.optimizer.name,
                state_bytes=kept.state_bytes,
                passes=moved / stepped,
                beside_bytes=sum(part.bytes for part in _beside(setup)),
            ),
            exchange=WorkloadExchange(
                gradient_bytes=trained,
                statistics_bytes=statistics,
                algorithm=recipe.comm.algorithm,
                wire_ratio=_wire_ratio(setup),
                bucket_bytes=None if recipe.comm.bucket_mb == "auto" else round(recipe.comm.bucket_mb * 1e6),
                sync_batch_norm=recipe.comm.batch_norm == "sync",
            ),
        ),
        run=WorkloadRun(
            samples=setup.epoch,
            epochs=total / setup.epoch,
            steps=setup.steps,
            phases=_phases(setup, sum(layer.forward_multiply_adds for layer in found)),
            evaluations=_times(setup, recipe.evaluate.every_epochs) if evaluates else 0,
            evaluation_samples=held_out if evaluates else 0,
            checkpoints=_times(setup, saves.every_epochs, saves.every_steps),
            checkpoint_bytes=_checkpoint_bytes(setup, kept.state_bytes),
        ),
    )


def _wire_ratio(setup: Setup) -> float:
    """A 16-bit wire halves fp32 gradients alone: those of 16-bit weights go as they are."""
    if setup.recipe.comm.wire == "fp32":
        return 1.0
    trained = [value for value in setup.model.parameters() if value.requires_grad]
    halved = sum(_size(value) for value in trained if value.dtype == torch.float32) / 2
    return 1.0 - halved / sum(map(_size, trained))


def _device_type(setup: Setup) -> str:
    """Of the device that the recipe would train on: fp16 wants a GPU, also where there is none."""
    return "cuda" if setup.recipe.precision == "fp16" else setup.device.type


def _cropped(recipe: TrainRecipe) -> tuple[str, ...]:
    return ("random crop",) if recipe.data.crop.is_random else ()


def _augmented(recipe: TrainRecipe, on_host: frozenset[str]) -> tuple[str, ...]:
    options = recipe.augment
    asked = {
        "flip": options.flip_mode is not None and "flip" not in on_host,
        "translate": options.translate > 0 and "translate" not in on_host,
        **{name: getattr(options, name) is not None for name in ("policy", "jitter", "cutout", "random_erasing")},
        **{name: getattr(options, name) is not None for name in ("cutmix", "mixup")},
        "normalise": options.normalise,
        "transform": recipe.transform is not None,
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def _phases(setup: Setup, forward: int) -> tuple[WorkloadPhase, ...]:
    """Steps of one batch and one image size that follow each other."""
    plan, steps, progressive = setup.plan, setup.steps, setup.recipe.data.progressive
    starts = {plan.count_steps(0, int(start)) for start in plan.starts}
    if progressive is not None:
        last = min(math.ceil(progressive.until_epoch), math.ceil(plan.find_position(steps) / setup.epoch))
        starts |= {plan.count_steps(0, epoch * setup.epoch) for epoch in range(last + 1)}
    out: list[WorkloadPhase] = []
    counted = {setup.size: forward}
    begins = sorted(step for step in starts if step < steps)
    for step, end in zip(begins, [*begins[1:], steps], strict=True):
        position = plan.find_position(step)
        size = setup.size
        if progressive is not None:
            size = compute_size(progressive, setup.size, position // setup.epoch)
        if size not in counted:
            counted[size] = _forward(setup, size)
        phase = WorkloadPhase(
            steps=end - step,
            batch=plan.get_batch_size(position),
            height=size[0],
            width=size[1],
            forward_multiply_adds=counted[size],
        )
        if out and out[-1].model_copy(update={"steps": 1}) == phase.model_copy(update={"steps": 1}):
            phase = phase.model_copy(update={"steps": phase.steps + out.pop().steps})
        out.append(phase)
    return tuple(out)


def _forward(setup: Setup, size: tuple[int, int]) -> int:
    """Multiply-adds of one image of another size."""
    images = torch.zeros(1, setup.channels, *size, device=setup.device)
    try:
        with use_fake_tensors(setup.model, images) as (given,), setup.precision.autocast():
            found = measure_model_size(setup.model, given)
    except Exception:
        with setup.precision.autocast():
            found = measure_model_size(setup.model, images)
    return found.multiply_adds or 0


def _times(setup: Setup, every_epochs: float, every_steps: int | None = None) -> int:
    """How often something is done that is done at such intervals, and after the last step."""
    plan, steps = setup.plan, setup.steps
    if every_steps is not None:
        return steps // every_steps + (steps % every_steps > 0)
    interval = every_epochs * setup.epoch
    if interval <= setup.recipe.batch:
        return steps
    whole = math.floor(plan.find_position(steps) / interval)

    def after(number: int) -> int:
        return plan.count_steps(0, math.ceil(number * interval))

    if interval >= plan.largest_batch:  # each after another step
        return whole + (after(whole) < steps)
    return len({steps, *map(after, range(1, whole + 1))})


def _checkpoint_bytes(setup: Setup, state_bytes: int) -> int:
    tensors = state_of(setup.model, setup.optimizer, setup.masters)
    begun = sum(_size(value) for name, value in tensors.items() if name.startswith("optimizer/"))
    return sum(map(_size, tensors.values())) - begun + state_bytes + _averaged_bytes(setup)


def _averaged_bytes(setup: Setup) -> int:
    """Of the average of the weights or Lookahead's slow ones, and of floating-point buffers with them."""
    if setup.recipe.model.ema is None and setup.recipe.optimizer.lookahead is None:
        return 0
    weights = [value for _, value in (setup.masters or setup.model).named_parameters()]
    return sum(_size(value) for value in (*weights, *setup.model.buffers()) if value.is_floating_point())


def _watched_bytes(setup: Setup) -> int:
    """Of what `LayerStatistics` keeps within a logging step: the layers before it, and their differences."""
    observe = setup.recipe.observe
    if not observe.layer_rates and observe.on_divergence == "ignore":
        return 0
    stepped = (value for group in setup.optimizer.param_groups for value in group["params"])
    return 2 * sum(_size(value) for value in stepped if value.requires_grad and value.ndim > 1)


def _masters_bytes(setup: Setup) -> int:
    """Of the fp32 weights that the optimizer steps in the place of 16-bit ones."""
    if setup.masters is None:
        return 0
    own = set(setup.model.parameters())
    return sum(_size(value) for _, value in setup.masters.named_parameters() if value not in own)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rates(setup: Setup) -> list[tuple[float, float]]:
    """At the beginning of each epoch, of very many of some; and in the end."""
    plan, steps = setup.plan, setup.steps
    out, epochs = [], math.ceil(plan.find_position(steps) / setup.epoch)
    for epoch in range(0, epochs, max(1, epochs // MOST_RATES)):
        step = plan.count_steps(0, epoch * setup.epoch)
        if step < steps:
            out.append((float(epoch), setup.lr_at(plan.find_position(step))))
    last = plan.find_position(steps - 1)
    return [*out, (plan.find_position(steps) / setup.epoch, setup.lr_at(last))]


def _sent(exchange: WorkloadExchange, nbytes: int, hosts: int, ranks: int) -> float:
    if ranks == 1:
        return 0.0
    m, per_host = (hosts, ranks // hosts) if hosts > 1 and ranks % hosts == 0 else (ranks, 1)
    any_link = Link(0.0, 1.0)  # the bytes do not depend on it
    algorithm: Algorithm = "ring" if exchange.algorithm == "auto" else exchange.algorithm  # type: ignore[assignment]
    wire = exchange.wire_ratio if hosts > 1 else 1.0
    return count_bytes_out_of_host(algorithm, nbytes, Network(m, per_host, any_link, any_link, 1.0), wire_ratio=wire)


def _where(setup: Setup) -> Where:
    return "device" if _device_type(setup) == "cuda" else "host"


def _beside(setup: Setup) -> list[Part]:
    """What stays in a rank's memory beside weights, gradients and the optimizer's state."""
    masters, device = _masters_bytes(setup), _where(setup)
    return [
        Part("masters", masters, device, "fp32"),
        Part("gradients of masters", masters, device, "fp32"),
        Part("buffers", sum(map(_size, setup.model.buffers())), device),
        Part("averaged weights", _averaged_bytes(setup), device),
        Part("looked at", _watched_bytes(setup), device, "layers before a logging step, and what it changed"),
    ]


def _memory(setup: Setup, workload: Workload, share: int, micro: int, ranks: int) -> list[Part]:
    """What one rank needs, each kind at its largest; they are not all there at the same moment."""
    recipe, model, sample = setup.recipe, setup.model, workload.input.decoded_bytes
    device = _where(setup)
    gpu = device == "device"
    weights, gradients = sum(map(_size, model.parameters())), workload.step.exchange.gradient_bytes
    copies = f"fp32; the copies in {recipe.precision} are with what is kept"
    about = "" if recipe.precision == "fp32" or setup.masters is not None else copies
    wide = 4 if recipe.augment.normalise else 1
    largest = max(layer.activation_bytes for layer in workload.layers)
    ahead, of_ring = recipe.data.prefetch_batches, share
    if recipe.data.train == SYNTHETIC:  # every rank makes one whole batch
        ahead, of_ring = 1, setup.plan.largest_batch
    found = [
        Part("weights", weights, device, about),
        *_beside(setup),
        Part("gradients", gradients, device),
        Part("buckets", gradients if ranks > 1 else 0, device, "gradients on their way"),
        Part("optimizer state", workload.step.update.state_bytes, device, recipe.optimizer.name),
        Part("kept for backward", workload.saved_bytes(micro), device, f"a micro-batch of {micro:,}"),
        Part("on the way back", micro * 2 * largest, device, "gradients of activations: twice the largest layer's"),
        Part("batch", share * sample * wide, device, f"{share:,} images, {'fp32' if wide == 4 else 'uint8'}"),
        Part("batch as bytes", 2 * share * sample if gpu else 0, device, "this one and the next"),
        Part("input ring", ahead * of_ring * sample, "host", f"{ahead} x {of_ring:,} images, uint8"),
        Part(
            "copy for a checkpoint",
            -(-workload.run.checkpoint_bytes // ranks) if recipe.checkpoint.asynchronous else 0,
            "host",
        ),
    ]
    return [part for part in found if part.bytes]
