"""Estimates of a device's compute time: from a doctor's profile, from measured runs, or from a data sheet."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.core.text_format import pluralise
from headway.core.workload import Workload
from headway.plan import roofline
from headway.plan.calibration import PARAMETERS, RUN_ERROR, MeasuredRun, StepParameters, Vector, calibrate
from headway.plan.cluster import Cluster, Device, IntraNodeLink, load_devices
from headway.plan.job import ComputeEstimate, EstimateBasis, TrainingJob
from headway.plan.losses import LossPriors, load_priors
from headway.plan.plausibility import check_agreement
from headway.plan.prediction import predict_job_step
from headway.plan.roofline import (
    choose_peak,
    count_weight_bytes,
    estimate_sample_time,
    estimate_update_s,
    get_peak_share,
)
from headway.plan.step import NCCL_ALGORITHMS, ComputeTime

NO_PROFILE = (
    "No device was measured: the time of a step comes from the data sheet and may be 2 times off, as the 90 % band"
    " says. Measure one: headway doctor RECIPE, then --profile RECIPE.profile.json."
)
# Largest deviation of a fit from its measurements, as a logarithm, that gives no warning.
MAX_MISFIT = 0.1
# Standard deviation of the logarithm of the compute time by its source: accuracy of the doctor; spread of published
# single-device runs around the roofline, 0.34, with a margin for networks and image sizes that were never measured.
COMPUTE_ERROR: dict[EstimateBasis, float] = {"profile": 0.03, "data sheet": 0.4}
# Likely fixed time of a step: some 400 launches at 10 us each, and one pass of the optimizer, which reads and writes 28
# bytes of each parameter (value, gradient and state in fp32) at half of the memory's bandwidth.
LAUNCHES_S, OPTIMIZER_BYTES, MEMORY_SHARE = 4e-3, 28, 0.5
# Share of its likely variance below which the runs tell the fixed time.
TOLD = 0.5
# Standard deviations by which a fixed time is unusual.
UNUSUAL = 2.0
# Seconds of one kernel launch, and launches per layer and step: forward, two backward, the optimizer's, and one for
# activation or normalisation. Assumed; CUDA graphs and fused optimizers need fewer.
LAUNCH_S, LAUNCHES = 10e-6, 5


def estimate_from_profile(profile: Profile, workload: Workload) -> ComputeEstimate:
    """Estimates the compute time from the training loop of one device, as the doctor measured it.

    On a CPU the loop shares its cores with the loader beside it, so that its slower, measured pace counts.

    Raises UsageError if the profile is of several processes, or of another network.
    """
    if profile.ranks > 1:
        problem = f"this profile measures {profile.ranks} processes together, and a plan needs one device alone"
        raise UsageError(problem, where="--profile", fix="Run headway doctor RECIPE without --procs to write one.")
    wanted = workload.forward_multiply_adds
    if profile.multiply_adds and wanted and not 0.9 <= profile.multiply_adds / wanted <= 1.1:
        problem = (
            f"the profile of {profile.name} has {profile.multiply_adds:,} multiply-adds per image, the workload"
            f" {workload.name} has {wanted:,}"
        )
        raise UsageError(problem, where="--profile", fix="Profile the recipe that you plan, at its image size.")
    loop = {one.stage: one.seconds for one in profile.ceilings if one.side == "loop"}
    total = sum(loop.values()) * profile.batch
    # Only these parts of the loop grow with the batch: image transforms, host-device syncs if there is one per sample,
    # and the slope of forward and backward. Everything else is fixed time of a step.
    grows = loop.get("normalise", 0.0) + loop.get("transform", 0.0)
    if profile.facts.get("syncs a step", 0.0) >= profile.batch:
        grows += loop.get("sync", 0.0)
    points = [(float(samples), seconds) for samples, seconds in profile.launch.items() if seconds > 0]
    if len(points) >= 2:
        # The two largest batches: small ones may run through other kernels.
        (few, less), (many, more) = sorted(points)[-2:]
        grows += max(0.0, (more - less) / (many - few))
    else:
        grows += loop.get("compute", 0.0)
    fixed = max(0.0, total - grows * profile.batch)
    slower = _measure_contention(profile)[1] * profile.batch / total if total else 1.0
    device, priors = profile.machine.get("device") or "its machine", load_priors("headway")
    return ComputeEstimate(
        ComputeTime(slower * fixed, slower * (total - fixed) / profile.batch),
        "profile",
        f"the doctor's profile of {profile.name} on {device}, batch {profile.batch:,}",
        evaluation_s=profile.facts.get("evaluate seconds"),
        checkpoint_s=profile.facts.get("checkpoint seconds", 0.0),
        losses=priors.losses,
        covariance=build_covariance(priors, COMPUTE_ERROR["profile"]),
    )


def separate_update(estimate: ComputeEstimate, update_s: float) -> ComputeEstimate:
    """Separates the optimizer's matrix products from the fixed time of a step, which was measured with them.

    Args:
        update_s: seconds of the products by the data sheet.
    """
    compute = estimate.compute
    update_s = min(update_s, compute.fixed_s)
    compute = replace(compute, fixed_s=compute.fixed_s - update_s, update_s=update_s)
    return replace(estimate, compute=compute)


def estimate_node_loading(profile: Profile, cluster: Cluster) -> float | None:
    """Estimates the images/s that the loaders of one node deliver. None: the profiled data were synthetic.

    Each device has its own loader. Loaders of GPUs share the cores of the node, by the profile's fit over threads; a
    CPU that trains has the loader of the profile. Files are taken to be in the page cache.
    """
    if _trains_on_cpu(profile):
        loader_s = _measure_contention(profile)[0]
        return cluster.devices / loader_s if loader_s else None
    seconds = {one.stage: one.seconds for one in profile.ceilings if one.side == "input"}
    if not any(seconds.values()):
        return None
    cores = cluster.node.cores or profile.machine.get("usable_cores")
    if profile.threads is None or not isinstance(cores, int | float) or cores <= 0:
        return cluster.devices / sum(seconds.values())
    fit = profile.threads
    return cluster.devices / (fit.serial_s + fit.parallel_s * cluster.devices / cores)


def _trains_on_cpu(profile: Profile) -> bool:
    return profile.machine.get("device") == "cpu"


def _measure_contention(profile: Profile) -> tuple[float, float]:
    """Returns the seconds per sample of (loader, loop), slowed down by each other if both run on one CPU."""
    loader, loop, stalls = (
        sum(one.seconds for one in profile.ceilings if one.side == side) for side in ("input", "loop", "stall")
    )
    timing = profile.together
    if timing is None or not _trains_on_cpu(profile):
        return loader, loop
    # The slower side takes the doctor's prediction for the whole job, without stalls; the faster one is slowed down by
    # the measured ratio, but never beyond the slower side.
    steady = max(1 / profile.predicted - stalls, loader, loop)
    if timing.input_beside > timing.loop_beside:
        return steady, min(steady, loop * max(1.0, timing.loop_beside / timing.loop_alone))
    return min(steady, loader * max(1.0, timing.input_beside / timing.input_alone)), steady


def apply_measured_links(profile: Profile, cluster: Cluster) -> Cluster:
    """Returns the cluster with the intra-node link and jitter that ranks of one host measured (doctor --procs).

    Raises UsageError if the profile has no exchange between processes on one host.
    """
    facts = profile.facts
    if profile.ranks < 2 or not {"exchange bytes/s", "exchange latency seconds"} <= set(facts):
        problem = "this profile has no exchange between processes"
        raise UsageError(problem, where="--profile", fix="Run headway doctor RECIPE --procs N to write one that has.")
    around, latency = 2 * (profile.ranks - 1) / profile.ranks, facts["exchange latency seconds"]
    # The profile does not say in how many buckets gradients were exchanged. One latency is subtracted: with many
    # buckets the links look slower than they are.
    taken = facts.get("exchange alone seconds a step", math.inf)
    sending = max(0.1, 1 - latency / taken)
    inside = IntraNodeLink(
        gb_s=facts["exchange bytes/s"] / sending * around / 1e9,
        latency_us=latency * 1e6 / (2 * (profile.ranks - 1)),
    )
    steps = [seconds for name, seconds in facts.items() if re.fullmatch(r"rank \d+ seconds a step", name)]
    changes: dict[str, object] = {"inside": inside}
    if len(steps) > 2:
        changes["jitter"] = min(0.5, statistics.stdev(steps) / statistics.mean(steps))
    return cluster.model_copy(update=changes)


def estimate_from_runs(runs: Sequence[MeasuredRun], job: TrainingJob, cluster: Cluster) -> ComputeEstimate:
    """Estimates the compute time from runs that were measured on such a cluster.

    Args:
        job: gives the gradients that the runs exchanged, and the micro-batches in which a step took its samples.

    Raises UsageError if the devices of a run do not fill whole nodes, or the runs contradict each other.
    """
    for run in runs:
        if run.ranks > cluster.devices and run.ranks % cluster.devices:
            problem = f"{run.ranks} devices do not fill nodes of {cluster.devices}"
            fix = f"Give runs on up to {cluster.devices} devices, or on whole nodes."
            raise UsageError(problem, where="--runs", fix=fix)

    def add_update(compute: ComputeTime) -> ComputeTime:
        # The data sheet tells the optimizer's products, and the runs the rest of the fixed time.
        return replace(compute, update_s=job.compute.update_s)

    def predict_seconds(parameters: StepParameters, run: MeasuredRun) -> float:
        nodes = max(1, run.ranks // cluster.devices)
        used = cluster if run.ranks >= cluster.devices else cluster.model_copy(update={"devices": run.ranks})
        # As `predict` takes it, so that a plan at a run's own devices and batch gives that run back.
        one_step = replace(
            job, compute=add_update(parameters.compute), losses=parameters.losses, algorithms=NCCL_ALGORITHMS,
            per_device=None, batch=run.ranks * run.samples_per_rank,
        )  # fmt: skip
        samples = one_step.find_largest_share(run.ranks)
        return predict_job_step(one_step, used, used.build_network(nodes), samples).seconds

    priors = load_priors("field")
    likely_s = estimate_fixed_s(job.parameters, cluster.device_spec)
    found = calibrate(runs, predict_seconds, priors, likely_s)
    predicted_s = [predict_seconds(found.parameters, run) for run in runs]
    check_agreement(runs, predicted_s, job.unit)
    off = [seconds / run.seconds for seconds, run in zip(predicted_s, runs, strict=True)]
    warnings = [
        f"One fit does not explain all runs: {run.ranks:,}x{run.samples_per_rank:g} gave {run.images_s:,.0f}"
        f" {job.unit}/s, and {run.images_s / times:,.0f} are predicted."
        for run, times in zip(runs, off, strict=True)
        if abs(math.log(times)) > MAX_MISFIT
    ]
    fixed_at, fixed_s = PARAMETERS.index("fixed time"), found.parameters.compute.fixed_s
    if abs(found.moved[fixed_at]) > UNUSUAL * priors.spreads[0]:
        warnings.append(
            f"These runs imply a fixed time of {fixed_s * 1e3:.3g} ms a step; on such devices"
            f" {priors.fixed * likely_s * 1e3:.3g} ms are usual."
        )
    if found.moved[PARAMETERS.index("contention")] > UNUSUAL * priors.spreads[1]:
        lost = found.parameters.losses.contention * math.log2(cluster.devices)
        warnings.append(
            f"Together, the devices of a node are {lost:.0%} slower than alone. Do the CPUs load fast enough for all of"
            " them? headway doctor RECIPE --procs N says so."
        )
    covariance = priors.band**2 * found.covariance
    # Runs that contradict each other say less than their number promises.
    covariance[0, 0] += statistics.fmean(math.log(times) ** 2 for times in off) + RUN_ERROR**2
    return ComputeEstimate(
        add_update(found.parameters.compute),
        "runs",
        _describe_runs(runs, found.covariance[fixed_at, fixed_at] < TOLD * priors.spreads[0] ** 2),
        tuple(warnings),
        losses=found.parameters.losses,
        algorithms=NCCL_ALGORITHMS,
        covariance=covariance,
    )


def _describe_runs(runs: Sequence[MeasuredRun], knows_fixed: bool) -> str:
    """Describes the runs, and whether they tell the fixed time of a step."""
    counts = sorted({run.ranks for run in runs})
    on = f"{', '.join(f'{one:,}' for one in counts[:-1])}{' and ' * (len(counts) > 1)}{pluralise(counts[-1], 'device')}"
    usual = "" if knows_fixed else "; the fixed time is a usual one, which runs with another batch would tell"
    return f"{pluralise(len(runs), 'run')} on {on}{usual}"


def estimate_fixed_s(parameters: float, device: Device) -> float:
    """Estimates the fixed time of a step before anything is measured: launches and one pass of the optimizer."""
    return LAUNCHES_S + parameters * OPTIMIZER_BYTES / (device.memory_gb_s * 1e9 * MEMORY_SHARE)


def build_covariance(priors: LossPriors, compute_error: float) -> Vector:
    """Builds the covariance of a step's parameters, whose losses nothing but the priors tell."""
    losses = priors.band * np.array(priors.spreads)
    return np.diag(np.array([compute_error, *losses]) ** 2)


