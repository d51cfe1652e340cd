"""What so many nodes would give: images/s, time to the target, energy and cost, what limits, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from headway.core.errors import UsageError
from headway.plan.cluster import Cluster
from headway.plan.convergence import Epochs
from headway.plan.step import BACKWARD, Bucket, Compute, Step, step

Limit = Literal["computing", "fixed time of a step", "exchange", "slowest device", "loading", "storage"]

PAYS = 0.5
"""Of twice the nodes, that has to be left of twice the speed for them to pay."""
MOVE = 0.2
"""By how much an input is moved, to see what it moves."""


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained. Attributes:
    samples: of the training set. encoded_bytes: of one, that is read; None: unknown, so that storage does not limit.
    per_device: samples of a device in a step; or `batch`: of all devices, whatever their number.
    accumulate: micro-batches of a step.
    buckets: of gradients. wire_ratio: bytes between nodes over theirs.
    epochs: by batch; or a number, whatever the batch.
    evaluations: of a run; evaluation_s: of one, on one device. start_s: until the first step.
    compute_error: share by which `compute` may be wrong, one standard deviation.
    spread: its nodes lie among those of others, in all groups, so that what they send goes over the narrow links.
    """

    samples: int
    encoded_bytes: float | None
    compute: Compute
    buckets: tuple[Bucket, ...]
    epochs: Epochs | float
    per_device: float | None = None
    batch: float | None = None
    accumulate: int = 1
    wire_ratio: float = 1.0
    backward: float = BACKWARD
    evaluations: int = 0
    evaluation_s: float = 0.0
    start_s: float = 0.0
    compute_error: float = 0.03
    spread: bool = False

    def per_device_of(self, devices: int) -> float:
        """Samples of a device at once."""
        if self.per_device is not None:
            return self.per_device
        assert self.batch is not None
        return self.batch / devices / self.accumulate

    def epochs_of(self, batch: float) -> float:
        return self.epochs if isinstance(self.epochs, int | float) else self.epochs.epochs(batch)


@final
@dataclass(frozen=True)
class Answer:
    """Of so many nodes. Attributes:
    batch: of all devices. step: what one takes, before the input limits.
    images_s: in training. epochs, hours: to the target. kwh, cost: of all nodes; None: their power or price is unknown.
    limit: what takes the largest part of what more devices do not divide; or what is slower than the devices.
    scaling: images/s of a node over those of the smallest plan's. statistical: epochs of its batch over those of this.
    low_hours, high_hours: 90 % of what is known of the inputs.
    warning: a sentence, or empty.
    """

    nodes: int
    devices: int
    batch: float
    step: Step
    images_s: float
    input_images_s: float
    epochs: float
    hours: float
    low_hours: float
    high_hours: float
    kwh: float | None
    cost: float | None
    limit: Limit
    scaling: float
    statistical: float
    warning: str

    @property
    def efficiency(self) -> float:
        return self.scaling * self.statistical


def answers(job: Job, cluster: Cluster, nodes: Sequence[int]) -> list[Answer]:
    """One for each count of nodes, ascending; efficiencies are over the first one's.

    Raises:
        UsageError: counts are none, below 1 or above what the cluster has; or a batch is smaller than the devices.
    """
    counts = sorted(set(nodes))
    if not counts or counts[0] < 1:
        raise UsageError("nodes are counted from 1", where="--nodes", fix="--nodes 1..64, or --nodes 1,2,4.")
    if cluster.nodes is not None and counts[-1] > cluster.nodes:
        raise UsageError(f"{cluster.title} has {cluster.nodes} nodes, not {counts[-1]}", where="--nodes")
    if (job.per_device is None) == (job.batch is None):
        raise UsageError("a batch is given for a device, or for all together", where="--per-device")
    first = _one(job, cluster, counts[0])
    found = []
    for count in counts:
        one = _one(job, cluster, count)
        low, high = _band(job, cluster, count)
        scaling = one.images_s / count / (first.images_s / counts[0])
        found.append(
            replace(one, scaling=scaling, statistical=first.epochs / one.epochs, low_hours=low, high_hours=high)
        )
    return found


