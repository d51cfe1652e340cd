"""Plan of a training job on a cluster: predictions for all node counts, sensitivities, alternative strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from headway.core.text_format import pluralise
from headway.core.workload import Workload
from headway.plan.cluster import Cluster
from headway.plan.convergence import EpochsLaw, LearningRateSuggestion, load_official_points, suggest_learning_rate
from headway.plan.device_memory import DeviceMemory, estimate_memory
from headway.plan.growth import DataGrowth
from headway.plan.input_roofline import InputRoofline, compute_input_roofline
from headway.plan.job import ComputeEstimate, TrainingJob, has_official_runs
from headway.plan.prediction import Prediction
from headway.plan.published import ComparedRun, compare_published
from headway.plan.scaling import find_nodes_in_time, find_paying_nodes, predict_scaling, predict_within_node
from headway.plan.sensitivity import InputSensitivity, rank_sensitivities
from headway.plan.strategies import Strategy, compare_strategies, count_useful_nodes

# Samples of a device with which devices compute well and the batch still learns; the first that memory has room for.
PER_DEVICE = (128, 64)


@final
@dataclass(frozen=True)
class JobPlan:
    """Everything that `headway plan` reports about a job on a cluster."""

    workload: Workload
    job: TrainingJob
    cluster: Cluster
    estimate: ComputeEstimate
    # Source of the epochs, in words.
    epochs_from: str
    # One for each node count, ascending.
    predictions: tuple[Prediction, ...]
    # Most nodes that still pay; sensitivities, strategies and memory are at this count.
    paying_nodes: int
    sensitivities: tuple[InputSensitivity, ...]
    strategies: tuple[Strategy, ...]
    memory: DeviceMemory
    # Node counts at which a device's memory is too small for its micro-batch.
    nodes_over_memory: tuple[int, ...]
    # Learning rate and warm-up for the batch of each prediction. None unless the job is ResNet-50 with LARS on ImageNet
    # and the batch lies between official ones.
    lars: tuple[LearningRateSuggestion | None, ...]
    # Most nodes whose batch is within the measured ones; None: no batches were measured.
    useful_nodes: int | None
    # Hours until the run has to end; fewest nodes that keep this deadline, and fewest whose whole band does. None: no
    # planned number of nodes does.
    deadline_h: float | None = None
    nodes_in_time: int | None = None
    nodes_surely_in_time: int | None = None
    # The job on some of the devices of one node. Empty: a node has one, or the plan begins with more nodes.
    within_node: tuple[Prediction, ...] = ()
    # The same counts if each device has so many samples, and the batch grows with the nodes. Empty: this is the plan.
    grown_per_device: int = 0
    grown: tuple[Prediction, ...] = ()
    growth: DataGrowth | None = None
    # Published runs of this network on this device, or on as many devices.
    published: tuple[ComparedRun, ...] = ()
    # Source of the loading speed, in words. Empty: measured, given by the user, or unknown.
    loading_from: str = ""

    @property
    def name(self) -> str:
        """Name of the workload."""
        return self.workload.name

    def compute_input_roofline(self) -> InputRoofline | None:
        """Computes which networks at which image sizes wait for the input of a node; see `input_roofline`."""
        return compute_input_roofline(self.workload, self.job, self.cluster)

    @property
    def best(self) -> Prediction:
        """Prediction for the most nodes that pay."""
        return next(one for one in self.predictions if one.nodes == self.paying_nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON. Infinite and unknown numbers are null."""
        rows = [
            {
                **asdict(one),
                "step_s": one.step.seconds,
                "communication_ratio": one.step.communication_ratio,
                "efficiency": one.efficiency,
                "lars": None if lr is None else asdict(lr),
            }
            for one, lr in zip(self.predictions, self.lars, strict=True)
        ]
        roofline = self.compute_input_roofline()
        values = {
            "name": self.name,
            "cluster": self.cluster.model_dump(mode="json"),
            "compute": {key: one for key, one in asdict(self.estimate).items() if key != "covariance"},
            "epochs_from": self.epochs_from,
            "loading_from": self.loading_from,
            "answers": rows,
            "pays_until": self.paying_nodes,
            "moved": [asdict(one) for one in self.sensitivities],
            "choices": [asdict(one) for one in self.strategies],
            "memory": {**asdict(self.memory), "fits": self.memory.fits},
            "nodes_without_room": list(self.nodes_over_memory),
            "warnings": list_warnings(self),
            "useful_nodes": self.useful_nodes,
            "deadline_hours": self.deadline_h,
            "nodes_in_time": self.nodes_in_time,
            "nodes_surely_in_time": self.nodes_surely_in_time,
            "grown_per_device": self.grown_per_device,
            "grown": [{**asdict(one), "step_s": one.step.seconds} for one in self.grown],
            "within_node": [{**asdict(one), "step_s": one.step.seconds} for one in self.within_node],
            "published": [asdict(one) for one in self.published],
            "growth": None if self.growth is None else asdict(self.growth),
            "input_roofline": None if roofline is None else roofline.to_json(),
        }
        plain: dict[str, Any] = replace_infinite(values)
        return plain


