"""A job to be planned, from what is known of it: a workload, and a profile, measured runs, or a device's data sheet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from headway.core.collectives import fitted
from headway.core.errors import UsageError
from headway.core.profile import Profile, Workload
from headway.plan.answer import Job
from headway.plan.calibrate import FIXED_S, Run, calibrate
from headway.plan.cluster import Cluster, Device
from headway.plan.convergence import Epochs, Point, fit, from_noise
from headway.plan.step import BACKWARD, Bucket, Compute, Step, buckets_of, step

Basis = Literal["profile", "runs", "data sheet"]

SHARE = {"fp32": 0.5, "mixed": 0.2}
"""Of a device's peak that convolutional networks reach in training. Single devices in published runs of ResNet-50: fp32
0.29 (K80) to 0.69 (P100), mixed precision 0.16 to 0.27 (V100 to H100)."""
ERROR: dict[Basis, float] = {"profile": 0.03, "runs": 0.05, "data sheet": 0.35}
"""Standard deviation of a step's computing, by what it comes from."""


@final
@dataclass(frozen=True)
class Known:
    """Attributes: compute: of one device. basis: what it comes from; how: in a sentence."""

    compute: Compute
    basis: Basis
    how: str


def of_profile(profile: Profile) -> Known:
    """The training loop of one device, as the doctor measured it.

    Forward and backward at several batches say what grows with the batch; all else of a step is as long whatever the
    batch, but for what is done to the images.
    """
    of_loop = {one.stage: one.seconds for one in profile.ceilings if one.side == "loop"}
    apart = {"reduce", "slow rank"}  # of other ranks: the plan has its own
    total = sum(seconds for stage, seconds in of_loop.items() if stage not in apart) * profile.batch
    grows = of_loop.get("transform", 0.0)
    points = [(float(samples), seconds) for samples, seconds in profile.launch.items() if seconds > 0]
    if len(points) >= 2:
        line = fitted(points)
        grows += line.s_per_byte
    else:
        grows += of_loop.get("compute", 0.0)
    fixed = max(0.0, total - grows * profile.batch)
    compute = Compute(fixed, (total - fixed) / profile.batch)
    return Known(compute, "profile", f"the doctor's profile of {profile.name}, batch {profile.batch:,}")


def of_runs(runs: Sequence[Run], buckets: Sequence[Bucket], cluster: Cluster) -> Known:
    """By runs that were measured on such a cluster."""

    def step_of(compute: Compute, run: Run) -> Step:
        nodes = max(1, -(-run.ranks // cluster.devices))
        network = cluster.network(nodes)
        if run.ranks < cluster.devices:
            network = cluster.model_copy(update={"devices": run.ranks}).network(1)
        return step(compute, run.samples, buckets, network, jitter=cluster.jitter, among=cluster.algorithms)

    scales = ", ".join(f"{one.ranks:,}" for one in runs)
    return Known(calibrate(runs, step_of), "runs", f"runs on {scales} devices")


def of_device(workload: Workload, device: Device) -> Known:
    """By its data sheet alone."""
    kind = "fp32" if workload.step.precision == "fp32" or "mixed" not in device.tflops else "mixed"
    operations = 2 * (workload.forward_multiply_adds + workload.backward_multiply_adds)
    speed = device.tflops[kind] * 1e12 * SHARE[kind]
    how = f"the data sheet alone: {SHARE[kind]:.0%} of {device.tflops[kind]:g} TFLOPS ({kind})"
    return Known(Compute(FIXED_S, operations / speed), "data sheet", how)


def epochs_of(
    workload: Workload, *, points: Sequence[Point] = (), noise_scale: float | None = None
) -> tuple[Epochs | float, str]:
    """(epochs by batch, where they are from). With nothing known of larger batches, those of the recipe for all."""
    if len({one.batch for one in points}) >= 2:
        found = fit(points)
        return found, f"{len(points)} batches, fitted within {found.error or 0:.1%}"
    if noise_scale is not None:
        at = points[0] if points else Point(workload.step.batch, workload.run.epochs)
        found = from_noise(noise_scale, at.batch, at.epochs)
        return found, f"the gradient's noise scale of {noise_scale:,.0f}, and {at.epochs:g} epochs at {at.batch:,.0f}"
    number = points[0].epochs if points else workload.run.epochs
    return number, "the recipe, whatever the batch: give --noise-scale or --epochs-at to know better"


def job_of(
    workload: Workload,
    known: Known,
    epochs: Epochs | float,
    *,
    per_device: float | None = None,
    batch: float | None = None,
    accumulate: int = 1,
    spread: bool = False,
) -> Job:
    """Of a workload; one of `per_device` and `batch`, else a device gets what the recipe's one device has."""
    if per_device is None and batch is None:
        per_device = float(workload.step.micro_batch or workload.step.batch)
    total = workload.forward_multiply_adds + workload.backward_multiply_adds
    share = workload.backward_multiply_adds / total if total else BACKWARD
    run, scale = workload.run, 1 / 3  # an evaluation goes forward only
    evaluated = run.evaluation_samples or 0
    return Job(
        samples=run.samples,
        encoded_bytes=workload.input.encoded_bytes,
        compute=known.compute,
        buckets=tuple(buckets_of(workload)),
        epochs=epochs,
        per_device=per_device,
        batch=batch,
        accumulate=accumulate,
        wire_ratio=workload.step.exchange.wire_ratio,
        backward=share,
        evaluations=run.evaluations,
        evaluation_s=evaluated * known.compute.sample_s * scale,
        compute_error=ERROR[known.basis],
        spread=spread,
    )


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
        raise UsageError(f"{text!r} is no count of nodes", where="--nodes", fix="1..64, or 1,2,4.") from None
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
    """Of `X:Y,...`, all above 0. Raises UsageError."""
    found = []
    for part in text.split(","):
        try:
            x, y = map(float, part.split(":"))
            if not (0 < x < float("inf") and 0 < y < float("inf")):
                raise ValueError
        except ValueError:
            raise UsageError(f"{part.strip()!r} is not {what}", where=where, fix=fix) from None
        found.append((x, y))
    return found
