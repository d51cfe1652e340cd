"""What so many nodes would give: images/s, time to the target, energy and cost, what limits, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, final

from headway.core.collectives import Network
from headway.core.errors import UsageError
from headway.plan.cluster import Cluster
from headway.plan.convergence import EpochsLaw
from headway.plan.step import BACKWARD_SHARE, ComputeTime, GradientBucket, StepTime, choose_buckets, predict_step

Bottleneck = Literal["computing", "fixed time of a step", "exchange", "slowest device", "loading", "storage"]

SPEEDUP_EXPONENT = 0.5
"""Of the logarithm by which nodes grow, that of the speed has to: twice the nodes, at least 1.41 times as fast."""
PERTURBATION = 0.2
"""By how much an input is moved, to see what it moves."""
MAX_DEVICES, MAX_SAMPLES = 10**6, 10**9


@final
@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is trained. Attributes:
    samples: of the training set. encoded_bytes: of one, that is read; None: unknown, so that storage does not limit.
    gradients: in the order in which they are made. bucket_bytes: in which they are exchanged; None: as suits the links.
    edges: bytes of a sample's row, of each convolution's input: what strips of an image tell each other.
    per_device: samples of a device at once; or `batch`: of all devices in a step, whatever their number.
    accumulate: micro-batches of a step.
    wire_ratio: bytes between nodes over those of gradients. backward: share of computing in which they are made.
    epochs: by batch; or a number, whatever the batch.
    evaluations: of a run; evaluation_s: of one, on one device. checkpoints: of a run; checkpoint_s: for which one holds
    all up.
    compute_error: share by which `compute` may be wrong, one standard deviation.
    spread: its nodes lie among those of others, in all groups, so that what they send goes over the narrow links.
    """

    samples: int
    encoded_bytes: float | None
    compute: ComputeTime
    gradients: tuple[GradientBucket, ...]
    bucket_bytes: int | None = None
    edges: tuple[float, ...] = ()
    epochs: EpochsLaw | float
    per_device: float | None = None
    batch: float | None = None
    accumulate: int = 1
    wire_ratio: float = 1.0
    backward: float = BACKWARD_SHARE
    evaluations: int = 0
    evaluation_s: float = 0.0
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    compute_error: float = 0.03
    spread: bool = False

    def per_device_of(self, devices: int) -> float:
        """Samples of a device at once."""
        if self.per_device is not None:
            return self.per_device
        assert self.batch is not None
        return self.batch / devices / self.accumulate

    def most_of(self, devices: int) -> float:
        """Samples at once of the device that has the most; less than one: a strip of an image."""
        each = self.per_device_of(devices)
        return each if each < 1 else math.ceil(each - 1e-9)

    def epochs_of(self, batch: float) -> float:
        return self.epochs if isinstance(self.epochs, int | float) else self.epochs.epochs(batch)


@final
@dataclass(frozen=True)
class Prediction:
    """Of so many nodes. Attributes:
    batch: of all devices in a step. strips: in which devices share an image; 1: each has whole ones.
    step: what one takes, before loading and storage limit.
    images_s: in training, over all epochs; first_images_s: in the first.
    input_images_s: that loading and storage give in later epochs; infinite: it is not known.
    epochs, hours: to the target. kwh, cost: of all nodes, kwh of the building; None: power or price is unknown.
    limit: what the largest part of the time goes to, or what is slower than the devices for most of it.
    scaling: images/s of a node over those of the smallest plan's. statistical: epochs of its batch over those of this.
    low_hours, high_hours: the band; see `ERRORS`.
    warning: of epochs that are not known; or empty.
    """

    nodes: int
    devices: int
    batch: float
    strips: int
    step: StepTime
    images_s: float
    first_images_s: float
    input_images_s: float
    epochs: float
    hours: float
    low_hours: float
    high_hours: float
    kwh: float | None
    cost: float | None
    limit: Bottleneck
    scaling: float
    statistical: float
    warning: str

    @property
    def efficiency(self) -> float:
        return self.scaling * self.statistical


