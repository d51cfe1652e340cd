"""A job to be planned, from what is known of it: a workload, and a profile, measured runs, or a device's data sheet."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.core.workload import Workload
from headway.plan.answer import Job, step_of
from headway.plan.calibrate import Run, calibrate
from headway.plan.cluster import Cluster, Device, Inside
from headway.plan.convergence import Epochs, Point, fit, from_noise, official
from headway.plan.step import BACKWARD, Compute, Step, gradients_of

Basis = Literal["profile", "runs", "data sheet"]

SHARE = {"fp32": 0.5, "tensor cores": 0.2}
"""Of a device's peak that convolutional networks reach in training. Single devices in published runs of ResNet-50: fp32
0.29 (K80) to 0.69 (P100), mixed precision 0.16 to 0.27 (V100 to H100)."""
ERROR: dict[Basis, float] = {"profile": 0.03, "runs": 0.05, "data sheet": 0.35}
"""Standard deviation of a step's computing, by what it comes from: to which the doctor measures; from day to day; and
what `SHARE` leaves open."""
MISFIT = 0.1
"""Between what a run gave and what is reckoned of it, or epochs of a batch, that goes without a word."""
LAUNCH_S, LAUNCHES = 10e-6, 5
"""Of one kernel, and how many a layer takes in a step: forward, two backward, and the optimizer's, of a layer and what
follows it (assumed; graphs and fused optimizers take fewer)."""
FORWARD = 1 / 3
"""Of a training step, that an evaluated sample takes."""


@final
@dataclass(frozen=True)
class Known:
    """Attributes: compute: of one device. basis: what it comes from; how: in words. warnings: why it may not hold
    there. evaluation_s: of one, on one device; None: a share of `compute`. checkpoint_s: for which one holds the run
    up. misfit: root mean square of measured steps around it, in logarithms."""

    compute: Compute
    basis: Basis
    how: str
    warnings: tuple[str, ...] = ()
    evaluation_s: float | None = None
    checkpoint_s: float = 0.0
    misfit: float = 0.0


def of_profile(profile: Profile, workload: Workload) -> Known:
    """The training loop of one device, as the doctor measured it.

    Forward and backward at several batches say what grows with the batch; all else of a step is as long whatever the
    batch, but for what is done to the images, and values that are read of each of them. Where processors train, the
    loop is as slow as the loader beside it makes it.

    Raises:
        UsageError: it is of several processes, or of another network.
    """
    if profile.ranks > 1:
        what = f"this profile is of {profile.ranks} processes together; a device's step is that of one alone"
        raise UsageError(what, where="--profile", fix="headway doctor RECIPE, without --procs, writes one.")
    wanted = workload.forward_multiply_adds
    if profile.multiply_adds and wanted and not 0.9 <= profile.multiply_adds / wanted <= 1.1:
        what = (
            f"the profile of {profile.name} is of {profile.multiply_adds:,} multiply-adds an image, the workload"
            f" {workload.name} of {wanted:,}"
        )
        raise UsageError(what, where="--profile", fix="Examine the recipe that is planned, at its image size.")
    of_loop = {one.stage: one.seconds for one in profile.ceilings if one.side == "loop"}
    total = sum(of_loop.values()) * profile.batch
    grows = of_loop.get("normalise", 0.0) + of_loop.get("transform", 0.0)
    if profile.facts.get("syncs a step", 0.0) >= profile.batch:
        grows += of_loop.get("sync", 0.0)
    points = [(float(samples), seconds) for samples, seconds in profile.launch.items() if seconds > 0]
    if len(points) >= 2:
        (few, less), (many, more) = sorted(points)[-2:]  # small batches may go through other code
        grows += max(0.0, (more - less) / (many - few))
    else:
        grows += of_loop.get("compute", 0.0)
    fixed = max(0.0, total - grows * profile.batch)
    slower = _beside(profile)[1] * profile.batch / total if total else 1.0
    compute = Compute(slower * fixed, slower * (total - fixed) / profile.batch)
    where = profile.machine.get("device") or "its machine"
    how = f"the doctor's profile of {profile.name} on {where}, batch {profile.batch:,}"
    facts = profile.facts
    return Known(
        compute,
        "profile",
        how,
        evaluation_s=facts.get("evaluate seconds"),
        checkpoint_s=facts.get("checkpoint seconds", 0.0),
    )


def loading_of(profile: Profile, cluster: Cluster) -> float | None:
    """Images/s that a node's processors load, by what they do on the profile's machine; None: the data are synthetic.

    Each device has a loader of its own. Those of GPUs share the node's cores, by the fit over threads; a processor that
    trains has what the profile's had. Files are in memory.
    """
    if _on_processor(profile):
        loader_s = _beside(profile)[0]
        return cluster.devices / loader_s if loader_s else None
    seconds = {one.stage: one.seconds for one in profile.ceilings if one.side == "input"}
    if not any(seconds.values()):
        return None
    cores = cluster.node.cores or profile.machine.get("usable_cores")
    if profile.threads is None or not isinstance(cores, int | float) or cores <= 0:
        return cluster.devices / sum(seconds.values())
    fit = profile.threads
    return cluster.devices / (fit.serial_s + fit.parallel_s * cluster.devices / cores)


def _on_processor(profile: Profile) -> bool:
    return profile.machine.get("device") == "cpu"


def _beside(profile: Profile) -> tuple[float, float]:
    """Seconds of a sample that (loader, loop) take: alone; or on a processor that does both, so that the slower of them
    is what the doctor predicts of the whole job, stalls left out."""
    loader, loop, stalls = (
        sum(one.seconds for one in profile.ceilings if one.side == side) for side in ("input", "loop", "stall")
    )
    found = profile.together
    if found is None or not _on_processor(profile):
        return loader, loop
    steady = max(1 / profile.predicted - stalls, loader, loop)
    if found.input_beside > found.loop_beside:
        return steady, min(steady, loop * max(1.0, found.loop_beside / found.loop_alone))
    return min(steady, loader * max(1.0, found.input_beside / found.input_alone)), steady


def links_of(profile: Profile, cluster: Cluster) -> Cluster:
    """The cluster with links inside a node, and jitter, as ranks on one host had them (headway doctor --procs).

    The profile does not tell in how many buckets they exchanged gradients: the latency of one is taken off what the
    exchange took, so that with many the links are thought slower than they are.

    Raises:
        UsageError: it is of one process, or they ran on several hosts.
    """
    facts = profile.facts
    if profile.ranks < 2 or not {"exchange bytes/s", "exchange latency seconds"} <= set(facts):
        what = "this profile has no exchange between processes"
        raise UsageError(what, where="--profile", fix="headway doctor RECIPE --procs N writes one that has.")
    around, latency = 2 * (profile.ranks - 1) / profile.ranks, facts["exchange latency seconds"]
    taken = facts.get("exchange alone seconds a step", math.inf)
    sending = max(0.1, 1 - latency / taken)
    inside = Inside(
        gb_s=facts["exchange bytes/s"] / sending * around / 1e9,
        latency_us=latency * 1e6 / (2 * (profile.ranks - 1)),
    )
    steps = [seconds for name, seconds in facts.items() if re.fullmatch(r"rank \d+ seconds a step", name)]
    changes: dict[str, object] = {"inside": inside}
    if len(steps) > 2:
        changes["jitter"] = min(0.5, statistics.stdev(steps) / statistics.mean(steps))
    return cluster.model_copy(update=changes)


def of_runs(runs: Sequence[Run], job: Job, cluster: Cluster) -> Known:
    """By runs that were measured on such a cluster.

    Args:
        job: whose exchange they had.

    Raises:
        UsageError: devices do not fill their nodes.
    """
    for run in runs:
        if run.ranks > cluster.devices and run.ranks % cluster.devices:
            what = f"{run.ranks} devices do not fill nodes of {cluster.devices}"
            raise UsageError(what, where="--runs", fix=f"Take runs on up to {cluster.devices}, or on whole nodes.")

    def step_for(compute: Compute, run: Run) -> Step:
        nodes = max(1, run.ranks // cluster.devices)
        where = cluster if run.ranks >= cluster.devices else cluster.model_copy(update={"devices": run.ranks})
        return step_of(replace(job, compute=compute, accumulate=1), where, where.network(nodes), run.samples)

    scales, compute = ", ".join(f"{one.ranks:,}" for one in runs), calibrate(runs, step_for)
    off = [step_for(compute, run).seconds / run.seconds for run in runs]
    warnings = [
        f"One fit does not explain all runs: {run.ranks:,}x{run.samples:g} gave {run.images_s:,.0f} images/s, and"
        f" {run.images_s / times:,.0f} are reckoned."
        for run, times in zip(runs, off, strict=True)
        if abs(math.log(times)) > MISFIT
    ]
    misfit = math.sqrt(statistics.fmean(math.log(times) ** 2 for times in off))
    return Known(compute, "runs", f"runs on {scales} devices", tuple(warnings), misfit=misfit)


def of_device(workload: Workload, device: Device) -> Known:
    """By its data sheet alone."""
    sheet = device.tflops
    kind, peak = "fp32", sheet.fp32
    if workload.step.precision != "fp32" and sheet.mixed is not None:
        kind, peak = "mixed", sheet.mixed
    elif sheet.tf32 is not None:
        kind, peak = "TF32", sheet.tf32
    share = SHARE["fp32" if kind == "fp32" else "tensor cores"]
    fixed = LAUNCH_S * LAUNCHES * len(workload.layers)
    how = f"the data sheet alone: {share:.0%} of {peak:g} TFLOPS ({kind})"
    warnings = []
    if kind != "mixed" and sheet.mixed is not None:
        warning = f"The workload computes in fp32, and {device.title} has {sheet.mixed:g} TFLOPS in mixed precision: "
        kinds = "fp16" if sheet.tf32 is None else "bf16 (or fp16)"  # both formats came with the A100
        warnings.append(f"{warning}headway train RECIPE --dry-run precision={kinds} writes a workload for that.")
    compute = Compute(fixed, workload.operations / (peak * 1e12 * share))
    return Known(compute, "data sheet", how, tuple(warnings))


def epochs_of(
    workload: Workload, *, points: Sequence[Point] = (), noise_scale: float | None = None
) -> tuple[Epochs | float, str]:
    """(epochs by batch, where they are from). With nothing known of larger batches, those of the recipe for all; of
    ResNet-50 on ImageNet by LARS the official runs are known.

    Raises:
        UsageError: both several batches and a noise scale are given.
    """
    if len({one.batch for one in points}) >= 2:
        if noise_scale is not None:
            what = "several batches say what a noise scale would: only one of them is used"
            raise UsageError(what, where="--noise-scale", fix="Leave one of them out.")
        found = fit(points)
        off = "exactly" if found.error is None else f"{found.error:.1%} off in the root mean square"
        return found, f"{len(points)} batches, fitted {off}"
    if noise_scale is not None:
        at = points[0] if points else Point(workload.step.batch, workload.run.epochs)
        found = from_noise(noise_scale, at.batch, at.epochs)
        return found, f"the gradient's noise scale of {noise_scale:,.0f}, and {at.epochs:g} epochs at {at.batch:,.0f}"
    if points:
        return points[0].epochs, UNKNOWN
    if is_official(workload):
        return fit(official()), "MLPerf's official runs of ResNet-50 by LARS"
    return workload.run.epochs, UNKNOWN


UNKNOWN = "one number whatever the batch: --epochs-at or --noise-scale know better"
IMAGENET = range(1_200_000, 1_300_000)
"""Samples."""


def is_official(workload: Workload) -> bool:
    """Tells whether official results exist for this job: ResNet-50 by LARS on a set of the size of ImageNet."""
    name, optimizer = workload.name.lower(), workload.step.update.optimizer.lower()
    return "resnet50" in name and optimizer == "lars" and workload.run.samples in IMAGENET


def job_of(
    workload: Workload,
    known: Known,
    epochs: Epochs | float,
    *,
    per_device: float | None = None,
    batch: float | None = None,
    accumulate: int | None = None,
    spread: bool = False,
) -> Job:
    """Of a workload; one of `per_device` and `batch`, else a device gets what a device of the dry run has, in as many
    micro-batches of the same size.

    Of images that grow during the run, a sample takes what it takes in the mean.
    """
    asked = workload.step
    if per_device is None and batch is None:
        share = asked.batch / asked.ranks
        parts = math.ceil(share / (asked.micro_batch or share))
        per_device, accumulate = share / parts, accumulate or parts
    backward = 2 * workload.backward_multiply_adds / workload.operations if workload.operations else BACKWARD
    run = workload.run
    seen = sum(phase.steps * phase.batch for phase in run.phases)
    mean = sum(phase.steps * phase.batch * phase.forward_multiply_adds for phase in run.phases) / max(1, seen)
    grown = mean / workload.forward_multiply_adds if workload.forward_multiply_adds and mean else 1.0
    compute = replace(known.compute, sample_s=known.compute.sample_s * grown)
    shapes = [layer.input_shape for layer in workload.layers if layer.forward_multiply_adds]
    rows = [shape[0] * shape[2] * asked.value_bytes for shape in shapes if shape and len(shape) == 3 and shape[1] > 1]
    return Job(
        samples=run.samples,
        encoded_bytes=workload.input.encoded_bytes,
        compute=compute,
        gradients=tuple(gradients_of(workload)),
        bucket_bytes=asked.exchange.bucket_bytes,
        edges=tuple(map(float, rows)),
        epochs=epochs,
        per_device=per_device,
        batch=batch,
        accumulate=accumulate or 1,
        wire_ratio=asked.exchange.wire_ratio,
        backward=backward,
        evaluations=run.evaluations,
        evaluation_s=_evaluation_s(workload, known),
        checkpoints=run.checkpoints,
        checkpoint_s=known.checkpoint_s,
        compute_error=math.hypot(ERROR[known.basis], known.misfit),
        spread=spread,
    )


def _evaluation_s(workload: Workload, known: Known) -> float:
    """On one device."""
    if known.evaluation_s is not None:
        return known.evaluation_s
    return (workload.run.evaluation_samples or 0) * known.compute.sample_s * FORWARD


def read_nodes(text: str) -> list[int]:
    """Of `1..64` (doubling, ends included), `1,2,4` or `8`. Raises UsageError."""
    try:
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", text.strip()):
            low, high = int(match[1]), int(match[2])
            if not 1 <= low <= high:
                raise ValueError
            found = [low]
            while found[-1] * 2 < high:
                found.append(found[-1] * 2)
            return sorted({*found, high})
        found = [int(part) for part in text.split(",")]
        if min(found) < 1:
            raise ValueError
    except ValueError:
        fix = "1..64 (the fewest first, 1 or more), or 1,2,4."
        raise UsageError(f"{text!r} is no count of nodes", where="--nodes", fix=fix) from None
    return found


def read_runs(text: str) -> list[Run]:
    """Of `DEVICESxSAMPLES:IMAGES_S,...`, samples of a device. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)\s*", part)
        if match is None or not all(float(number) > 0 for number in match.groups()):
            fix = "Devices, samples of each, images/s of all: 8x208:11105,512x65:604217."
            raise UsageError(f"{part.strip()!r} is no run", where="--runs", fix=fix)
        found.append(Run(int(match[1]), float(match[2]), float(match[3])))
    return found


def read_points(text: str) -> list[Point]:
    """Of `BATCH:EPOCHS,...`. Raises UsageError."""
    fix = "Batches and the epochs that each took to the target: 1632:35,32768:56."
    return [Point(*pair) for pair in read_pairs(text, "--epochs-at", "a batch with its epochs", fix)]


def read_pairs(text: str, where: str, what: str, fix: str) -> list[tuple[float, float]]:
    """Of `X:Y,...`, all above 0 (1e-18, and below 1e18). Raises UsageError."""
    found = []
    for part in text.split(","):
        try:
            x, y = map(float, part.split(":"))
            if not (1e-18 < x < 1e18 and 1e-18 < y < 1e18):
                raise ValueError
        except ValueError:
            raise UsageError(f"{part.strip()!r} is not {what}", where=where, fix=fix) from None
        found.append((x, y))
    return found
