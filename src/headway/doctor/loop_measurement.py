"""Measures the training loop with ready batches, and the time of each of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, thread_time
from typing import final, get_args

import torch

from headway.core.modules import preserve_training_state
from headway.core.profile import CodeActivity, CodeLine, Throughput
from headway.data.batch import Batch
from headway.doctor.budget import LOOK_SHARE
from headway.doctor.measurement_job import MeasurementJob, resize_batch
from headway.doctor.rate_measurement import build_window, choose_window_s, measure_rate
from headway.doctor.stack_sampler import StackSampler
from headway.doctor.sync_counter import SyncCounts, count_syncs
from headway.doctor.time_attribution import ELSEWHERE, attribute_time, compute_own_share
from headway.doctor.user_code import TRANSFORM, UserCodeLine
from headway.setup.prepare import augment_batch, prepare_batch, split_micro_batches
from headway.training.trainer import Trainer

# Samples of the smallest pass: batch norm needs two.
SMALL = 2
# A small batch is compared with one of at least this size.
LARGER = 32
# A longer step needs few repetitions and has no time for many. In a very long one the extra time of the first step
# hardly counts.
LONG_STEP_S, VERY_LONG_STEP_S = 0.25, 1.0
# Lines reported per stage.
MOST = 5
# Stages of the Clock for forward and backward.
PASSES = ("forward", "loss", "backward")
# Parts of a step in which the user's lines belong to forward and backward.
OF_PASSES = (*PASSES, ELSEWHERE.within)
# Stages that consist of the user's own lines.
OWN = get_args(CodeActivity)
READS = 200


@final
@dataclass(frozen=True)
class LoopMeasurement:
    """Rate and stages of a training loop."""

    rate: Throughput
    # Seconds of a sample by stage; they add up to 1 / rate.
    seconds: Mapping[str, float]
    # Seconds of forward and backward by number of samples, without the user's own lines.
    launch: Mapping[int, float]
    # Counts of one step.
    syncs: SyncCounts
    # The user's lines by stage, the longest first.
    code: Mapping[str, tuple[CodeLine, ...]] = field(default_factory=dict)


def measure_loop(job: MeasurementJob, *, limit_s: float, passes_s: float) -> LoopMeasurement:
    """Trains on ready batches with the recipe's own Trainer."""
    device = job.setup.device
    with job.open_trainer(batches=job.load_batches()) as trainer:
        wait = build_wait(device)
        a_step = warm_up(trainer, wait)
        long = a_step > LONG_STEP_S
        seen = StackSampler()
        first = trainer.step
        # The sampler slows steps by about 2 %. Long steps are sampled while their rate is measured, as there is no time
        # for more of them; short ones afterwards. Dynamo would trace the signal handler into a compiled step.
        compiled = bool(job.setup.recipe.compile)
        with seen if long and not compiled else nullcontext():
            rate, laps = measure_steps(job, trainer, limit_s=limit_s, a_step=a_step)
        if not long and not compiled:
            first = trainer.step
            with seen:
                _run_for(trainer, wait, a_step, LOOK_SHARE * limit_s)
        steps = trainer.step - first
        syncs = count_syncs(trainer, 1 if long else 3)
    whole = 1 / rate.value
    on_cpu = device.type == "cpu"
    a_read = measure_read_s(str(device))
    spent, known = attribute_time(seen, syncs, steps=steps, step_s=job.batch * whole, read_s=a_read, on_cpu=on_cpu)
    own = {line: seconds / job.batch for line, seconds in spent.items()}
    passed = sum(laps.get(name, 0.0) for name in PASSES)
    # On a CPU the laps contain the user's own lines, which are stages of their own.
    if on_cpu:
        passed = max(0.0, passed - sum(of for (place, _), of in own.items() if place.within in OF_PASSES))
    # A long pass was timed within the steps, so it is not repeated.
    passes = measure_passes(job, limit_s=passes_s, known=known, whole_s=passed * job.batch if long and on_cpu else None)
    if not on_cpu:
        # On other devices laps only show the time to launch kernels, so separate passes are timed.
        at = min(passes, key=lambda count: abs(count - job.batch))
        passed = passes[at] / at
    # The Clock has one lap for normalising and the transform: their shares are measured separately.
    augment = laps.get("augment", 0.0)
    transform = 0.0 if job.setup.transform is None else augment * _measure_transform_share(job, limit_s=passes_s)
    launch = min(passed, compute_intercept(passes) / job.batch)
    seconds = {
        "normalise": augment - transform,
        "transform": transform,
        "launch": launch,
        "compute": passed - launch,
        **dict.fromkeys(OWN, 0.0),
        "optimizer": laps.get("optimizer", 0.0),
        "log": laps.get("log", 0.0),
    }
    code = _move_own_lines(seconds, own)
    if not any(line.reads for place, line in syncs.lines.items() if place.within in OF_PASSES):
        _move_reads(seconds, sum(syncs.seconds.get(lap, 0.0) for lap in ("forward", "loss")) / job.batch)
    # The rest is `other`; the stages are scaled so that they add up to the measured time of a sample.
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    scale = whole / sum(seconds.values())
    return LoopMeasurement(rate, {name: value * scale for name, value in seconds.items()}, passes, syncs, code)


