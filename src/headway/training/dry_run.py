"""A dry run: opens and builds all that a recipe names, works out its run, and trains nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from headway.core.collectives import Algorithm, Link, Network, count_bytes_out_of_host
from headway.core.errors import UsageError, UserCodeError
from headway.core.recipe import LoadedRecipe
from headway.core.workload import (
    Workload,
    WorkloadExchange,
    WorkloadInput,
    WorkloadLayer,
    WorkloadPhase,
    WorkloadRun,
    WorkloadStep,
    WorkloadUpdate,
)
from headway.data.augment_recipe import HOST_AUGMENTATIONS
from headway.data.data_recipe import SYNTHETIC, SyntheticRecipe
from headway.data.resolution import compute_progressive_size
from headway.launch.hosts import parse_hosts
from headway.model.batch_norm import list_running_statistics
from headway.model.fake_tensors import use_fake_tensors
from headway.model.graph_breaks import CompileReport, try_compiling
from headway.model.layer_profile import PROFILE_BATCH_SIZES, profile_layers
from headway.model.model_size import measure_model_size
from headway.optim.footprint import count_multiply_adds, estimate_footprint, find_product_precision
from headway.parallel.parallel_recipe import (
    AsyncRecipe,
    ExpertsRecipe,
    HybridRecipe,
    SpatialRecipe,
    TowersRecipe,
    divides_weights,
)
from headway.setup.augment_place import PlaceChoice, choose_augment_place, has_place
from headway.setup.build import build_setup
from headway.setup.checks import check_batch_size, check_places
from headway.setup.inputs import DryRunOptions
from headway.setup.micro_batch import estimate_micro_batch
from headway.setup.prepare import prepare_batch
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.setup.refused_strategies import list_refused_strategies
from headway.setup.train_setup import TrainSetup
from headway.training.dry_run_memory import (
    MemoryItem,
    count_bytes,
    count_checkpoint_bytes,
    count_masters_bytes,
    get_device_type,
    list_extra_memory,
    list_memory,
)
from headway.training.runs import load_recipe

MOST_RATES = 10_000
"""Largest number of epochs whose learning rates are listed."""

WITHOUT_DATA = (
    "A dry run needs no data if you give their size, for example ImageNet's: headway train RECIPE --dry-run "
    "--samples 1281167 --classes 1000."
)


@final
@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The run that a recipe would make.

    Attributes:
        loaded: the recipe with every resolved `auto`.
        hosts, ranks: their numbers.
        rank_batch: samples on one rank in a step of the largest batch, at most.
        micro_batch: samples that go through the network at once. accumulation: micro-batches in `rank_batch`.
        rates: (epoch, learning rate of its first step) for each epoch; at the end (epochs, that of the last step).
        memory: the memory of one rank.
        sent_bytes: bytes that the busiest host sends to others in a step; on one host, those that a rank sends.
        augment_place: place of crop, flip and translate, with the reason; None: the recipe has none of them.
        on_shapes_only: the layers were measured on tensors without values, which takes no computation.
        compilable: how torch.compile copes with the network; None if it was not asked, and with
            `activation_checkpointing`, which excludes it.
        notes: cautions about the numbers.
    """

    loaded: LoadedRecipe[TrainRecipe]
    workload: Workload
    hosts: int
    ranks: int
    rank_batch: int
    micro_batch: int
    accumulation: int
    rates: Sequence[tuple[float, float]]
    memory: Sequence[MemoryItem]
    sent_bytes: float
    augment_place: PlaceChoice | None
    on_shapes_only: bool
    compilable: CompileReport | None
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Returns it for `headway train --dry-run --json`."""
        return {
            "hosts": self.hosts,
            "ranks": self.ranks,
            "rank_batch": self.rank_batch,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "learning_rate": [{"epoch": epoch, "lr": lr} for epoch, lr in self.rates],
            "memory": [asdict(part) for part in self.memory],
            "sent_bytes": self.sent_bytes,
            "augment_place": None if self.augment_place is None else self.augment_place._asdict(),
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
) -> DryRun:
    """Opens and builds what a recipe names, and works out its run. No cache is filled, and no step is made.

    Args:
        procs, hosts: the ranks, as on the command line. Nothing is started on the hosts.
        samples, classes, evaluation_samples: size of the data, in place of the data that the recipe names.
        compiles: try torch.compile on the network, which takes seconds.

    Raises:
        HeadwayError: see `build_setup`. UsageError: there are no data, and their size was not given.
    """
    # Hosts are only counted: nothing is started on them.
    machines = parse_hosts(procs, hosts)
    if samples is None and (classes, evaluation_samples) != (None, None):
        raise UsageError("--classes and --eval-samples go with --samples", fix=WITHOUT_DATA)
    # 1,000 classes, as ImageNet has, unless told otherwise.
    stated = None if samples is None else SyntheticRecipe(samples=samples, classes=classes or 1000)
    ranks = sum(host.procs for host in machines)
    original = load_recipe(recipe, overrides)
    loaded = resolve_batch(original, ranks)
    try:
        setup = build_setup(loaded, dry_run=DryRunOptions(stated=stated))
    except UsageError as error:
        named = [uri for uri in (loaded.recipe.data.train, loaded.recipe.data.eval) if uri is not None]
        # The error may name the path in another form, with `..` or links resolved.
        paths = {(loaded.base / Path(uri).expanduser()).resolve() for uri in named}
        # `data.train (FILE:LINE): PATH` names the key too.
        where = error.where.rpartition(": ")[2]
        if stated is None and (where in named or Path(where).resolve() in paths):
            fix = f"{error.fix.rstrip('.')}. " if error.fix else ""
            raise UsageError(error.what, where=error.where, fix=fix + WITHOUT_DATA) from None
        raise
    with closing(setup.inputs):
        # Real images where there are any: a network may branch on their size.
        images = _load_images(setup)
        measured = _measure_layers(setup, images)
        # The two cannot be combined, so an answer would be of no use.
        asked = compiles and not setup.recipe.activation_checkpointing
        fits = try_compiling(setup.model, images, setup.precision.autocast) if asked else None
        found = _build_dry_run(setup, measured, fits, len(machines), ranks, evaluation_samples)
    if isinstance(batch := original.recipe.batch, int):
        return found
    # Some strategies refuse a batch per device.
    refused = _list_refused(found.loaded.recipe.model_copy(update={"batch": batch}))
    step = found.workload.step.model_copy(update={"per_device": batch.per_device, **refused})
    return replace(found, workload=found.workload.model_copy(update={"step": step}))


def _load_images(setup: TrainSetup) -> torch.Tensor:
    """Returns a few training images as the network gets them; short of images, it repeats them."""
    images, _ = prepare_batch(setup, setup.inputs.read_first_batch(setup.recipe), 1)
    layout = torch.channels_last if setup.recipe.channels_last else torch.contiguous_format
    return images[torch.arange(max(PROFILE_BATCH_SIZES), device=images.device) % len(images)].contiguous(
        memory_format=layout
    )


def _measure_layers(setup: TrainSetup, images: torch.Tensor) -> tuple[tuple[WorkloadLayer, ...], bool]:
    """Returns the network's layers, and if they could be measured on tensors without values."""
    autocast = setup.precision.autocast
    try:
        with use_fake_tensors(setup.model, images) as (given,):
            return profile_layers(setup.model, given, autocast), True
    # The network needs values, or computes outside of torch's operations.
    except Exception:
        try:
            return profile_layers(setup.model, images, autocast), False
        except Exception as error:
            what = (
                f"the network failed on {max(PROFILE_BATCH_SIZES)} samples in training: {type(error).__name__}: {error}"
            )
            raise UserCodeError(what, where="model") from error