def estimate_from_data_sheet(workload: Workload, device: Device) -> ComputeEstimate:
    """Estimates the compute time by the roofline of a device's data sheet; the least accurate of the three ways."""
    kind, peak = choose_peak(workload.step.precision, device)
    sheet, time = device.tflops, estimate_sample_time(workload, device)
    weights_s = count_weight_bytes(workload) / (device.memory_gb_s * 1e9 * roofline.MEMORY_SHARE)
    warnings = [NO_PROFILE]
    precision = workload.step.precision
    if precision == "bf16" and not device.has_bf16:
        # PyTorch emulates bf16 there: it reads and writes 16 bits, and computes in fp32.
        warning = f"{device.title} has no units for bf16, so this plan computes at its rate in fp32."
        fp16 = f" Plan with precision=fp16, in which it has {sheet.mixed:g} TFLOPS." if sheet.mixed else ""
        own = "" if device in load_devices().values() else " If it has them, write bf16: true in your file."
        warnings.append(warning + fp16 + own)
    elif precision == "fp32" and sheet.mixed is not None:
        warning = f"The workload computes in fp32, and {device.title} has {sheet.mixed:g} TFLOPS in mixed precision: "
        kinds = "bf16 (or fp16)" if device.has_bf16 else "fp16"
        warnings.append(f"{warning}plan with precision={kinds} after the recipe, or after the name of a network.")
    return ComputeEstimate(
        ComputeTime(
            LAUNCH_S * LAUNCHES * len(workload.layers) + weights_s, time.seconds, estimate_update_s(workload, device)
        ),
        "data sheet",
        f"the data sheet alone: {get_peak_share(kind):.0%} of {peak:g} TFLOPS ({kind}), and"
        f" {roofline.MEMORY_SHARE:.0%} of {device.memory_gb_s:,.0f} GB/s, which limits {time.memory_share:.0%} of it",
        tuple(warnings),
        losses=load_priors("field").losses,
        covariance=build_covariance(load_priors("field"), COMPUTE_ERROR["data sheet"]),
    )