def predict_scaling(job: TrainingJob, cluster: Cluster, nodes: Sequence[int]) -> list[Prediction]:
    """One for each count of nodes, ascending; efficiencies are over the first one's.

    Raises:
        UsageError: counts are none, below 1 or above what the cluster has; or a batch is too small for the devices.
    """
    counts = sorted(set(nodes))
    if not counts or counts[0] < 1:
        raise UsageError("nodes are counted from 1", where="--nodes", fix="--nodes 1..64, or --nodes 1,2,4.")
    if counts[-1] * cluster.devices > MAX_DEVICES:
        raise UsageError(f"plans are for up to {MAX_DEVICES:,} devices", where="--nodes")
    if cluster.nodes is not None and counts[-1] > cluster.nodes:
        what = f"{cluster.title} has {cluster.nodes} nodes, not {counts[-1]}"
        raise UsageError(what, where="--nodes", fix=f"--nodes 1..{cluster.nodes}")
    if (job.per_device is None) == (job.batch is None):
        raise UsageError("a batch is given for a device, or for all together", where="--per-device")
    for name, value in (("--per-device", job.per_device), ("--batch", job.batch)):
        if value is not None and not 1 <= value <= MAX_SAMPLES:
            raise UsageError(f"a batch has 1 to {MAX_SAMPLES:,} samples, not {value:g}", where=name)
    if not job.compute.seconds(1.0) > 0:
        raise UsageError("a step of this workload takes no time: it has no layers that compute anything")
    planned = [predict(job, cluster, count) for count in counts]
    first, found = planned[0], []
    for one in planned:
        low, high = compute_band(job, cluster, one)
        scaling = one.images_s / one.nodes / (first.images_s / first.nodes)
        found.append(
            replace(one, scaling=scaling, statistical=first.epochs / one.epochs, low_hours=low, high_hours=high)
        )
    return found


def predict(job: TrainingJob, cluster: Cluster, nodes: int) -> Prediction:
    """Of so many nodes, without efficiencies and band."""
    devices = nodes * cluster.devices
    each = job.per_device_of(devices)
    strips = max(1, math.ceil(1 / each - 1e-9))
    if strips > cluster.devices:
        what = f"a batch of {job.batch or 0:,.0f} leaves {each:.2g} samples for each of {devices:,} devices"
        fix = f"The {cluster.devices} of a node can share an image; plan fewer nodes, or a larger batch."
        raise UsageError(what, where="--batch", fix=fix)
    batch, network = each * devices * job.accumulate, cluster.network(nodes, spread=job.spread)
    told = predict_job_step(job, cluster, network, job.most_of(devices))
    if strips > 1:
        told = replace(told, exposed_s=told.exposed_s + job.accumulate * estimate_halo_s(job, cluster, each * strips))
    alone = batch / told.seconds
    loading, (cold, warm) = estimate_loader_rate(cluster, nodes), estimate_storage_rates(job, cluster, nodes)
    first, later = min(alone, loading, cold), min(alone, loading, warm)
    epochs = job.epochs_of(batch)
    training = max(batch / first, job.samples * (min(epochs, 1.0) / first + max(0.0, epochs - 1) / later))
    stalls = job.evaluations * job.evaluation_s / devices + job.checkpoints * job.checkpoint_s
    hours = (training + stalls) / 3600
    kwh = None if cluster.node.watts is None else nodes * cluster.node.watts / 1000 * cluster.pue * hours
    cost = None if cluster.node.cost_per_hour is None else nodes * cluster.node.cost_per_hour * hours
    starved = job.samples * min(epochs, 1.0) / first > training / 2 or later < min(alone, loading)
    warning = "" if isinstance(job.epochs, int | float) else job.epochs.warning(batch)
    return Prediction(
        nodes=nodes,
        devices=devices,
        batch=batch,
        strips=strips,
        step=told,
        images_s=job.samples * epochs / training,
        first_images_s=first,
        input_images_s=min(loading, warm),
        epochs=epochs,
        hours=hours,
        low_hours=hours,
        high_hours=hours,
        kwh=kwh,
        cost=cost,
        limit=_find_bottleneck(told, alone, loading, cold if starved else warm),
        scaling=1.0,
        statistical=1.0,
        warning=warning,
    )