def _one(job: Job, cluster: Cluster, nodes: int) -> Answer:
    devices = nodes * cluster.devices
    each = job.per_device_of(devices)
    if each < 1:
        what = f"a batch of {job.batch:,.0f} leaves {each:.2f} samples for each of {devices:,} devices"
        raise UsageError(what, where="--batch", fix="Plan fewer nodes, a larger batch, or --per-device.")
    batch = each * devices * job.accumulate
    told = step(
        job.compute, each, job.buckets, cluster.network(nodes, spread=job.spread), jitter=cluster.jitter,
        among=cluster.algorithms, wire_ratio=job.wire_ratio, accumulate=job.accumulate, backward=job.backward,
    )  # fmt: skip
    alone = batch / told.seconds
    loading, storage = loader_images_s(cluster, nodes), storage_images_s(job, cluster, nodes)
    later, first = min(alone, loading, storage[1]), min(alone, loading, storage[0])
    epochs = job.epochs_of(batch)
    seconds = job.samples * (min(epochs, 1.0) / first + max(0.0, epochs - 1) / later)
    seconds += job.start_s + job.evaluations * job.evaluation_s / devices
    images_s = job.samples * epochs / (job.samples * (min(epochs, 1.0) / first + max(0.0, epochs - 1) / later))
    hours = seconds / 3600
    kwh = None if cluster.node.watts is None else nodes * cluster.node.watts / 1000 * hours
    cost = None if cluster.node.cost_per_hour is None else nodes * cluster.node.cost_per_hour * hours
    warning = "" if isinstance(job.epochs, int | float) else job.epochs.warning(batch)
    return Answer(
        nodes, devices, batch, told, images_s, min(loading, storage[1]), epochs, hours, hours, hours, kwh, cost,
        _limit(told, alone, loading, storage[1]), 1.0, 1.0, warning,
    )  # fmt: skip


def loader_images_s(cluster: Cluster, nodes: int) -> float:
    """Of all nodes' processors; infinite: it is not known."""
    return math.inf if cluster.node.images_s is None else nodes * cluster.node.images_s


def storage_images_s(job: Job, cluster: Cluster, nodes: int) -> tuple[float, float]:
    """(in the first epoch, later). What nodes keep of what they have read is not read again; which node reads what
    changes, so that a part of the set that one node keeps serves as large a share of its samples."""
    if job.encoded_bytes is None:
        return math.inf, math.inf
    far = cluster.storage
    total = job.samples * job.encoded_bytes
    kept = min(1.0, far.cache_gb * 1e9 / total)
    limits = [
        math.inf if far.node_gb_s is None else nodes * far.node_gb_s * 1e9 / job.encoded_bytes,
        math.inf if far.shared_gb_s is None else far.shared_gb_s * 1e9 / job.encoded_bytes,
        math.inf if far.opens_s is None or far.shards else far.opens_s,
    ]
    cold = min(limits)
    return cold, math.inf if kept >= 1 else cold / (1 - kept)


def _limit(told: Step, alone: float, loading: float, storage: float) -> Limit:
    if min(loading, storage) < alone:
        return "loading" if loading <= storage else "storage"
    parts: dict[Limit, float] = {
        "computing": told.sample_s,
        "fixed time of a step": told.fixed_s,
        "exchange": told.exposed_s,
        "slowest device": told.slowest_s,
    }
    return max(parts, key=lambda name: parts[name])


def pays_until(found: Sequence[Answer]) -> int:
    """The most nodes that still pay: from one plan to the next, the time falls at least by half of what it would if it
    fell as the nodes grow."""
    best = found[0]
    for one in found[1:]:
        grown, faster = math.log(one.nodes / best.nodes), math.log(best.hours / one.hours)
        if faster < PAYS * grown:
            break
        best = one
    return best.nodes


@final
@dataclass(frozen=True)
class Moved:
    """Attributes: name: of an input. hours: to the target, over those that are planned, with 20 % less, and more."""

    name: str
    less: float
    more: float

    @property
    def size(self) -> float:
        return max(abs(math.log(self.less)), abs(math.log(self.more)))


