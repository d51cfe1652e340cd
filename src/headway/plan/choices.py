"""Other ways to spread a job over devices, by the same costs: fully connected layers in parts, images in strips,
gradients exchanged less often; and what of it finds room in a device's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from headway.core import collectives
from headway.core.collectives import Network
from headway.core.workload import Workload, WorkloadLayer
from headway.plan.answer import Answer, Job, one_answer
from headway.plan.cluster import Cluster
from headway.plan.step import gradients_of

ROOM = 0.9
"""Of a device's memory, that a step may take; the rest is the allocator's and the libraries'."""
MANY = 0.1
"""Of the gradients, that fully connected layers have where it is worth a look to have them in parts."""


@final
@dataclass(frozen=True)
class Memory:
    """Bytes of a device. Attributes: weights: with their gradients, those on their way to other devices, the
    optimizer's state, and what else stays there. activations: of a forward pass, which backward wants, and their
    gradients. most_samples: that find room."""

    weights: int
    activations: int
    capacity: float
    most_samples: int

    @property
    def used(self) -> int:
        return self.weights + self.activations

    @property
    def fits(self) -> bool:
        return self.used <= ROOM * self.capacity


def memory(workload: Workload, samples: float, capacity: float, devices: int) -> Memory:
    """As the dry run has it of one rank, without batches that are ready.

    Args: samples: of a device at once; less than one: a strip of one. capacity: bytes. devices: that exchange.
    """
    gradients = sum(layer.gradient_bytes for layer in workload.layers) * (2 if devices > 1 else 1)
    weights = gradients + sum(layer.weight_bytes for layer in workload.layers)
    weights += workload.step.update.state_bytes + workload.step.update.beside_bytes
    none, back = workload.saved_bytes(0), 2 * max(layer.activation_bytes for layer in workload.layers)
    one = workload.saved_bytes(1) - none + back
    most = max(0, math.floor((ROOM * capacity - weights - none) / max(1, one)))
    whole = samples if samples < 1 else math.ceil(samples)
    return Memory(weights, round(none + whole * one), capacity, most)


@final
@dataclass(frozen=True)
class Choice:
    """A way to spread it. Attributes: images_s, hours: with it. gain: times as soon at the target as by data
    parallelism. memory: of a device. note: what it takes."""

    name: str
    images_s: float
    hours: float
    gain: float
    memory: Memory
    note: str


def choices(workload: Workload, job: Job, cluster: Cluster, nodes: int) -> list[Choice]:
    """The best first; plain data parallelism among them. Where its step finds no room, also what takes less of it."""
    plain = one_answer(job, cluster, nodes)
    network = cluster.network(nodes, spread=job.spread)
    each = job.per_device_of(plain.devices)

    def held(samples: float, of: Workload = workload) -> Memory:
        return memory(of, samples, cluster.of.memory_bytes, plain.devices)

    room = held(each)
    found = [Choice("data parallel", plain.images_s, plain.hours, 1.0, room, "")]

    def add(name: str, other: Answer, kept: Memory, note: str) -> None:
        found.append(Choice(name, other.images_s, other.hours, plain.hours / other.hours, kept, note))

    if not room.fits and room.most_samples and each > 1:
        times = math.ceil(each / room.most_samples)
        less = each / times
        parts = replace(job, per_device=less, batch=None, accumulate=times * job.accumulate)
        many = f"{less:,.0f}" if less >= 10 else f"{less:.3g}"
        add(f"{times} micro-batches of {many} samples", one_answer(parts, cluster, nodes), held(less), "the same batch")
    elif not room.fits and not room.most_samples:
        for strips in (2, 4, 8, 16):
            if plain.strips < strips <= cluster.devices:
                shared = one_answer(replace(job, per_device=1 / strips, batch=None), cluster, nodes)
                note = f"a batch of {shared.batch:,.0f}"
                add(f"each image in {strips} strips", shared, held(1 / strips), note)
    if plain.devices == 1:
        return sorted(found, key=lambda one: one.hours)
    if dense := dense_layers(workload):
        names = {layer.name for layer in dense}
        rest = workload.model_copy(update={"layers": tuple(one for one in workload.layers if one.name not in names)})
        more_s, moved = dense_in_parts(workload, network, dense, each)
        kept = replace(job, gradients=tuple(gradients_of(rest)))
        less_held = held(each, _with_parts(workload, names, plain.devices))
        layers = "a fully connected layer" if len(dense) == 1 else f"{len(dense)} fully connected layers"
        note = f"{moved / 1e6:,.1f} MB of activations a step and device, in place of their gradients"
        add(f"{layers} in {plain.devices:,} parts", _longer(kept, cluster, nodes, more_s), less_held, note)
    for times in (2, 4):
        batch = None if job.batch is None else times * job.batch
        rarer = one_answer(replace(job, batch=batch, accumulate=times * job.accumulate), cluster, nodes)
        add(f"gradients of {times} steps exchanged at once", rarer, room, f"{times} times the batch")
    return sorted(found, key=lambda one: one.hours)


