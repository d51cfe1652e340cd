"""The training job of a plan: built from a workload, an estimate of its compute time and a law of its epochs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

from headway.core.collectives import Algorithm
from headway.core.errors import UsageError
from headway.core.workload import Workload
from headway.plan.calibration import Vector
from headway.plan.convergence import (
    ConvergencePoint,
    EpochsLaw,
    derive_epochs_law,
    fit_epochs,
    interpolate_epochs,
    load_official_points,
)
from headway.plan.losses import StepLosses
from headway.plan.step import BACKWARD_SHARE, GPU_ALGORITHMS, NO_LOSSES, ComputeTime, PlannedBucket, list_gradients
from headway.plan.strips import SplitNetwork, describe_split

EstimateBasis = Literal["profile", "runs", "data sheet"]

# Cost of evaluating one sample over the cost of training on it.
FORWARD_SHARE = 1 / 3
CONSTANT_EPOCHS = "one number whatever the batch: --epochs-at or --noise-scale know better"
IMAGENET_SAMPLES = range(1_200_000, 1_300_000)


@final
@dataclass(frozen=True)
class ComputeEstimate:
    """Compute time of one device and its source."""

    compute: ComputeTime
    # Source of the numbers; `how` says it in words.
    basis: EstimateBasis
    how: str
    # Reasons why the numbers may not hold for the planned job.
    warnings: tuple[str, ...] = ()
    # Seconds of one evaluation on one device; None: derived from `compute`.
    evaluation_s: float | None = None
    # Seconds for which one checkpoint stops training.
    checkpoint_s: float = 0.0
    losses: StepLosses = NO_LOSSES
    # All-reduce algorithms of the software, unless the cluster names its own.
    algorithms: tuple[Algorithm, ...] = GPU_ALGORITHMS
    # Covariance of the errors of all parameters of a step (`calibration.PARAMETERS`); None: they are exact.
    covariance: Vector | None = field(default=None, compare=False)


@final
@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training run as the planner sees it."""

    # Size of the training set.
    samples: int
    # Noun for its samples.
    unit: str = "images"
    # Bytes read per sample; None: unknown, and storage is taken not to limit.
    encoded_bytes: float | None
    compute: ComputeTime
    # In the order in which the backward pass produces them.
    gradients: tuple[PlannedBucket, ...]
    # Parameters of the network, which the optimizer updates in each step.
    parameters: float = 0.0
    # Size of all-reduce buckets; None: the planner chooses it for the links.
    bucket_bytes: int | None = None
    # What devices exchange that share an image.
    split: SplitNetwork = field(default_factory=SplitNetwork)
    # Seconds of a micro-batch's exchanges between layers, for which devices wait.
    exchange_s: float = 0.0
    # Epochs to the target as a function of the batch, or a constant.
    epochs: EpochsLaw | float
    # Samples of a device in one micro-batch. Exclusive with `batch`: global batch, whatever the devices.
    per_device: float | None = None
    batch: float | None = None
    # Micro-batches per step; more where a device's share of `batch` exceeds `micro_batch`. None: it is not split.
    accumulate: int = 1
    micro_batch: float | None = None
    # Bytes sent between nodes over bytes of gradients (below 1 with compression).
    wire_ratio: float = 1.0
    # Share of the compute time that the backward pass takes.
    backward: float = BACKWARD_SHARE
    # Evaluations of the run, and seconds of one on one device.
    evaluations: int = 0
    evaluation_s: float = 0.0
    # Checkpoints of the run, and seconds for which one stops training.
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    # As in ComputeEstimate.
    losses: StepLosses = NO_LOSSES
    algorithms: tuple[Algorithm, ...] = GPU_ALGORITHMS
    covariance: Vector | None = field(default=None, compare=False)
    # The nodes lie in all groups of the cluster, so that all traffic crosses the oversubscribed links.
    spread: bool = False

    def split_batch(self, devices: int) -> float:
        """Returns the mean number of samples in a device's micro-batch."""
        if self.per_device is not None:
            return self.per_device
        assert self.batch is not None
        return self.batch / devices / self.count_micro_batches(devices)

    def count_micro_batches(self, devices: int) -> int:
        """Returns the number of micro-batches of a device in a step."""
        if self.batch is None or self.micro_batch is None:
            return self.accumulate
        return max(self.accumulate, math.ceil(self.batch / devices / self.micro_batch - 1e-9))

    def find_largest_share(self, devices: int) -> float:
        """Returns the samples in the largest micro-batch of any device; below 1 for a strip of an image."""
        each = self.split_batch(devices)
        return each if each < 1 else math.ceil(each - 1e-9)

    def predict_epochs(self, batch: float) -> float:
        """Returns the epochs to the target with this batch."""
        return self.epochs if isinstance(self.epochs, int | float) else self.epochs.predict_epochs(batch)