def replace_infinite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: replace_infinite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replace_infinite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def list_warnings(plan: JobPlan) -> list[str]:
    """Lists the reasons why this plan would not work, or not as predicted."""
    lines = list(plan.estimate.warnings)
    if plan.nodes_over_memory:
        low, high = plan.nodes_over_memory[0], plan.nodes_over_memory[-1]
        at = f"{low:,} to " * (len(plan.nodes_over_memory) > 1) + pluralise(high, "node")
        fix = "more nodes, or micro-batches (--accumulate)"
        if plan.job.per_device is not None:
            fix = "fewer samples per device (--per-device) or a global batch (--batch, --accumulate)"
        lines.append(f"The samples of a device do not fit its memory at {at}. Plan {fix}.")
    large = [one for one in plan.predictions if one.batch > plan.job.samples]
    if large:
        which = "A step" if plan.job.batch is not None else f"From {pluralise(large[0].nodes, 'node')} on a step"
        lines.append(
            f"{which} has {large[0].batch:,.0f} samples, more than the {plan.job.samples:,} of the training set. Plan a"
            " smaller batch (--per-device, --batch)."
        )
    return lines


def build_plan(
    workload: Workload,
    job: TrainingJob,
    cluster: Cluster,
    estimate: ComputeEstimate,
    epochs_from: str,
    nodes: Sequence[int],
    *,
    deadline_h: float | None = None,
) -> JobPlan:
    """Builds the plan of a job. Raises UsageError as `predict_scaling` does."""
    predictions = predict_scaling(job, cluster, nodes)
    paying = find_paying_nodes(job, cluster, nodes)
    # Counts between the ones that were asked for are tried too: the best of them gets a row of its own.
    if paying not in nodes:
        predictions = predict_scaling(job, cluster, [*nodes, paying])
    capacity = cluster.device_spec.memory_bytes
    memory = {
        one.nodes: estimate_memory(workload, job.split_batch(one.devices), capacity, one.devices) for one in predictions
    }
    each, grown = 0, list[Prediction]()
    if job.batch is not None:
        each = next((one for one in PER_DEVICE if one <= memory[paying].most_samples), PER_DEVICE[-1])
        alone = replace(job, per_device=float(each), batch=None, micro_batch=None, accumulate=1)
        grown = predict_scaling(alone, cluster, [one.nodes for one in predictions])
    law, useful = job.epochs, None
    if isinstance(law, EpochsLaw) and law.low < law.high and job.per_device is not None:
        useful = count_useful_nodes(law.high, job.per_device * job.accumulate, cluster.devices)
    lars: list[LearningRateSuggestion | None] = [None] * len(predictions)
    if has_official_runs(workload):
        suggested = [suggest_learning_rate(one.batch, load_official_points()) for one in predictions]
        lars = [one if one is not None and one.inside else None for one in suggested]
    return JobPlan(
        workload, job, cluster, estimate, epochs_from, tuple(predictions), paying,
        tuple(rank_sensitivities(job, cluster, paying)), tuple(compare_strategies(workload, job, cluster, paying)),
        memory[paying], tuple(count for count, one in memory.items() if not one.fits), tuple(lars), useful, deadline_h,
        nodes_in_time=find_nodes_in_time(job, cluster, nodes, deadline_h, surely=False),
        nodes_surely_in_time=find_nodes_in_time(job, cluster, nodes, deadline_h, surely=True),
        grown_per_device=each, grown=tuple(grown),
        published=tuple(compare_published(workload, job, cluster, {one.devices for one in predictions})),
        within_node=tuple(predict_within_node(job, cluster)) if nodes[0] == 1 < cluster.devices else (),
    )  # fmt: skip
