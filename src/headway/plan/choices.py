"""Other ways to spread a job over devices, by the same costs: fully connected layers in parts, images in strips,
gradients exchanged less often; and what of it finds room in a device's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from headway.core import collectives
from headway.core.collectives import Network
from headway.core.profile import Layer, Workload
from headway.plan.answer import Job, answers
from headway.plan.cluster import Cluster
from headway.plan.step import BUCKET_BYTES, buckets_of, step

ROOM = 0.9
"""Of a device's memory, that a step may take; the rest is the allocator's and the libraries'."""


@final
@dataclass(frozen=True)
class Memory:
    """Bytes of a device. Attributes: weights: with their gradients and the optimizer's state. activations: of a
    forward pass, which backward wants. most_samples: that find room."""

    weights: int
    activations: int
    capacity: float
    most_samples: int

    @property
    def fits(self) -> bool:
        return self.weights + self.activations <= ROOM * self.capacity


def memory(workload: Workload, samples: float, capacity: float) -> Memory:
    """Args: samples: of a device at once. capacity: bytes."""
    weights = sum(layer.weight_bytes + layer.gradient_bytes for layer in workload.layers)
    weights += workload.step.update.state_bytes
    one, none = workload.saved_bytes(1), workload.saved_bytes(0)
    left = ROOM * capacity - weights - none
    most = max(0, math.floor(left / max(1, one - none)))
    return Memory(weights, workload.saved_bytes(math.ceil(samples)), capacity, most)


@final
@dataclass(frozen=True)
class Choice:
    """A way to spread it. Attributes: images_s: with it; gain: over plain data parallelism. note: what it takes."""

    name: str
    images_s: float
    gain: float
    note: str


def choices(workload: Workload, job: Job, cluster: Cluster, nodes: int) -> list[Choice]:
    """The best first; plain data parallelism among them."""
    plain = answers(job, cluster, [nodes])[0]
    devices, each = plain.devices, job.per_device_of(plain.devices)
    network = cluster.network(nodes, spread=job.spread)
    found = [Choice("data parallel", plain.batch / plain.step.seconds, 1.0, "")]

    def add(name: str, seconds: float, note: str, batch: float = plain.batch) -> None:
        found.append(Choice(name, batch / seconds, batch / seconds / found[0].images_s, note))

    dense = dense_layers(workload)
    if dense and devices > 1:
        seconds, moved = dense_in_parts(workload, job, cluster, network, dense, each)
        note = f"{moved / 1e6:,.1f} MB of activations a step and device, in place of their gradients"
        add(f"{len(dense)} fully connected layers in {devices:,} parts", seconds, note)
    for strips in (2, 4):
        if devices > 1 and strips <= cluster.devices and each * strips >= 1:
            seconds = in_strips(workload, job, cluster, network, strips, each)
            add(f"each image in {strips} strips", seconds, "the same batch over all devices, with edges exchanged")
    if devices > 1:
        for times in (2, 4):
            more = replace(job, accumulate=job.accumulate * times)
            told = step(
                more.compute, each, more.buckets, network, jitter=cluster.jitter, among=cluster.algorithms,
                wire_ratio=more.wire_ratio, accumulate=more.accumulate, backward=more.backward,
            )  # fmt: skip
            add(
                f"gradients of {times} steps exchanged at once",
                told.seconds,
                f"{times} times the batch",
                times * plain.batch,
            )
    return sorted(found, key=lambda one: -one.images_s)


def dense_layers(workload: Workload) -> list[Layer]:
    """Fully connected ones, of networks in which they hold a tenth of the gradients or more."""
    found = [one for one in workload.layers if one.kind == "Linear" and one.gradient_bytes and one.input_shape]
    total = workload.step.exchange.gradient_bytes
    return found if sum(one.gradient_bytes for one in found) >= 0.1 * total else []


def dense_in_parts(
    workload: Workload, job: Job, cluster: Cluster, network: Network, dense: Sequence[Layer], each: float
) -> tuple[float, float]:
    """(seconds of a step, bytes that a device receives) where each device has a part of these layers' outputs.

    Krizhevsky 2014 (arXiv 1404.5997), scheme (a): all inputs of such a layer are brought to all devices, and their
    gradients back; the layer's own gradients stay where they are. The batch of the whole is in each device then, which
    has its part of the layer's products to do: the same work as before.
    """
    names = {one.name for one in dense}
    rest = workload.model_copy(update={"layers": tuple(one for one in workload.layers if one.name not in names)})
    told = step(
        job.compute, each, buckets_of(rest, nbytes=BUCKET_BYTES), network, jitter=cluster.jitter,
        among=cluster.algorithms, wire_ratio=job.wire_ratio, accumulate=job.accumulate, backward=job.backward,
    )  # fmt: skip
    width = 4 if workload.step.precision == "fp32" else 2
    moved = seconds = 0.0
    for layer in dense:
        nbytes = math.prod(layer.input_shape or ()) * width * each * network.ranks
        ring = collectives.line("ring", network)
        seconds += ring.seconds(nbytes)  # an all-gather forward and a reduce-scatter backward: an all-reduce together
        moved += 2 * nbytes
    return told.seconds + seconds * job.accumulate, moved


def in_strips(workload: Workload, job: Job, cluster: Cluster, network: Network, strips: int, each: float) -> float:
    """Seconds of a step where so many devices of a node share each image, and each has as many images as they had
    together.

    Every convolution exchanges one row of its input with each neighbour, forward and backward: what one of 3x3 wants.
    The gradients are exchanged by all, as before.
    """
    width, link = 4 if workload.step.precision == "fp32" else 2, network.inside
    edges = 0.0
    for layer in workload.layers:
        shape = layer.input_shape
        if layer.forward_multiply_adds and shape is not None and len(shape) == 3 and shape[1] > 1:
            row = shape[0] * shape[2] * width * each * strips
            edges += 2 * 2 * link.seconds(row)
    told = step(
        job.compute, each, job.buckets, network, jitter=cluster.jitter, among=cluster.algorithms,
        wire_ratio=job.wire_ratio, accumulate=job.accumulate, backward=job.backward,
    )  # fmt: skip
    return told.seconds + edges * job.accumulate


def useful_nodes(most_batch: float, per_device: float, devices: int) -> int:
    """Nodes up to which each device has its batch and the whole one is not larger than learns well."""
    return max(0, math.floor(most_batch / (per_device * devices)))