def choose_epochs(
    workload: Workload, *, points: Sequence[ConvergencePoint] = (), noise_scale: float | None = None
) -> tuple[EpochsLaw | float, str]:
    """Chooses the best known law of epochs by batch. Returns (law or constant, its source in words).

    The order: a fit to several measured batches, the gradient noise scale, the official runs of ResNet-50 with LARS on
    ImageNet, else the epochs of the recipe for every batch.

    Raises UsageError if both several batches and a noise scale are given.
    """
    if len({one.batch for one in points}) >= 2:
        if noise_scale is not None:
            problem = "several batches of --epochs-at already give the critical batch, and so does the noise scale"
            raise UsageError(problem, where="--noise-scale", fix="Leave one of the two options out.")
        law = fit_epochs(points)
        off = "exactly" if law.error is None else f"{law.error:.1%} off in the root mean square"
        return law, f"{len(points)} batches, fitted {off}"
    if noise_scale is not None:
        at = points[0] if points else ConvergencePoint(workload.step.batch, workload.run.epochs)
        law = derive_epochs_law(noise_scale, at.batch, at.epochs)
        return law, f"the gradient's noise scale of {noise_scale:,.0f}, and {at.epochs:g} epochs at {at.batch:,.0f}"
    if points:
        return points[0].epochs, CONSTANT_EPOCHS
    if has_official_runs(workload):
        return interpolate_epochs(load_official_points()), "MLPerf's official runs of ResNet-50 by LARS"
    return workload.run.epochs, CONSTANT_EPOCHS


def has_official_runs(workload: Workload) -> bool:
    """Returns True if official results exist for this job: ResNet-50 with LARS on a set of ImageNet's size."""
    optimizer = workload.step.update.optimizer.lower()
    return is_named(workload, "resnet50") and optimizer == "lars" and workload.run.samples in IMAGENET_SAMPLES


def is_named(workload: Workload, network: str) -> bool:
    """Returns True if the name of a workload ends with that of a network: `imagenet-resnet50`, and no `seresnet50`."""
    name = workload.name.lower().replace("resnet-50", "resnet50")
    return re.search(rf"(^|[^a-z0-9]){network}($|[^a-z0-9_])", name) is not None


def compute_mean_work(workload: Workload) -> float:
    """Computes the work of a mean sample of the whole run over that of one of the largest size.

    It is below 1 if images grow during the run (progressive resizing).
    """
    seen = sum(phase.steps * phase.batch for phase in workload.run.phases)
    work = sum(phase.steps * phase.batch * phase.forward_multiply_adds for phase in workload.run.phases)
    full = workload.forward_multiply_adds
    return work / seen / full if full and work else 1.0


def describe_growing_images(workload: Workload, basis: EstimateBasis) -> str:
    """Describes which image size a step's time is of; empty if the images do not grow."""
    sizes = sorted({(one.height, one.width) for one in workload.run.phases})
    if len(sizes) < 2:
        return ""
    smallest, largest = (" x ".join(map(str, size)) for size in (sizes[0], sizes[-1]))
    grow = f"images grow from {smallest} to {largest}"
    if basis == "runs":
        return f"{grow}, and runs count as the mean over the whole recipe"
    return f"{grow}, and a mean sample takes {compute_mean_work(workload):.0%} of one of the largest size"


def build_job(
    workload: Workload,
    estimate: ComputeEstimate,
    epochs: EpochsLaw | float,
    *,
    per_device: float | None = None,
    batch: float | None = None,
    accumulate: int | None = None,
    micro_batch: float | None = None,
    spread: bool = False,
) -> TrainingJob:
    """Builds the job that trains a workload.

    Args:
        per_device: samples of a device, or `batch`: global batch. With neither, a device gets as many samples, in
            micro-batches of the same size, as a device of the dry run.
        micro_batch: most samples that a device takes at once of its share of `batch`.
    """
    step, run = workload.step, workload.run
    if per_device is None and batch is None:
        share = step.batch / step.ranks
        parts = math.ceil(share / (step.micro_batch or share))
        per_device, accumulate = share / parts, accumulate or parts
    backward = 2 * workload.backward_multiply_adds / workload.operations if workload.operations else BACKWARD_SHARE
    # Profile and data sheet give the time of a sample at the recipe's largest size. Measured runs are of the whole
    # recipe, so that their rate is the mean already.
    mean_work = compute_mean_work(workload)
    is_mean = estimate.basis == "runs"
    sample_s = estimate.compute.sample_s
    compute = replace(estimate.compute, sample_s=sample_s if is_mean else sample_s * mean_work)
    evaluation_s = estimate.evaluation_s
    if evaluation_s is None:
        # An evaluation has the largest size.
        largest_s = sample_s / mean_work if is_mean else sample_s
        evaluation_s = (run.evaluation_samples or 0) * largest_s * FORWARD_SHARE
    return TrainingJob(
        samples=run.samples, unit=workload.sample_name, encoded_bytes=workload.input.encoded_bytes,
        compute=compute, epochs=epochs,
        gradients=tuple(list_gradients(workload)), parameters=workload.parameters,
        split=describe_split(workload), backward=backward,
        bucket_bytes=step.exchange.bucket_bytes, wire_ratio=step.exchange.wire_ratio,
        per_device=per_device, batch=batch, accumulate=accumulate or 1, micro_batch=micro_batch, spread=spread,
        evaluations=run.evaluations, evaluation_s=evaluation_s,
        checkpoints=run.checkpoints, checkpoint_s=estimate.checkpoint_s,
        losses=estimate.losses, algorithms=estimate.algorithms, covariance=estimate.covariance,
    )  # fmt: skip
