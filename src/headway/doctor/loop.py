"""What the loop gives when batches cost nothing, and which of its stages takes how long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import final

import torch

from headway.core.modules import leaving_no_trace
from headway.core.profile import Rate
from headway.data.batch import Batch
from headway.doctor.job import Job, resized
from headway.doctor.measure import least_window_s, settled, timed
from headway.doctor.syncs import Syncs, counted
from headway.train.prepare import divided, prepared
from headway.train.trainer import Trainer

SMALL = 2
"""Samples of the smallest pass: batch norm wants two."""
LARGER = 32
"""What a small batch is compared with, at least."""
LONG_STEP_S = 0.25
"""A step that takes longer needs few repetitions, and has no time for many."""
WAITS = 0.5
"""Share of a stage's time in which no thread of the process runs or waits for a core, from which on it waits for
something else."""
MOSTLY = 0.5
"""Share of a stage that reading values takes, from which on it does little else."""
READS = 200


@final
@dataclass(frozen=True)
class Looped:
    """Attributes: seconds: of a sample, by stage; they add up to 1 / rate. launch: seconds of forward and backward, by
    the number of samples. syncs: of a step."""

    rate: Rate
    seconds: Mapping[str, float]
    launch: Mapping[int, float]
    syncs: Syncs


def looped(job: Job, *, limit_s: float, passes_s: float) -> Looped:
    """Trains on batches that are there already. The loop is the Trainer's own."""
    with job.trainer(batches=job.kept()) as trainer:
        rate, laps = stepped(job, trainer, limit_s=limit_s)
        syncs = counted(trainer, 1 if job.batch / rate.value > LONG_STEP_S else 3)
    passes = by_batch(job, limit_s=passes_s)
    whole = 1 / rate.value
    forward_backward = sum(laps.get(name, 0.0) for name in ("forward", "loss", "backward"))
    if job.setup.device.type == "cuda":  # whose laps are the time to hand work over
        at = min(passes, key=lambda count: abs(count - job.batch))
        forward_backward = passes[at] / at
    launch = min(forward_backward, intercept(passes) / job.batch)
    seconds = {
        "transform": laps.get("augment", 0.0),
        "launch": launch,
        "compute": forward_backward - launch,
        "optimizer": laps.get("optimizer", 0.0),
    }
    seconds["sync"] = _waiting(job, seconds, laps, syncs, limit_s=passes_s)
    seconds["log"] = laps.get("log", 0.0)
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    scale = whole / sum(seconds.values())
    return Looped(rate, {name: value * scale for name, value in seconds.items()}, passes, syncs)


def stepped(job: Job, trainer: Trainer, *, limit_s: float) -> tuple[Rate, dict[str, float]]:
    """Rate of a Trainer's steps, and seconds of a sample in each stage of its Clock."""
    wait = waiting(job.setup.device)
    a_step = warmed(trainer, wait)
    before, begun = dict(trainer.clock.seconds), trainer.position
    steps = max(1, round(least_window_s() / a_step))
    rate = settled(timed(lambda: advanced(trainer, steps, wait)), limit_s=limit_s)
    images, after = trainer.position - begun, trainer.clock.seconds
    return rate, {name: (value - before.get(name, 0.0)) / images for name, value in after.items()}


def advanced(trainer: Trainer, steps: int, wait: Callable[[], object]) -> int:
    """Images of so many steps, which are done once this returns."""
    position = trainer.position
    trainer.run(steps)
    wait()
    return trainer.position - position


def warmed(trainer: Trainer, wait: Callable[[], object]) -> float:
    """Seconds of a step, once what is allocated, chosen or compiled at first is there."""
    seconds = 0.0
    for number in range(4):
        begun = perf_counter()
        trainer.run(1)
        wait()
        seconds = max(perf_counter() - begun, 1e-6)
        if number and seconds > LONG_STEP_S:
            break
    return seconds


def rate_of(job: Job, *, limit_s: float) -> Rate:
    """Of the loop alone, with batches that are there already."""
    with job.trainer(batches=job.kept()) as trainer:
        return stepped(job, trainer, limit_s=limit_s)[0]