def _move_own_lines(
    seconds: dict[str, float], own: Mapping[tuple[UserCodeLine, CodeActivity], float]
) -> dict[str, tuple[CodeLine, ...]]:
    """Moves the time of the user's lines from the stages in which it was measured to stages of their own. Forward and
    backward are measured without these lines already.

    Returns:
        the lines of each stage, the longest first.
    """
    code = dict[str, list[CodeLine]]()
    for (place, what), of in own.items():
        stage: str = what
        if place.within != TRANSFORM:
            seconds[what] += of
            if place.within not in OF_PASSES:
                seconds["log"] -= min(of, seconds["log"])
        # Within the transform only syncs are a stage of their own.
        elif what == "sync":
            moved = min(of, seconds["transform"])
            seconds["transform"] -= moved
            seconds["sync"] += moved
        else:
            stage = TRANSFORM
        if place.line:
            code_line = CodeLine(file=place.file, line=place.line, within=place.within, what=what, seconds=of)
            code.setdefault(stage, []).append(code_line)
    return {stage: tuple(sorted(lines, key=lambda one: -one.seconds)[:MOST]) for stage, lines in code.items()}


def _move_reads(seconds: dict[str, float], lost: float) -> None:
    """Moves reads of values that no line of the user's makes out of compute, then out of launch."""
    for stage in ("compute", "launch"):
        moved = min(lost, seconds[stage])
        seconds[stage] -= moved
        seconds["sync"] += moved
        lost -= moved


def _run_for(trainer: Trainer, wait: Callable[[], object], a_step: float, limit_s: float) -> None:
    """Runs as many steps as fit into the limit, at least one."""
    run_steps(trainer, max(1, round(limit_s / a_step)), wait)


def measure_steps(
    job: MeasurementJob, trainer: Trainer, *, limit_s: float, a_step: float | None = None
) -> tuple[Throughput, dict[str, float]]:
    """Measures the rate of a Trainer's steps, and the seconds of a sample in each lap of its Clock.

    Args:
        a_step: seconds of a step, if the Trainer is warm already.
    """
    wait = build_wait(job.setup.device)
    a_step = a_step or warm_up(trainer, wait)
    before, begun = dict(trainer.clock.seconds), trainer.position
    # One window waits for the device once, so it must contain many short steps.
    steps = max(1, round(choose_window_s() / a_step))
    rate = measure_rate(build_window(lambda: run_steps(trainer, steps, wait)), limit_s=limit_s)
    images, after = trainer.position - begun, trainer.clock.seconds
    return rate, {name: (value - before.get(name, 0.0)) / images for name, value in after.items()}


def run_steps(trainer: Trainer, steps: int, wait: Callable[[], object]) -> int:
    """Runs this many steps, waits for the device, and returns the number of images."""
    position = trainer.position
    trainer.run(steps)
    wait()
    return trainer.position - position


def warm_up(trainer: Trainer, wait: Callable[[], object]) -> float:
    """Returns the seconds of a step after allocation, algorithm choice and compilation."""
    seconds = 0.0
    for number in range(4):
        begun = perf_counter()
        trainer.run(1)
        wait()
        seconds = max(perf_counter() - begun, 1e-6)
        if seconds > (LONG_STEP_S if number else VERY_LONG_STEP_S):
            break
    return seconds


def measure_loop_rate(job: MeasurementJob, *, limit_s: float) -> Throughput:
    """Measures images/s of the loop alone with ready batches."""
    with job.open_trainer(batches=job.load_batches()) as trainer:
        return measure_steps(job, trainer, limit_s=limit_s)[0]


