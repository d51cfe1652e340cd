"""Prediction for one node count: images/s, time to the target, energy, cost, and the limiting part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, final

from headway.core.collectives import Algorithm, Network
from headway.core.errors import UsageError
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.losses import StepLosses
from headway.plan.step import PlannedBucket, StepTime, choose_buckets, predict_step
from headway.plan.strips import choose_parts, estimate_split_s

Bottleneck = Literal[
    "computing", "fixed time of a step", "contention in a node", "exchange", "slowest device", "loading", "storage"
]


@final
@dataclass(frozen=True)
class Prediction:
    """Predicted training run on a number of nodes."""

    nodes: int
    devices: int
    batch: float
    # Devices that share one image; 1: every device has whole images.
    strips: int
    # Time of one step, before loading and storage limit it.
    step: StepTime
    # Mean over all epochs; `first_images_s`: in the first epoch.
    images_s: float
    first_images_s: float
    # Rate of loading and storage after the first epoch; infinite: unknown.
    input_images_s: float
    epochs: float
    # Time to the target; `low_hours` and `high_hours`: its 90 % band.
    hours: float
    low_hours: float
    high_hours: float
    # Energy of all nodes and the building; None: power is unknown.
    kwh: float | None
    # Price of all nodes; None: no price is known.
    cost: float | None
    # Part that takes most of the time, or the input if that is slower than the devices.
    limit: Bottleneck
    # Images/s per node over that of the smallest planned node count.
    scaling: float
    # Epochs at the smallest planned batch over epochs at this batch.
    statistical: float
    # Reason to doubt `epochs`; may be empty.
    warning: str

    @property
    def efficiency(self) -> float:
        """Speed-up to the target per node."""
        return self.scaling * self.statistical


def predict(job: TrainingJob, cluster: Cluster, nodes: int) -> Prediction:
    """Predicts a run on this many nodes, without efficiencies and error band (`predict_scaling` adds them).

    Raises UsageError if the batch has too few samples for the devices.
    """
    devices = nodes * cluster.devices
    each = job.split_batch(devices)
    # Below one sample per device, the devices of a node share an image in strips (spatial parallelism).
    strips = max(1, math.ceil(1 / each - 1e-9))
    if strips > cluster.devices:
        problem = f"a batch of {job.batch or 0:,.0f} leaves {each:.2g} samples for each of {devices:,} devices"
        fix = f"The {cluster.devices} devices of a node can share an image. Plan fewer nodes, or a larger batch."
        raise UsageError(problem, where="--batch", fix=fix)
    parts = job.count_micro_batches(devices)
    batch, network = each * devices * parts, cluster.build_network(nodes, spread=job.spread)
    step = predict_job_step(job, cluster, network, job.find_largest_share(devices))
    waits_s = parts * (job.exchange_s + estimate_strips_s(job, cluster, each, strips))
    if waits_s:
        step = replace(step, exposed_s=step.exposed_s + waits_s, exchange_s=step.exchange_s + waits_s)
    alone = batch / step.seconds
    # The slowest of devices, loaders and storage sets the pace; caches help from the second epoch on.
    loading, (cold, warm) = estimate_loader_rate(cluster, nodes), estimate_storage_rates(job, cluster, nodes)
    first, later = min(alone, loading, cold), min(alone, loading, warm)
    epochs = job.predict_epochs(batch)
    # At least one full step, even if the set is smaller than the batch.
    training = max(batch / first, job.samples * (min(epochs, 1.0) / first + max(0.0, epochs - 1) / later))
    stalls = job.evaluations * job.evaluation_s / devices + job.checkpoints * job.checkpoint_s
    hours = (training + stalls) / 3600
    kwh = None if cluster.node.watts is None else nodes * cluster.node.watts / 1000 * cluster.pue * hours
    cost = None if cluster.node.cost_per_hour is None else nodes * cluster.node.cost_per_hour * hours
    starved = job.samples * min(epochs, 1.0) / first > training / 2 or later < min(alone, loading)
    warning = "" if isinstance(job.epochs, int | float) else job.epochs.describe_extrapolation(batch)
    return Prediction(
        nodes=nodes, devices=devices, batch=batch, strips=strips, step=step,
        images_s=job.samples * epochs / training, first_images_s=first, input_images_s=min(loading, warm),
        epochs=epochs, hours=hours, low_hours=hours, high_hours=hours, kwh=kwh, cost=cost,
        limit=_find_bottleneck(step, alone, loading, cold if starved else warm),
        scaling=1.0, statistical=1.0, warning=warning,
    )  # fmt: skip


def get_losses(job: TrainingJob, cluster: Cluster) -> StepLosses:
    """Returns the losses of a job on a cluster, which may know its own jitter, or that nothing hides the exchange."""
    jitter = job.losses.jitter if cluster.jitter is None else cluster.jitter
    return replace(job.losses, jitter=jitter, hidden=job.losses.hidden * cluster.overlap)


def get_algorithms(job: TrainingJob, cluster: Cluster) -> tuple[Algorithm, ...]:
    """Returns the all-reduce algorithms of a job on a cluster, which may name its own."""
    return job.algorithms if cluster.algorithms is None else cluster.algorithms


def predict_job_step(job: TrainingJob, cluster: Cluster, network: Network, samples: float) -> StepTime:
    """Predicts one step of a job whose devices have this many samples in a micro-batch."""
    return predict_step(
        job.compute, samples, choose_job_buckets(job, cluster, network, samples), network,
        losses=get_losses(job, cluster), among=get_algorithms(job, cluster), wire_ratio=job.wire_ratio,
        accumulate=job.count_micro_batches(network.ranks), backward=job.backward,
    )  # fmt: skip


def choose_job_buckets(job: TrainingJob, cluster: Cluster, network: Network, samples: float) -> list[PlannedBucket]:
    """Chooses the all-reduce buckets of a job whose devices have this many samples in a micro-batch."""
    losses = get_losses(job, cluster)
    return choose_buckets(
        job.gradients, losses.slow_links(network), nbytes=job.bucket_bytes, among=get_algorithms(job, cluster),
        wire_ratio=job.wire_ratio, backward_s=job.backward * job.compute.seconds(samples), hidden=losses.hidden,
    )  # fmt: skip


def estimate_strips_s(job: TrainingJob, cluster: Cluster, samples: float, strips: int) -> float:
    """Estimates the seconds per micro-batch of the exchanges between devices that share images in strips.

    Args:
        samples: share of a device, below 1.
    """
    if strips == 1:
        return 0.0
    grid = choose_parts(job.split, strips)
    return estimate_split_s(job.split, cluster.build_network(1), samples * strips, grid, job.compute)


def estimate_loader_rate(cluster: Cluster, nodes: int) -> float:
    """Returns the images/s that the CPUs of all nodes load; infinite: unknown."""
    return math.inf if cluster.node.images_s is None else nodes * cluster.node.images_s


def estimate_storage_rates(job: TrainingJob, cluster: Cluster, nodes: int) -> tuple[float, float]:
    """Estimates the images/s of the storage. Returns (in the first epoch, in later epochs)."""
    far = cluster.storage
    opens = math.inf if far.opens_s is None or far.shards else far.opens_s
    if not job.encoded_bytes:
        # Without the size of a sample the share that the caches hold is unknown too.
        return opens, opens
    # A sample may be served by another node in every epoch: a node that caches a share of the set has a hit rate of
    # the same share.
    kept = min(1.0, far.cache_gb * 1e9 / (job.samples * job.encoded_bytes))
    cold = min(
        math.inf if far.node_gb_s is None else nodes * far.node_gb_s * 1e9 / job.encoded_bytes,
        math.inf if far.shared_gb_s is None else far.shared_gb_s * 1e9 / job.encoded_bytes,
        opens,
    )
    return cold, math.inf if kept >= 1 else cold / (1 - kept)


def _find_bottleneck(step: StepTime, alone: float, loading: float, storage: float) -> Bottleneck:
    """Names the input if it is slower than the devices `alone` (images/s), else the largest part of a step."""
    if min(loading, storage) < alone:
        return "loading" if loading <= storage else "storage"
    parts: dict[Bottleneck, float] = {
        "computing": step.sample_s,
        "fixed time of a step": step.fixed_s,
        "contention in a node": step.contention_s,
        "exchange": step.exposed_s,
        "slowest device": step.slowest_s,
    }
    return max(parts, key=lambda name: parts[name])