def inputs(job: Job, cluster: Cluster) -> dict[str, Callable[[float], tuple[Job, Cluster]]]:
    """name -> what is planned with so many times as much of it."""
    far, near = cluster.between, cluster.inside
    of_compute, epochs = job.compute, job.epochs

    def computing(by: float) -> tuple[Job, Cluster]:
        return replace(job, compute=replace(of_compute, sample_s=of_compute.sample_s / by)), cluster

    def fixed(by: float) -> tuple[Job, Cluster]:
        return replace(job, compute=replace(of_compute, fixed_s=of_compute.fixed_s * by)), cluster

    def between(by: float) -> tuple[Job, Cluster]:
        return job, cluster.model_copy(update={"between": far.model_copy(update={"gbit_s": far.gbit_s * by})})

    def latency(by: float) -> tuple[Job, Cluster]:
        changed = far.model_copy(update={"latency_us": far.latency_us * by})
        return job, cluster.model_copy(update={"between": changed})

    def inside(by: float) -> tuple[Job, Cluster]:
        return job, cluster.model_copy(update={"inside": near.model_copy(update={"gb_s": near.gb_s * by})})

    def jitter(by: float) -> tuple[Job, Cluster]:
        return job, cluster.model_copy(update={"jitter": cluster.jitter * by})

    found: dict[str, Callable[[float], tuple[Job, Cluster]]] = {
        "speed of a device": computing,
        "fixed time of a step": fixed,
        "bandwidth between nodes": between,
        "latency between nodes": latency,
        "bandwidth inside a node": inside,
        "jitter of devices": jitter,
    }
    if not isinstance(epochs, int | float):
        found["critical batch"] = lambda by: (
            replace(job, epochs=replace(epochs, critical=epochs.critical * by)),
            cluster,
        )
    if cluster.node.images_s is not None:
        found["loading of a node"] = lambda by: (job, _node(cluster, images_s=(cluster.node.images_s or 0.0) * by))
    if cluster.storage.shared_gb_s is not None:
        found["shared storage"] = lambda by: (
            job,
            cluster.model_copy(
                update={
                    "storage": cluster.storage.model_copy(
                        update={"shared_gb_s": (cluster.storage.shared_gb_s or 0.0) * by}
                    )
                }
            ),
        )
    return found


def _node(cluster: Cluster, **changes: float) -> Cluster:
    return cluster.model_copy(update={"node": cluster.node.model_copy(update=changes)})


def sensitivity(job: Job, cluster: Cluster, nodes: int) -> list[Moved]:
    """What moves the time to the target most, first."""
    planned = _one(job, cluster, nodes).hours
    found = [
        Moved(name, _one(*moved(1 - MOVE), nodes).hours / planned, _one(*moved(1 + MOVE), nodes).hours / planned)
        for name, moved in inputs(job, cluster).items()
    ]
    return sorted(found, key=lambda one: -one.size)


ERRORS = {
    "fixed time of a step": 0.3,
    "bandwidth between nodes": 0.15,
    "latency between nodes": 0.5,
    "bandwidth inside a node": 0.15,
    "jitter of devices": 0.7,
    "loading of a node": 0.1,
    "shared storage": 0.1,
}
"""Standard deviations of what is planned with, in logarithms, where nothing was measured on the machines themselves."""
NINETY = 1.645


def _band(job: Job, cluster: Cluster, nodes: int) -> tuple[float, float]:
    """(low, high) hours: each input is moved by its error, and what that moves is added in squares."""
    planned = _one(job, cluster, nodes).hours
    squares = 0.0
    for name, moved in inputs(job, cluster).items():
        error = job.compute_error if name == "speed of a device" else ERRORS.get(name, 0.0)
        if error:
            squares += math.log(_one(*moved(math.exp(-error)), nodes).hours / planned) ** 2
    if not isinstance(job.epochs, int | float):
        squares += (job.epochs.error or MOVE) ** 2
    width = NINETY * math.sqrt(squares)
    return planned * math.exp(-width), planned * math.exp(width)
