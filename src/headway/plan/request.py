"""The request of `headway plan`: all of its options in one object, and the job plan that answers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.core.text_format import pluralise
from headway.core.workload import Workload
from headway.plan.cluster import Cluster, Device, find_cluster, load_clusters
from headway.plan.compute import (
    MAX_MISFIT,
    apply_measured_links,
    estimate_from_data_sheet,
    estimate_from_profile,
    estimate_from_runs,
    estimate_node_loading,
    separate_update,
)
from headway.plan.convergence import EpochsLaw
from headway.plan.facility.request import FacilityRequest, build_facility_request
from headway.plan.facility.simulation import SimulationNeed, predict_simulation
from headway.plan.growth import DataGrowth, predict_data_growth
from headway.plan.job import ComputeEstimate, TrainingJob, build_job, choose_epochs, describe_growing_images
from headway.plan.job_plan import JobPlan, build_plan
from headway.plan.loading import complete_loading, lift_exceeded_limits
from headway.plan.measured_errors import read_errors
from headway.plan.parsing import parse_nodes, parse_pairs, parse_points, parse_runs
from headway.plan.plausibility import check_phases, check_rates

# Largest price of a node per hour, and largest size of an encoded image.
MAX_PRICE, MAX_IMAGE_KB = 1_000_000, 1_000_000
# Largest node count that is planned without --nodes.
DEFAULT_MAX_NODES = 64


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of `headway plan`, named and in units as on the command line; see its help."""

    # A job on a cluster. Lists stay text here: `plan_job` parses them, so that every error names its option.
    cluster: str | None = None
    nodes: str | None = None
    profile: tuple[Path, ...] = ()
    runs: str | None = None
    per_device: float | None = None
    batch: float | None = None
    accumulate: int | None = None
    spread: bool = False
    epochs_at: str | None = None
    noise_scale: float | None = None
    deadline: float | None = None
    price: float | None = None
    errors_at: str | None = None
    sizes_at: str | None = None
    error_target: float | None = None
    image_kb: float | None = None
    # A facility, which shares only the size of an image with a job.
    facility: int | None = None
    node: str = "dgx-1"
    node_kw: float | None = None
    rack_kw: float = 19.2
    ports: int | None = None
    oversubscription: float = 2.0
    leaf: int | None = None
    core: int | None = None
    images_s: float | None = None
    data_gb: float | None = None
    pue: float = 1.4
    air_rise: float = 15.0
    # Simulated driving, and the hours for it.
    miles: float | None = None
    hours: float | None = None

    def predict_simulation(self, nodes: int) -> SimulationNeed | None:
        """Predicts the simulated driving of these nodes; None: none was asked for. Raises UsageError."""
        if self.miles is None:
            if self.hours is not None:
                raise UsageError("--hours needs a distance", fix="Write --miles 300000 --hours 5.")
            return None
        return predict_simulation(nodes, self.miles, self.hours)

    def to_facility_request(self, workload: Workload | None) -> FacilityRequest:
        """Returns the facility options in SI units, completed from a workload. Raises UsageError for a wrong size."""
        _check_image_kb(self.image_kb)
        return build_facility_request(
            workload, nodes=self.facility, node=self.node, ports=self.ports, leaf=self.leaf, core=self.core,
            node_watts=None if self.node_kw is None else self.node_kw * 1e3, rack_watts=self.rack_kw * 1e3,
            oversubscription=self.oversubscription, images_s=self.images_s, image_bytes=self.image_bytes,
            data_bytes=None if self.data_gb is None else self.data_gb * 1e9, pue=self.pue,
            air_rise_k=self.air_rise,
        )  # fmt: skip

    @property
    def image_bytes(self) -> float | None:
        """Bytes of an encoded image."""
        return None if self.image_kb is None else self.image_kb * 1e3