def _build_dry_run(
    setup: TrainSetup,
    measured: tuple[tuple[WorkloadLayer, ...], bool],
    fits: CompileReport | None,
    hosts: int,
    ranks: int,
    evaluation_samples: int | None,
) -> DryRun:
    recipe, notes = setup.recipe, list[str]()
    layers, on_shapes_only = measured
    # Rounded up: the busiest rank counts.
    share = -(-setup.plan.largest_batch // (1 if recipe.parallel.takes_whole_batches else ranks))
    check_batch_size(recipe, ranks)
    if ranks > 1:
        check_places(recipe.parallel, ranks)
    saved = sum(layer.saved_bytes for layer in layers)
    # A run measures it; here it is estimated from the bytes that a sample keeps for backward.
    micro = recipe.micro_batch
    if micro == "auto":
        micro, reason = estimate_micro_batch(share, saved, setup.device)
        notes.append(f"micro_batch: auto is estimated ({reason}); a run measures it.")
    parts = 1 if micro is None else -(-share // min(micro, share))
    if not on_shapes_only:
        notes.append(f"The layers were measured on {max(PROFILE_BATCH_SIZES)} images: the network needs their values.")
    if recipe.compile:
        notes.append("The memory kept for backward was measured without torch.compile, which keeps less.")
    if recipe.activation_checkpointing:
        notes.append(
            "With activation_checkpointing, the inputs of the modules that are computed again are not counted."
        )
    if setup.device.type == "cpu" and recipe.precision == "fp16":
        notes.append("Training in fp16 needs a GPU, and there is none here.")
    if ranks > 1 and isinstance(recipe.parallel, SpatialRecipe | HybridRecipe | TowersRecipe | ExpertsRecipe):
        what = f"parallel.strategy {recipe.parallel.strategy} divides them, and exchanges other values"
        notes.append(f"Memory and exchange are those of data parallel training: {what}.")
    workload = _build_workload(setup, layers, micro, ranks, evaluation_samples)
    if recipe.data.eval is not None and workload.run.evaluation_samples is None:
        notes.append("The evaluation set is not there. Give its size, for example ImageNet's: --eval-samples 50000.")
    return DryRun(
        loaded=setup.loaded,
        workload=workload,
        hosts=hosts,
        ranks=ranks,
        rank_batch=share,
        micro_batch=-(-share // parts),
        accumulation=parts,
        rates=_list_learning_rates(setup),
        memory=list_memory(setup, workload, share, -(-share // parts), ranks),
        sent_bytes=_count_sent_bytes(setup, workload.step.exchange, hosts, ranks),
        augment_place=_find_augment_place(setup),
        on_shapes_only=on_shapes_only,
        compilable=fits,
        notes=notes,
    )


def _build_workload(
    setup: TrainSetup, layers: tuple[WorkloadLayer, ...], micro: int | None, ranks: int, evaluation_samples: int | None
) -> Workload:
    recipe, inputs = setup.recipe, setup.inputs
    own_share = recipe.optimizer.resolve_paths(setup.loaded.base).measure_state_share(setup.optimizer)
    kept = estimate_footprint(setup.optimizer, own_share)
    trained = sum(layer.gradient_bytes for layer in layers)
    stepped = sum(count_bytes(value) for group in setup.optimizer.param_groups for value in group["params"])
    # Clipping reads each gradient for its norm, then reads and writes it.
    moved = kept.moved_bytes + 3 * count_masters_bytes(setup) + 3 * stepped * (recipe.optimizer.clip_norm is not None)
    statistics = sum(map(count_bytes, list_running_statistics(setup.model)))
    total, (height, width) = setup.plan.find_position(setup.steps), setup.size
    held_out = len(inputs.eval) if inputs.eval is not None else evaluation_samples
    evaluates, saves = recipe.data.eval is not None, recipe.checkpoint
    train = inputs.train
    place, crops = _find_augment_place(setup), _list_crops(recipe)
    crops_there = place is not None and place.where == "device_crops"
    on_host = recipe.augment.list_augmentations() & HOST_AUGMENTATIONS if place and place.where == "host" else set()
    return Workload(
        name=recipe.name,
        layers=_add_update_products(setup, layers),
        input=WorkloadInput(
            height=height,
            width=width,
            channels=setup.channels,
            decoded_bytes=height * width * setup.channels,
            encoded_bytes=None if train is None else float(train.length.mean()),
            source_pixels=None if train is None else float((train.width.astype(np.float64) * train.height).mean()),
            on_host=(*([] if crops_there else crops), *(name for name in ("flip", "translate") if name in on_host)),
            on_device=(*(crops if crops_there else ()), *_list_augmentations(recipe, on_host)),
        ),
        step=WorkloadStep(
            batch=recipe.global_batch,
            ranks=ranks,
            micro_batch=micro,
            precision=setup.precision.name,
            half_weights=setup.precision.is_narrow,
            compiled=bool(recipe.compile),
            update=WorkloadUpdate(
                optimizer=recipe.optimizer.name,
                state_bytes=kept.state_bytes,
                passes=moved / stepped,
                product_precision=find_product_precision(setup.optimizer),
                beside_bytes=sum(part.bytes for part in list_extra_memory(setup)),
            ),
            exchange=WorkloadExchange(
                gradient_bytes=trained,
                statistics_bytes=statistics,
                algorithm=recipe.comm.algorithm,
                wire_ratio=_compute_wire_ratio(setup),
                bucket_bytes=None if recipe.comm.bucket_mb == "auto" else round(recipe.comm.bucket_mb * 1e6),
                sync_batch_norm=recipe.comm.batch_norm == "sync",
            ),
            **_list_refused(recipe),
        ),
        run=WorkloadRun(
            samples=setup.epoch,
            epochs=total / setup.epoch,
            steps=setup.steps,
            phases=_list_phases(setup, sum(layer.forward_multiply_adds for layer in layers)),
            evaluations=_count_occurrences(setup, recipe.evaluate.every_epochs) if evaluates else 0,
            evaluation_samples=held_out if evaluates else 0,
            checkpoints=_count_occurrences(setup, saves.every_epochs, saves.every_steps),
            checkpoint_bytes=count_checkpoint_bytes(setup, kept.state_bytes),
        ),
    )


def _add_update_products(setup: TrainSetup, layers: Sequence[WorkloadLayer]) -> tuple[WorkloadLayer, ...]:
    """Adds the multiply-adds of the optimizer's matrix products to the layers that have the weights."""
    by_layer = Counter[str]()
    for name, count in count_multiply_adds(setup.optimizer, setup.stepped.named_parameters()).items():
        by_layer[name.rpartition(".")[0]] += count  # type: ignore[assignment]
    return tuple(one.model_copy(update={"update_multiply_adds": float(by_layer[one.name])}) for one in layers)


def _list_refused(recipe: TrainRecipe) -> dict[str, Any]:
    return {
        "refused_strategies": list_refused_strategies(recipe),
        "refused_with_micro_batches": list_refused_strategies(recipe.model_copy(update={"micro_batch": 1})),
    }


def _compute_wire_ratio(setup: TrainSetup) -> float:
    """Returns the bytes that cross between hosts, as a share of the gradients' bytes."""
    # A 16-bit wire halves fp32 gradients only; those of 16-bit weights are sent as they are.
    if setup.recipe.comm.wire == "fp32":
        return 1.0
    trained = [value for value in setup.model.parameters() if value.requires_grad]
    halved = sum(count_bytes(value) for value in trained if value.dtype == torch.float32) / 2
    return 1.0 - halved / sum(map(count_bytes, trained))


def _find_augment_place(setup: TrainSetup) -> PlaceChoice | None:
    """Returns the place of crop, flip and translate that a run here would choose; None if it has none of them."""
    if setup.recipe.data.train == SYNTHETIC or not has_place(setup.recipe):
        return None
    return choose_augment_place(setup.loaded, get_device_type(setup), setup.train)


def _list_crops(recipe: TrainRecipe) -> tuple[str, ...]:
    return ("random crop",) if recipe.data.crop.is_random else ()


def _list_augmentations(recipe: TrainRecipe, on_host: Set[str]) -> tuple[str, ...]:
    options = recipe.augment
    on_device = options.list_augmentations() - on_host
    # In the order in which they are applied, that of the recipe's keys.
    augmentations = (name for name in type(options).model_fields if name in on_device)
    later = {"normalise": options.normalise, "transform": recipe.transform is not None}
    return (*augmentations, *(name for name, is_asked in later.items() if is_asked))


def _list_phases(setup: TrainSetup, forward: int) -> tuple[WorkloadPhase, ...]:
    """Lists the phases of the run: consecutive steps with one batch size and one image size."""
    plan, steps, progressive = setup.plan, setup.steps, setup.recipe.data.progressive
    # A phase begins when the batch or the image size changes.
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
            size = compute_progressive_size(progressive, setup.size, position // setup.epoch)
        if size not in counted:
            counted[size] = _count_multiply_adds(setup, size)
        phase = WorkloadPhase(
            steps=end - step,
            batch=plan.get_batch_size(position),
            height=size[0],
            width=size[1],
            forward_multiply_adds=counted[size],
        )
        # Joined with the phase before if only the number of steps differs.
        if out and out[-1].model_copy(update={"steps": 1}) == phase.model_copy(update={"steps": 1}):
            phase = phase.model_copy(update={"steps": phase.steps + out.pop().steps})
        out.append(phase)
    return tuple(out)


def _count_multiply_adds(setup: TrainSetup, size: tuple[int, int]) -> int:
    """Counts the multiply-adds of forward on one image of another size."""
    images = torch.zeros(1, setup.channels, *size, device=setup.device)
    try:
        with use_fake_tensors(setup.model, images) as (given,), setup.precision.autocast():
            model_size = measure_model_size(setup.model, given)
    except Exception:
        with setup.precision.autocast():
            model_size = measure_model_size(setup.model, images)
    return model_size.multiply_adds or 0


def _count_occurrences(setup: TrainSetup, every_epochs: float, every_steps: int | None = None) -> int:
    """Counts how often an action runs that is due at such intervals, and after the last step."""
    plan, steps = setup.plan, setup.steps
    if every_steps is not None:
        return steps // every_steps + (steps % every_steps > 0)
    interval = every_epochs * setup.epoch
    if interval <= setup.recipe.global_batch:
        return steps
    whole = math.floor(plan.find_position(steps) / interval)

    def find_step(number: int) -> int:
        return plan.count_steps(0, math.ceil(number * interval))

    # With intervals longer than a step, each falls on a step of its own.
    if interval >= plan.largest_batch:
        return whole + (find_step(whole) < steps)
    return len({steps, *map(find_step, range(1, whole + 1))})


def _list_learning_rates(setup: TrainSetup) -> list[tuple[float, float]]:
    """Lists the learning rate at the beginning of each epoch (every k-th, if there are very many) and at the end."""
    plan, steps = setup.plan, setup.steps
    out, epochs = [], math.ceil(plan.find_position(steps) / setup.epoch)
    for epoch in range(0, epochs, max(1, epochs // MOST_RATES)):
        step = plan.count_steps(0, epoch * setup.epoch)
        if step < steps:
            out.append((float(epoch), setup.lr_at(plan.find_position(step))))
    last = plan.find_position(steps - 1)
    return [*out, (plan.find_position(steps) / setup.epoch, setup.lr_at(last))]


def _count_sent_bytes(setup: TrainSetup, exchange: WorkloadExchange, hosts: int, ranks: int) -> float:
    """Counts the bytes that the busiest host sends in a step; on one host, those that a rank sends."""
    if ranks == 1:
        return 0.0
    nbytes = exchange.gradient_bytes
    # Ranks that do not divide evenly among hosts are treated as a host each.
    m, per_host = (hosts, ranks // hosts) if hosts > 1 and ranks % hosts == 0 else (ranks, 1)
    # The bytes do not depend on the speed of the links.
    any_link = Link(0.0, 1.0)
    algorithm: Algorithm = "ring" if exchange.algorithm == "auto" else exchange.algorithm  # type: ignore[assignment]
    wire = exchange.wire_ratio if hosts > 1 else 1.0
    if isinstance(setup.recipe.parallel, AsyncRecipe):
        # A step is one update: the server that has all weights sends them to a worker, which seldom is its own.
        return nbytes * (m - 1) / m / min(setup.recipe.parallel.servers, m)
    if divides_weights(setup.recipe.parallel):
        ring = count_bytes_out_of_host("ring", nbytes, Network(m, per_host, any_link, any_link, 1.0))
        # Weights are gathered twice, by half of a ring's all-reduce each. On CPUs each rank sends its gradients itself.
        scatter = ring / 2 if setup.device.type == "cuda" else per_host * nbytes * (m - 1) / m
        return ring + scatter
    return count_bytes_out_of_host(algorithm, nbytes, Network(m, per_host, any_link, any_link, 1.0), wire_ratio=wire)
