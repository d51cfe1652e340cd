"""Alternatives to plain data parallelism, by the same costs, and the memory of a device that each of them needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from headway.core import collectives
from headway.core.collectives import Network
from headway.core.text_format import format_bytes
from headway.core.workload import Workload, WorkloadLayer
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, predict
from headway.plan.step import list_gradients

# Share of a device's memory that a step may use; allocator and libraries take the rest.
USABLE_MEMORY = 0.9
# Smallest share of the gradients in fully connected layers at which sharding these layers is considered.
MIN_DENSE_SHARE = 0.1


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that training needs on one device."""

    # Weights, gradients, all-reduce buckets, optimizer state, and anything else of constant size.
    weights: int
    # Activations saved for backward, and their gradients.
    activations: int
    capacity: float
    # Largest micro-batch that fits.
    most_samples: int

    @property
    def used(self) -> int:
        """Bytes of weights and activations together."""
        return self.weights + self.activations

    @property
    def fits(self) -> bool:
        """True if a step fits in the memory of the device."""
        return self.used <= USABLE_MEMORY * self.capacity


def estimate_memory(workload: Workload, samples: float, capacity: float, devices: int) -> DeviceMemory:
    """Estimates the memory of one device as the dry run does, without prefetched batches.

    Args:
        samples: micro-batch of the device; below 1: a strip of an image. capacity: bytes of the device.
        devices: number that exchange gradients.
    """
    # With several devices each gradient exists twice: in the parameter and in the all-reduce bucket.
    gradients = sum(layer.gradient_bytes for layer in workload.layers) * (2 if devices > 1 else 1)
    weights = gradients + sum(layer.weight_bytes for layer in workload.layers)
    weights += workload.step.update.state_bytes + workload.step.update.beside_bytes
    # Backward holds the gradients of two activations at a time: of a layer's output and of its input.
    fixed, back = workload.count_saved_bytes(0), 2 * max(layer.activation_bytes for layer in workload.layers)
    each = workload.count_saved_bytes(1) - fixed + back
    most = max(0, math.floor((USABLE_MEMORY * capacity - weights - fixed) / max(1, each)))
    whole = samples if samples < 1 else math.ceil(samples)
    return DeviceMemory(weights, round(fixed + whole * each), capacity, most)


@final
@dataclass(frozen=True)
class Strategy:
    """One way to spread a job over devices."""

    name: str
    images_s: float
    # Time to the target; `gain`: how many times as soon as with data parallelism.
    hours: float
    gain: float
    memory: DeviceMemory
    # Price of the strategy, in words.
    note: str


def compare_strategies(workload: Workload, job: TrainingJob, cluster: Cluster, nodes: int) -> list[Strategy]:
    """Compares the strategies for a job, the fastest first; plain data parallelism is one of them.

    If its step does not fit in memory, strategies that need less of it are included.
    """
    plain = predict(job, cluster, nodes)
    each, parts = job.split_batch(plain.devices), job.count_micro_batches(plain.devices)

    def estimate(samples: float, network: Workload = workload) -> DeviceMemory:
        return estimate_memory(network, samples, cluster.device_spec.memory_bytes, plain.devices)

    memory = estimate(each)
    strategies = [Strategy("data parallel", plain.images_s, plain.hours, 1.0, memory, "")]

    def add(name: str, other: Prediction, needs: DeviceMemory, note: str) -> None:
        strategies.append(Strategy(name, other.images_s, other.hours, plain.hours / other.hours, needs, note))

    # Too large for the memory: micro-batches while one sample fits, else strips of an image.
    if not memory.fits and memory.most_samples and each > 1:
        times = math.ceil(each / memory.most_samples)
        less = each / times
        finer = replace(job, per_device=less, batch=None, accumulate=times * parts)
        many = f"{less:,.0f}" if less >= 10 else f"{less:.3g}"
        name = f"{times} micro-batches of {many} samples"
        add(name, predict(finer, cluster, nodes), estimate(less), "the same batch")
    elif not memory.fits and not memory.most_samples:
        for strips in (2, 4, 8, 16):
            if plain.strips < strips <= cluster.devices:
                shared = predict(replace(job, per_device=1 / strips, batch=None), cluster, nodes)
                note = f"a batch of {shared.batch:,.0f}"
                add(f"each image in {strips} strips", shared, estimate(1 / strips), note)
    if plain.devices == 1:
        return sorted(strategies, key=lambda one: one.hours)
    # Model parallelism for fully connected layers: activations cross the network instead of their gradients.
    if dense := find_dense_layers(workload):
        names = {layer.name for layer in dense}
        rest = workload.model_copy(update={"layers": tuple(one for one in workload.layers if one.name not in names)})
        network = cluster.build_network(nodes, spread=job.spread)
        exchange_s, received = estimate_dense_sharding(workload, network, dense, each)
        # Nothing hides this exchange: it counts as fixed time of every micro-batch.
        compute = replace(job.compute, fixed_s=job.compute.fixed_s + exchange_s)
        sharded = replace(job, gradients=tuple(list_gradients(rest)), compute=compute)
        layers = "a fully connected layer" if len(dense) == 1 else f"{len(dense)} fully connected layers"
        note = f"{format_bytes(received)} of activations per step and device instead of their gradients"
        needs = estimate(each, _shard_layers(workload, names, plain.devices))
        add(f"{layers} in {plain.devices:,} parts", predict(sharded, cluster, nodes), needs, note)
    # Autocast keeps gradients in fp32, so that only the messages can be narrower. Those of 16-bit weights are already.
    if nodes > 1 and job.wire_ratio == 1 and sum(one.nbytes for one in job.gradients) > 3 * job.parameters:
        narrow = predict(replace(job, wire_ratio=0.5), cluster, nodes)
        note = "comm.wire=bf16; with precision=bf16 alone they stay fp32"
        add("gradients sent in 16 bits between nodes", narrow, memory, note)
    for times in (2, 4):
        batch = None if job.batch is None else times * job.batch
        rarer = predict(replace(job, batch=batch, accumulate=times * parts), cluster, nodes)
        add(f"gradients of {times} steps exchanged at once", rarer, memory, f"{times} times the batch")
    return sorted(strategies, key=lambda one: one.hours)