def by_batch(job: Job, *, limit_s: float) -> dict[int, float]:
    """Seconds of a forward and backward pass over so many samples: two, a micro-batch, and one between or beyond."""
    setup = job.setup
    micro = setup.recipe.micro_batch
    most = min(job.batch, micro) if isinstance(micro, int) else job.batch
    other = max(4 * most, LARGER) if most <= LARGER else max(LARGER, most // 4)
    counts = sorted({SMALL, max(SMALL, most), other})
    if setup.recipe.compile:  # a compiler would make another network for each size
        counts = [max(SMALL, most)]
    found = {}
    for count in counts:
        run = passing(job, resized(job.kept()[0], count, setup.device))
        try:
            run()
        except (RuntimeError, MemoryError):
            if count <= most:
                raise
            continue  # there is no memory for more than the run takes at once
        found[count] = count / settled(timed(run), limit_s=limit_s / len(counts)).value
    return found


def passing(job: Job, batch: Batch) -> Callable[[], int]:
    """Forward and backward over one batch, that leaves no gradients."""
    setup, wait = job.setup, waiting(job.setup.device)
    images, labels = prepared(setup, batch, 1)
    weights = torch.full((len(images),), 1 / len(images), device=setup.device)
    parameters = [value for value in setup.model.parameters() if value.requires_grad]

    def run() -> int:
        for part, some, weight in divided(setup, images, labels, weights):
            with setup.precision.autocast():
                outputs = setup.forward(part)
            setup.precision.backward(setup.task.loss(outputs.float(), some), weight)
        for one in parameters:
            one.grad = None
        wait()
        return len(images)

    return run


def intercept(seconds: Mapping[int, float]) -> float:
    """Of a straight line through the two largest numbers of samples: what a pass takes whatever its batch, as a larger
    one than the run's would show it. Two samples alone may go through other, cheaper code."""
    if len(seconds) < 2:
        return 0.0
    (low, first), (high, last) = sorted(seconds.items())[-2:]
    slope = max(0.0, (last - first) / (high - low))
    return max(0.0, first - slope * low)


def waiting(device: torch.device) -> Callable[[], object]:
    """Waits for the device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _waiting(job: Job, seconds: dict[str, float], laps: Mapping[str, float], syncs: Syncs, *, limit_s: float) -> float:
    """Seconds of a sample that the loop waits for a value or for something outside, taken out of the stages in which it
    does. On a GPU a wait shows in the stage that asks for it; on a CPU asking takes the interpreter's time alone."""
    found = 0.0
    if job.setup.transform is not None:
        alone, idle = _transform(job, limit_s=limit_s)
        if idle >= WAITS:
            found = min(alone, seconds["transform"])
        elif syncs.of.get("augment", 0):
            found = min(seconds["transform"], _asking("augment", min(alone, seconds["transform"]), job, syncs))
        seconds["transform"] -= found
    for stage in ("loss", "forward"):
        if syncs.of.get(stage, 0):
            lost = _asking(stage, laps.get(stage, 0.0), job, syncs)
            found += (lost := min(lost, seconds["launch"] + seconds["compute"]))
            _take(seconds, lost)
    return found


def _asking(stage: str, whole: float, job: Job, syncs: Syncs) -> float:
    """Seconds of a sample, of the `whole` of a stage, that go to asking for values. Where it does little else, all of
    them: in Python, what picks a value out and what is done with it take as long as reading it."""
    reads = syncs.of[stage] * read_s(str(job.setup.device)) / job.batch
    return whole if reads >= MOSTLY * whole else min(whole, syncs.seconds.get(stage, 0.0) / job.batch)


@functools.cache
def read_s(device: str) -> float:
    """Seconds that Python takes to pick one value out of a tensor of this device and read it."""
    values, taken = torch.zeros(1, 1, 1, 1, device=device), []
    for _ in range(5):
        begun = perf_counter()
        for _ in range(READS):
            values[0, 0, 0, 0].item()
        taken.append((perf_counter() - begun) / READS)
    return median(taken)


def _take(seconds: dict[str, float], lost: float) -> None:
    """From compute, and then from launch."""
    of_compute = min(lost, seconds["compute"])
    seconds["compute"] -= of_compute
    seconds["launch"] -= lost - of_compute


def _transform(job: Job, *, limit_s: float) -> tuple[float, float]:
    """(seconds of a sample, share of them in which the process does not run) of the user's transform."""
    setup, batch = job.setup, job.kept()[0]
    images, labels = setup.augment.normalise(batch.images), batch.labels.clone()
    keys, wait, transform = batch.keys(), waiting(setup.device), setup.transform
    assert transform is not None
    with leaving_no_trace(setup.model):
        transform(images, labels, keys)
        wall, cpu, queued = perf_counter(), process_time(), _queued_s()

        def work() -> int:
            transform(images, labels, keys)
            wait()
            return len(images)

        rate = settled(timed(work), limit_s=limit_s)
        wall, cpu, queued = perf_counter() - wall, process_time() - cpu, _queued_s() - queued
    return 1 / rate.value, max(0.0, 1 - (cpu + queued) / wall)


def _queued_s() -> float:
    """Seconds that this thread was ready to run and other work had its core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