def predict_job_step(job: TrainingJob, cluster: Cluster, network: Network, each: float) -> StepTime:
    """Of devices with so many samples at once."""
    return predict_step(
        job.compute,
        each,
        choose_job_buckets(job, cluster, network, each),
        network,
        jitter=cluster.jitter,
        among=cluster.algorithms,
        wire_ratio=job.wire_ratio,
        accumulate=job.accumulate,
        backward=job.backward,
        overlap=cluster.overlap,
    )


def choose_job_buckets(job: TrainingJob, cluster: Cluster, network: Network, each: float) -> list[GradientBucket]:
    """As they are exchanged there, by devices with so many samples at once."""
    return choose_buckets(
        job.gradients,
        network,
        nbytes=job.bucket_bytes,
        backward_s=job.backward * job.compute.seconds(each) * cluster.overlap,
        among=cluster.algorithms,
        wire_ratio=job.wire_ratio,
    )


def estimate_halo_s(job: TrainingJob, cluster: Cluster, images: float) -> float:
    """Seconds in which strips of so many images tell their neighbours a row of each convolution's input, forward and
    backward: what one of 3x3 wants."""
    link = cluster.network(1).inside
    return sum(4 * link.seconds(row * images) for row in job.edges)


def estimate_loader_rate(cluster: Cluster, nodes: int) -> float:
    """Of all nodes' processors; infinite: it is not known."""
    return math.inf if cluster.node.images_s is None else nodes * cluster.node.images_s


def estimate_storage_rates(job: TrainingJob, cluster: Cluster, nodes: int) -> tuple[float, float]:
    """(in the first epoch, later). What nodes keep of what they have read is not read again; which node reads what
    changes, so that a part of the set that one node keeps serves as large a share of its samples."""
    far = cluster.storage
    opens = math.inf if far.opens_s is None or far.shards else far.opens_s
    if not job.encoded_bytes:  # then it is not known either what a cache keeps
        return opens, opens
    total = job.samples * job.encoded_bytes
    kept = min(1.0, far.cache_gb * 1e9 / total)
    limits = [
        math.inf if far.node_gb_s is None else nodes * far.node_gb_s * 1e9 / job.encoded_bytes,
        math.inf if far.shared_gb_s is None else far.shared_gb_s * 1e9 / job.encoded_bytes,
        opens,
    ]
    cold = min(limits)
    return cold, math.inf if kept >= 1 else cold / (1 - kept)


def _find_bottleneck(told: StepTime, alone: float, loading: float, storage: float) -> Bottleneck:
    if min(loading, storage) < alone:
        return "loading" if loading <= storage else "storage"
    parts: dict[Bottleneck, float] = {
        "computing": told.sample_s,
        "fixed time of a step": told.fixed_s,
        "exchange": told.exposed_s,
        "slowest device": told.slowest_s,
    }
    return max(parts, key=lambda name: parts[name])


def find_paying_nodes(job: TrainingJob, cluster: Cluster, nodes: Sequence[int]) -> int:
    """The most nodes that still pay: from one count to the next, twice the nodes are at least 1.41 times as fast, and a
    step is of no more samples than the set has.

    Args:
        nodes: from the fewest to the most; where one is more than twice the one before it, doublings between them are
            tried too.
    """
    counts = sorted(set(nodes))
    for low, high in pairwise(tuple(counts)):
        counts += [low << power for power in range(1, (high - 1).bit_length()) if low << power < high]
    best, *others = (predict(job, cluster, count) for count in sorted(counts))
    for one in others:
        if one.batch > job.samples or math.log(best.hours / one.hours) < SPEEDUP_EXPONENT * math.log(
            one.nodes / best.nodes
        ):
            break
        best = one
    return best.nodes


@final
@dataclass(frozen=True)
class InputSensitivity:
    """Attributes: name: of an input. less, more: hours to the target over those that are planned, with 20 % less of it,
    and 20 % more."""

    name: str
    less: float
    more: float

    @property
    def size(self) -> float:
        return max(abs(math.log(self.less)), abs(math.log(self.more)))