def plan_job(workload: Workload, request: PlanRequest) -> JobPlan:
    """Plans the training of a workload on the requested cluster.

    Raises UsageError if an option is out of range or excludes another one, or a file of it cannot be read.
    """
    if request.cluster is None:
        fix = f"Give one of {', '.join(load_clusters())}, or a YAML file."
        raise UsageError("a job is planned on a cluster", where="--cluster", fix=fix)
    cluster = find_cluster(request.cluster)
    _check_options(request, cluster)
    check_phases(workload, workload.name)
    if request.price is not None:
        cluster = _update_node(cluster, cost_per_hour=request.price)
    if request.image_bytes is not None:
        images = workload.input.model_copy(update={"encoded_bytes": request.image_bytes})
        workload = workload.model_copy(update={"input": images})
    points = [] if request.epochs_at is None else parse_points(request.epochs_at)
    # Epochs come first: calibration by runs needs a job, and a job its epochs.
    epochs, epochs_from = choose_epochs(workload, points=points, noise_scale=request.noise_scale)
    # The recipe's batch stays the same, and its parts shrink, as nodes grow; unless the recipe gives it per device.
    kept = request.per_device is None and request.batch is None and workload.step.per_device is None
    batch, micro_batch = (float(workload.step.batch), workload.step.micro_batch) if kept else (request.batch, None)

    def build(estimate: ComputeEstimate) -> TrainingJob:
        return build_job(
            workload, estimate, epochs, per_device=request.per_device, batch=batch, accumulate=request.accumulate,
            micro_batch=micro_batch, spread=request.spread,
        )  # fmt: skip

    estimate, cluster = _estimate_compute(workload, cluster, request, build)
    if grow := describe_growing_images(workload, estimate.basis):
        estimate = replace(estimate, how=f"{estimate.how}; {grow}")
    if isinstance(epochs, EpochsLaw) and (epochs.error or 0.0) > MAX_MISFIT:
        warning = f"Epochs do not follow E = E_min (1 + B / B_crit): the fit is {epochs.error:.0%} off."
        estimate = replace(estimate, warnings=(*estimate.warnings, warning))
    cluster, loading_from = complete_loading(workload, cluster)
    job = build(estimate)
    if request.runs is not None:
        cluster, lifted = lift_exceeded_limits(job, cluster, parse_runs(request.runs))
        loading_from = lifted or loading_from
    # No more nodes than the cluster has, if it says how many.
    nodes = parse_nodes(request.nodes or f"1..{min(cluster.most_nodes or DEFAULT_MAX_NODES, DEFAULT_MAX_NODES)}")
    if kept:
        estimate, nodes = _leave_out_nodes(workload, cluster, estimate, nodes, named=request.nodes is not None)
    plan = build_plan(workload, job, cluster, estimate, epochs_from, nodes, deadline_h=request.deadline)
    return replace(plan, loading_from=loading_from, growth=plan_growth(workload, request))


def _leave_out_nodes(
    workload: Workload, cluster: Cluster, estimate: ComputeEstimate, nodes: Sequence[int], *, named: bool
) -> tuple[ComputeEstimate, list[int]]:
    """Leaves out node counts whose devices have no sample each of the recipe's batch; says so if they were named."""
    batch = workload.step.batch
    most = batch // cluster.devices
    kept = [count for count in nodes if count <= most]
    if not kept:
        problem = f"the recipe's batch of {batch:,} has no sample for each of {min(nodes) * cluster.devices:,} devices"
        fix = "Plan a larger one (--batch), or one that grows with the devices (--per-device 64)."
        raise UsageError(problem, where="--nodes", fix=fix)
    if named and len(kept) < len(nodes):
        warning = (
            f"The recipe's batch of {batch:,} has a sample for each device of up to {pluralise(most, 'node')}. Plan"
            " more with a larger one (--batch), or one that grows with the devices (--per-device 64)."
        )
        estimate = replace(estimate, warnings=(*estimate.warnings, warning))
    return estimate, kept


def _check_options(request: PlanRequest, cluster: Cluster) -> None:
    """Refuses numbers out of range, and options that the cluster cannot serve."""
    if request.price is not None and not 0 <= request.price <= MAX_PRICE:
        problem = f"the price of a node is 0 to {MAX_PRICE:,} an hour, not {request.price:g}"
        raise UsageError(problem, where="--price", fix="Write for example --price 25.")
    if request.deadline is not None and not 0 < request.deadline < math.inf:
        raise UsageError(f"a deadline is a number of hours above 0, not {request.deadline:g}", where="--deadline")
    _check_image_kb(request.image_kb)
    if request.spread and (cluster.between is None or cluster.between.group is None):
        problem = f"{cluster.title} has no groups over which its nodes could be spread"
        fix = "Give `group` and `oversubscription` of `between` in a YAML file."
        raise UsageError(problem, where="--spread", fix=fix)