def _longer(job: Job, cluster: Cluster, nodes: int, seconds: float) -> Answer:
    """With so much more in each micro-batch that nothing hides."""
    compute = replace(job.compute, fixed_s=job.compute.fixed_s + seconds)
    return one_answer(replace(job, compute=compute), cluster, nodes)


def _with_parts(workload: Workload, names: set[str], parts: int) -> Workload:
    """Whose layers of these names are in parts; and so are the optimizer's state of them, and what is beside it."""

    def part(layer: WorkloadLayer) -> WorkloadLayer:
        if layer.name not in names:
            return layer
        less = {"weight_bytes": layer.weight_bytes // parts, "gradient_bytes": layer.gradient_bytes // parts}
        return layer.model_copy(update=less)

    layers, update = tuple(map(part, workload.layers)), workload.step.update
    share = sum(one.gradient_bytes for one in layers) / sum(one.gradient_bytes for one in workload.layers)
    less = {"state_bytes": round(share * update.state_bytes), "beside_bytes": round(share * update.beside_bytes)}
    state = update.model_copy(update=less)
    changes = {"layers": layers, "step": workload.step.model_copy(update={"update": state})}
    return workload.model_copy(update=changes)


def dense_layers(workload: Workload) -> list[WorkloadLayer]:
    """Fully connected ones, of networks in which they hold a tenth of the gradients or more."""
    found = [one for one in workload.layers if one.kind == "Linear" and one.gradient_bytes and one.input_shape]
    total = workload.step.exchange.gradient_bytes
    return found if sum(one.gradient_bytes for one in found) >= MANY * total else []


def dense_in_parts(
    workload: Workload, network: Network, dense: Sequence[WorkloadLayer], each: float
) -> tuple[float, float]:
    """(seconds, bytes that a device receives) in a micro-batch, where each device has a part of these layers' outputs.

    Krizhevsky 2014 (arXiv 1404.5997), scheme (a): all inputs of such a layer are brought to all devices, and their
    gradients back; the layer's own gradients stay where they are. The batch of the whole is in each device then, which
    has its part of the layer's products to do: the same work as before.
    """
    ring, moved, taken = collectives.predict_cost("ring", network), 0.0, 0.0
    for layer in dense:
        nbytes = math.prod(layer.input_shape or ()) * workload.step.value_bytes * each * network.ranks
        taken += ring.seconds(nbytes)  # an all-gather forward and a reduce-scatter backward: an all-reduce together
        moved += 2 * nbytes
    return taken, moved


def useful_nodes(most_batch: float, per_device: float, devices: int) -> int:
    """Nodes up to which each device has its batch and the whole one is not larger than learns well."""
    return max(0, math.floor(most_batch / (per_device * devices)))
