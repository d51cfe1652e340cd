"""The memory that a rank of a recipe needs, worked out for a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch

from headway.checkpoint.checkpoints import state_of
from headway.core.row_shards import count_working_bytes, find_row_share
from headway.core.workload import Workload
from headway.data.data_recipe import SYNTHETIC
from headway.model.activation_checkpointing import list_blocks
from headway.optim.footprint import count_multiply_adds
from headway.parallel.owners import find_largest_shares
from headway.parallel.parallel_recipe import AsyncRecipe, ShardedRecipe, divides_weights
from headway.setup.train_setup import TrainSetup

MemoryPlace = Literal["device", "host"]


@final
@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Memory of one kind on one rank. `where`: its place; a run on a CPU has all of it on the host."""

    name: str
    bytes: int
    where: MemoryPlace
    what: str = ""


def list_memory(setup: TrainSetup, workload: Workload, share: int, micro_batch: int, ranks: int) -> list[MemoryItem]:
    """Lists the memory that one rank needs, each kind at its largest. Not all of it is needed at the same moment.

    Args:
        share: samples of a rank in the largest step. micro_batch: samples that go through the network at once.
    """
    recipe, model, sample = setup.recipe, setup.model, workload.input.decoded_bytes
    device = _get_memory_place(setup)
    gpu = device == "device"
    weights, gradients = sum(map(count_bytes, model.parameters())), workload.step.exchange.gradient_bytes
    # Autocast keeps its 16-bit copies of the weights for the backward pass.
    copies = f"fp32; the {recipe.precision} copies count as kept for backward"
    about = "" if recipe.precision == "fp32" or setup.precision.is_narrow else copies
    # Normalised images are fp32, all others stay bytes.
    wide = 4 if recipe.augment.normalise else 1
    # A gradient of an activation lives only until the layer before it has used it: the largest layer sets the need.
    largest = max(layer.activation_bytes for layer in workload.layers)
    ahead, of_ring = recipe.data.prefetch_batches, share
    # Of synthetic data every rank holds one whole batch.
    if recipe.data.train == SYNTHETIC:
        ahead, of_ring = 1, setup.plan.largest_batch
    is_divided = ranks > 1 and divides_weights(recipe.parallel)
    share_held = _find_held_share(setup, ranks)
    saved_bytes = workload.count_saved_bytes(micro_batch)
    # Gradients go to their owners without a copy of all.
    has_buckets = ranks > 1 and not isinstance(recipe.parallel, ShardedRecipe | AsyncRecipe)
    state_bytes = round(workload.step.update.state_bytes * _find_owned_share(setup, ranks))
    items = [
        MemoryItem("weights", round(weights * share_held), device, about),
        *list_extra_memory(setup, ranks),
        MemoryItem("gradients", round(gradients * share_held), device),
        MemoryItem(
            "blocks at work", _count_working_bytes(setup) if is_divided else 0, device, "whole weights, for now"
        ),
        MemoryItem(
            "gradients of micro-batches", gradients if is_divided and micro_batch < share else 0, device, "whole"
        ),
        MemoryItem("buckets", gradients if has_buckets else 0, device, "gradients on their way"),
        MemoryItem(
            "state of a server", _count_server_bytes(setup, workload, ranks), "host", "with mail for each process"
        ),
        MemoryItem("optimizer state", state_bytes, device, recipe.optimizer.name),
        MemoryItem("kept for backward", saved_bytes, device, f"a micro-batch of {micro_batch:,}"),
        MemoryItem(
            "activation gradients",
            micro_batch * 2 * largest,
            device,
            "gradients of activations: twice the largest layer's",
        ),
        MemoryItem("batch", share * sample * wide, device, f"{share:,} images, {'fp32' if wide == 4 else 'uint8'}"),
        # The next batch is copied while this one is in use.
        MemoryItem("batch as bytes", 2 * share * sample if gpu else 0, device, "this one and the next"),
        MemoryItem("input ring", ahead * of_ring * sample, "host", f"{ahead} x {of_ring:,} images, uint8"),
        MemoryItem(
            "copy for a checkpoint",
            -(-workload.run.checkpoint_bytes // ranks) if recipe.checkpoint.asynchronous else 0,
            "host",
        ),
    ]
    return [item for item in items if item.bytes]


def list_extra_memory(setup: TrainSetup, ranks: int = 1) -> list[MemoryItem]:
    """Lists what stays in a rank's memory beside weights, gradients and the optimizer's state."""
    share = _find_held_share(setup, ranks)
    masters, device = round(count_masters_bytes(setup) * _find_owned_share(setup, ranks)), _get_memory_place(setup)
    return [
        MemoryItem("masters", masters, device, "fp32"),
        MemoryItem("gradients of masters", masters, device, "fp32"),
        MemoryItem("buffers", sum(map(count_bytes, setup.model.buffers())), device),
        MemoryItem("averaged weights", round(_count_averaged_bytes(setup) * share), device),
        MemoryItem(
            "layer watch",
            round(_count_watched_bytes(setup) * share),
            device,
            "layers before a logging step, and their changes",
        ),
    ]


def count_checkpoint_bytes(setup: TrainSetup, state_bytes: int) -> int:
    """Counts the bytes of a checkpoint. Args: state_bytes: size of the optimizer's state after a step."""
    # The state that the optimizer has already is in both numbers.
    tensors = state_of(setup.model, setup.optimizer, setup.masters)
    begun = sum(count_bytes(value) for name, value in tensors.items() if name.startswith("optimizer/"))
    return sum(map(count_bytes, tensors.values())) - begun + state_bytes + _count_averaged_bytes(setup)


def _find_owned_share(setup: TrainSetup, ranks: int) -> float:
    """Returns the share of the optimizer's state on the rank that has most of it."""
    if divides_weights(setup.recipe.parallel):
        return _find_held_share(setup, ranks)
    if not isinstance(setup.recipe.parallel, ShardedRecipe):
        return 1.0
    stepped = {value for group in setup.optimizer.param_groups for value in group["params"]}
    named = {name: value for name, value in setup.stepped.named_parameters() if value in stepped}
    return find_largest_shares(named, ranks, count_multiply_adds(setup.optimizer, named.items()))[0]


def _find_held_share(setup: TrainSetup, ranks: int) -> float:
    """Returns the share of the weights that a rank holds between steps."""
    if not divides_weights(setup.recipe.parallel):
        return 1.0
    return find_row_share([value.shape for value in setup.model.parameters()], ranks)


def _count_working_bytes(setup: TrainSetup) -> int:
    """Counts the bytes of whole weights and gradients in a step of ranks that hold rows of all."""
    patterns = setup.recipe.activation_checkpointing
    names = list_blocks(setup.model, patterns if isinstance(patterns, tuple) else None)
    blocks = [sum(map(count_bytes, setup.model.get_submodule(name).parameters())) for name in names]
    rest = sum(map(count_bytes, setup.model.parameters())) - sum(blocks)
    return round(count_working_bytes(rest, max(blocks, default=0)))


def _count_server_bytes(setup: TrainSetup, workload: Workload, ranks: int) -> int:
    """Counts the bytes of a server of asynchronous training, beside what its process has as a worker."""
    recipe = setup.recipe.parallel
    if not isinstance(recipe, AsyncRecipe):
        return 0
    trained = workload.step.exchange.gradient_bytes
    # For each worker an inbox, an outbox, and the weights that it read, if gradients are corrected by these.
    times = ranks * (2 + (recipe.compensate != "none")) + (recipe.compensate == "adaptive")
    own = sum(map(count_bytes, setup.model.parameters())) + workload.step.update.state_bytes
    return own + round(times * trained / min(recipe.servers, ranks))


def _count_averaged_bytes(setup: TrainSetup) -> int:
    """Counts the bytes of the averaged weights or Lookahead's slow ones, with their floating-point buffers."""
    if setup.recipe.model.ema is None and setup.recipe.optimizer.lookahead is None:
        return 0
    # Averages are taken of what the optimizer steps, which with 16-bit weights are the masters.
    weights = [value for _, value in (setup.masters or setup.model).named_parameters()]
    return sum(count_bytes(value) for value in (*weights, *setup.model.buffers()) if value.is_floating_point())


def _count_watched_bytes(setup: TrainSetup) -> int:
    """Counts the bytes that `LayerStatistics` keeps in a logging step: the layers before it, and their differences."""
    observe = setup.recipe.observe
    if not observe.layer_rates and observe.on_divergence == "ignore":
        return 0
    stepped = (value for group in setup.optimizer.param_groups for value in group["params"])
    return 2 * sum(count_bytes(value) for value in stepped if value.requires_grad and value.ndim > 1)


def count_masters_bytes(setup: TrainSetup) -> int:
    """Counts the bytes of the fp32 weights that the optimizer steps in place of 16-bit ones."""
    if setup.masters is None:
        return 0
    # A parameter that is fp32 already is its own master, and has been counted.
    own = set(setup.model.parameters())
    return sum(count_bytes(value) for _, value in setup.masters.named_parameters() if value not in own)


def _get_memory_place(setup: TrainSetup) -> MemoryPlace:
    return "device" if get_device_type(setup) == "cuda" else "host"


def get_device_type(setup: TrainSetup) -> str:
    """Returns the type of the device that the recipe would train on: for fp16 a GPU, even if there is none here."""
    return "cuda" if setup.recipe.precision == "fp16" else setup.device.type


def count_bytes(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