def _shard_layers(workload: Workload, names: set[str], parts: int) -> Workload:
    """Returns the workload of one device if the layers of these names are split into parts."""

    def shard(layer: WorkloadLayer) -> WorkloadLayer:
        if layer.name not in names:
            return layer
        less = {"weight_bytes": layer.weight_bytes // parts, "gradient_bytes": layer.gradient_bytes // parts}
        return layer.model_copy(update=less)

    layers, update = tuple(map(shard, workload.layers)), workload.step.update
    # Optimizer state shrinks with the weights that it belongs to.
    share = sum(one.gradient_bytes for one in layers) / sum(one.gradient_bytes for one in workload.layers)
    less = {"state_bytes": round(share * update.state_bytes), "beside_bytes": round(share * update.beside_bytes)}
    state = update.model_copy(update=less)
    changes = {"layers": layers, "step": workload.step.model_copy(update={"update": state})}
    return workload.model_copy(update=changes)


def find_dense_layers(workload: Workload) -> list[WorkloadLayer]:
    """Finds the fully connected layers, if they hold at least a tenth of the gradients; else returns none."""
    dense = [one for one in workload.layers if one.kind == "Linear" and one.gradient_bytes and one.input_shape]
    total = workload.step.exchange.gradient_bytes
    return dense if sum(one.gradient_bytes for one in dense) >= MIN_DENSE_SHARE * total else []


def estimate_dense_sharding(
    workload: Workload, network: Network, dense: Sequence[WorkloadLayer], samples: float
) -> tuple[float, float]:
    """Estimates the exchange of layers whose outputs are split over all devices (model parallelism).

    Krizhevsky 2014 (arXiv 1404.5997), scheme (a): all devices gather the inputs of such a layer from each other and
    scatter their gradients back; weight gradients stay local. Each device computes its part of the outputs for the
    whole batch: as much work as before.

    Returns:
        Seconds per micro-batch, and bytes that a device receives in one.
    """
    ring, received, seconds = collectives.predict_cost("ring", network), 0.0, 0.0
    for layer in dense:
        nbytes = math.prod(layer.input_shape or ()) * workload.step.value_bytes * samples * network.ranks
        # An all-gather forward and a reduce-scatter backward cost as much as one all-reduce.
        seconds += ring.seconds(nbytes)
        received += 2 * nbytes
    return seconds, received


def count_useful_nodes(most_batch: float, per_device: float, devices: int) -> int:
    """Counts the nodes whose global batch stays within `most_batch` when each device has its own `per_device`."""
    return max(0, math.floor(most_batch / (per_device * devices)))