def measure_passes(
    job: MeasurementJob,
    *,
    limit_s: float,
    known: Mapping[UserCodeLine, CodeActivity | None] | None = None,
    whole_s: float | None = None,
) -> dict[int, float]:
    """Measures the seconds of a forward and backward pass with two samples, a micro-batch, and one size between or
    beyond.

    Args:
        known: class of the user's lines; the time of lines that call no torch is left out.
        whole_s: of a whole micro-batch, if it is known and takes too long to be measured again.
    """
    setup = job.setup
    micro = setup.recipe.micro_batch
    most = min(job.batch, micro) if isinstance(micro, int) else job.batch
    other = max(4 * most, LARGER) if most <= LARGER else max(LARGER, most // 4)
    counts = sorted({SMALL, max(SMALL, most), other})
    if setup.recipe.compile:
        # Each size would be compiled anew.
        counts = [max(SMALL, most)]
    seconds = {}
    for count in counts:
        if count == most == job.batch and whole_s is not None:
            seconds[count] = whole_s
            continue
        run = build_pass(job, resize_batch(job.load_batches()[0], count, setup.device))
        try:
            run()
        except (RuntimeError, MemoryError):
            if count <= most:
                raise
            # The larger size needs more memory than the run: it is left out.
            continue
        with StackSampler() if known is not None else nullcontext() as seen:
            seconds[count] = count / measure_rate(build_window(run), limit_s=limit_s / len(counts)).value
        if seen is not None:
            seconds[count] *= 1 - compute_own_share(seen, known or {})
    return seconds


def build_pass(job: MeasurementJob, batch: Batch) -> Callable[[], int]:
    """Builds a function that runs forward and backward over one batch and leaves no gradients."""
    setup, wait = job.setup, build_wait(job.setup.device)
    images, labels = prepare_batch(setup, batch, 1)
    weights = torch.full((len(images),), 1 / len(images), device=setup.device)
    parameters = [value for value in setup.model.parameters() if value.requires_grad]

    def run_pass() -> int:
        for part, some, weight in split_micro_batches(setup, images, labels, weights):
            with setup.precision.autocast():
                outputs = setup.forward(part)
            setup.precision.backward(setup.task.loss(outputs.float(), some), weight)
        for one in parameters:
            one.grad = None
        wait()
        return len(images)

    return run_pass


def compute_intercept(seconds: Mapping[int, float]) -> float:
    """Returns the fixed seconds of a pass: the intercept of a line through the two largest batches.

    Smaller batches are left out: two samples alone may use other, cheaper kernels.
    """
    if len(seconds) < 2:
        return 0.0
    (low, first), (high, last) = sorted(seconds.items())[-2:]
    slope = max(0.0, (last - first) / (high - low))
    return max(0.0, first - slope * low)


def build_wait(device: torch.device) -> Callable[[], object]:
    """Builds a function that waits for the device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


@functools.cache
def measure_read_s(device: str) -> float:
    """Returns the seconds that Python takes to index one value of a tensor on this device and read it."""
    values, taken = torch.zeros(1, 1, 1, 1, device=device), []
    # thread_time leaves out the time in which other programs had the core.
    clock = thread_time if device == "cpu" else perf_counter
    for _ in range(5):
        begun = clock()
        for _ in range(READS):
            values[0, 0, 0, 0].item()
        taken.append((clock() - begun) / READS)
    return median(taken)


def _measure_transform_share(job: MeasurementJob, *, limit_s: float) -> float:
    """Measures the share of preparing a batch that the user's transform takes, from 0 to 1.

    Normalising and the transform are timed in turns, so a machine that slows down slows both. When both were timed at
    different moments, other programs once shifted 1.4 ms per image to `normalise`; in turns it is 4 us.
    """
    setup, batch = job.setup, job.load_batches()[0]
    keys, wait, transform = batch.keys(), build_wait(setup.device), setup.transform
    assert transform is not None
    least = choose_window_s()

    def measure_window() -> float:
        spent, begun = 0.0, perf_counter()
        while True:
            images, labels = augment_batch(setup, batch, keys)
            wait()
            before = perf_counter()
            transform(images, labels, keys)
            wait()
            now = perf_counter()
            spent += now - before
            if now - begun >= least:
                return spent / (now - begun)

    with preserve_training_state(setup.model):
        transform(*augment_batch(setup, batch, keys), keys)
        return measure_rate(measure_window, limit_s=limit_s).value