def list_perturbations(job: TrainingJob, cluster: Cluster) -> dict[str, Callable[[float], tuple[TrainingJob, Cluster]]]:
    """name -> what is planned with so many times as much of it."""
    compute, epochs = job.compute, job.epochs

    def part(name: str, key: str) -> Callable[[float], tuple[TrainingJob, Cluster]]:
        whole = getattr(cluster, name)
        value = getattr(whole, key)
        return lambda by: (job, cluster.model_copy(update={name: whole.model_copy(update={key: value * by})}))

    found: dict[str, Callable[[float], tuple[TrainingJob, Cluster]]] = {
        "speed of a device": lambda by: (
            replace(job, compute=replace(compute, sample_s=compute.sample_s / by)),
            cluster,
        ),
        "fixed time of a step": lambda by: (
            replace(job, compute=replace(compute, fixed_s=compute.fixed_s * by)),
            cluster,
        ),
        "bandwidth between nodes": part("between", "gbit_s"),
        "latency between nodes": part("between", "latency_us"),
        "bandwidth inside a node": part("inside", "gb_s"),
        "jitter of devices": lambda by: (job, cluster.model_copy(update={"jitter": cluster.jitter * by})),
    }
    if not isinstance(epochs, int | float):
        found["critical batch"] = lambda by: (
            replace(job, epochs=replace(epochs, critical=epochs.critical * by)),
            cluster,
        )
    if cluster.node.images_s is not None:
        found["loading of a node"] = part("node", "images_s")
    for key, name in (
        ("node_gb_s", "storage to a node"),
        ("shared_gb_s", "shared storage"),
        ("opens_s", "opens a second"),
        ("cache_gb", "cache of a node"),
    ):
        if getattr(cluster.storage, key):
            found[name] = part("storage", key)
    return found


def rank_sensitivities(job: TrainingJob, cluster: Cluster, nodes: int) -> list[InputSensitivity]:
    """What moves the time to the target most, first."""
    planned = predict(job, cluster, nodes).hours

    def hours(moved: Callable[[float], tuple[TrainingJob, Cluster]], by: float) -> float:
        return predict(*moved(by), nodes).hours / planned

    found = [
        InputSensitivity(name, hours(by, 1 - PERTURBATION), hours(by, 1 + PERTURBATION))
        for name, by in list_perturbations(job, cluster).items()
    ]
    return sorted(found, key=lambda one: -one.size)


INPUT_ERRORS = {
    "fixed time of a step": 0.3,
    "bandwidth between nodes": 0.15,
    "latency between nodes": 0.5,
    "bandwidth inside a node": 0.15,
    "jitter of devices": 0.7,
    "loading of a node": 0.1,
    "storage to a node": 0.1,
    "shared storage": 0.1,
    "opens a second": 0.3,
}
"""Standard deviations of what is planned with, in logarithms, assumed: what a data sheet and a day's load leave open.
`bench.plan` counts how many published runs lie in the band."""
EXTRAPOLATION_ERROR = 0.15
"""Of epochs outside of the batches that were measured: fits of ResNet-50's official points up to 13,000 are 12 to 18 %
off at 33,000 to 68,000."""
Z_90 = 1.645


def compute_band(job: TrainingJob, cluster: Cluster, planned: Prediction) -> tuple[float, float]:
    """(low, high) hours: each input is moved by its error, and what that moves is added in squares."""
    squares = 0.0
    for name, moved in list_perturbations(job, cluster).items():
        error = job.compute_error if name == "speed of a device" else INPUT_ERRORS.get(name, 0.0)
        if error:
            squares += math.log(predict(*moved(math.exp(-error)), planned.nodes).hours / planned.hours) ** 2
    law = job.epochs
    if not isinstance(law, int | float):
        squares += (PERTURBATION if law.error is None else law.error) ** 2
        squares += EXTRAPOLATION_ERROR**2 * (not law.low <= planned.batch <= law.high)
    width = Z_90 * math.sqrt(squares)
    return planned.hours * math.exp(-width), planned.hours * math.exp(width)