def _check_image_kb(image_kb: float | None) -> None:
    if image_kb is not None and not 0 < image_kb <= MAX_IMAGE_KB:
        problem = f"an encoded image has more than 0 and up to {MAX_IMAGE_KB:,} kB, not {image_kb:g}"
        raise UsageError(problem, where="--image-kb", fix="Write for example --image-kb 110.")


def _update_node(cluster: Cluster, **changes: float) -> Cluster:
    return cluster.model_copy(update={"node": cluster.node.model_copy(update=changes)})


def plan_growth(workload: Workload | None, request: PlanRequest) -> DataGrowth | None:
    """Predicts the gain of more data from --errors-at and --sizes-at; None: they were not given."""
    if request.errors_at is None:
        if request.sizes_at is not None:
            fix = "Give the errors of the same training sets too: --errors-at SAMPLES:ERROR,..."
            raise UsageError("network sizes are used only with --errors-at", where="--sizes-at", fix=fix)
        return None
    errors = read_errors(request.errors_at)
    sizes = []
    if request.sizes_at:
        fix = "Write samples, and the parameters of the network that suits them: 1e5:2e6,1e6:8e6."
        sizes = parse_pairs(request.sizes_at, "--sizes-at", "a number of samples with parameters", fix)
    return predict_data_growth(workload, errors, sizes)


def _estimate_compute(
    workload: Workload, cluster: Cluster, request: PlanRequest, build: Callable[[ComputeEstimate], TrainingJob]
) -> tuple[ComputeEstimate, Cluster]:
    """Estimates the compute time from the best source given. Returns it and the cluster, updated from the profiles.

    Args:
        build: builds the planned job from an estimate; runs are taken to split their samples as this job does.
    """
    if request.profile and request.runs is not None:
        fix = "Give --profile or --runs, not both."
        raise UsageError("a profile and measured runs both give the compute time", where="--runs", fix=fix)
    sheet = estimate_from_data_sheet(workload, cluster.device_spec)
    if request.runs is not None:
        runs = parse_runs(request.runs)
        check_rates(runs, workload, cluster.device_spec)
        return estimate_from_runs(runs, build(sheet), cluster), cluster
    if not request.profile:
        return sheet, cluster
    profiles = [Profile.read(path) for path in request.profile]
    # A plan takes the compute time from the single process, and the links from the several.
    alone = [one for one in profiles if one.ranks == 1]
    together = [one for one in profiles if one.ranks > 1]
    if len(alone) != 1 or len(together) > 1:
        problem = (
            f"a plan takes one profile of a single process and at most one of several processes, not {len(alone)} and"
            f" {len(together)}"
        )
        fix = "headway doctor RECIPE writes the first, with --procs N the second."
        raise UsageError(problem, where="--profile", fix=fix)
    # The catalog has no CPUs, and a plan would have their speed with the memory, links and power of its devices. A
    # user's own device may be a CPU.
    if alone[0].machine.get("device") == "cpu" and not isinstance(cluster.device, Device):
        problem = f"this profile is of a CPU, and {cluster.title} has {cluster.device_spec.title}"
        fix = (
            "Make the profile on such a device, or leave --profile out: the data sheet gives a first estimate. For a"
            " cluster of CPUs, describe the CPU as `device` in a YAML file (docs/plan.md)."
        )
        raise UsageError(problem, where="--profile", fix=fix)
    for one in together:
        cluster = apply_measured_links(one, cluster)
    # A loading rate in the cluster's own file wins over the one that the profile implies.
    if cluster.node.images_s is None and (images_s := estimate_node_loading(alone[0], cluster)) is not None:
        cluster = _update_node(cluster, images_s=images_s)
    estimate = separate_update(estimate_from_profile(alone[0], workload), sheet.compute.update_s)
    doubts = {path: one.verdict.unexplained for path, one in zip(request.profile, profiles, strict=True)}
    warnings = [*estimate.warnings, *(f"{path} was not confirmed. {why}" for path, why in doubts.items() if why)]
    return replace(estimate, warnings=tuple(warnings)), cluster
