"""Measures the loader's rate when nothing holds it back, and the time of each of its stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

from headway.core.profile import CodeLine, ThreadScaling, Throughput
from headway.data.batch import Batch
from headway.data.data_recipe import CropRecipe
from headway.data.loader import Loader
from headway.data.tiers.remote_dataset import RemoteShards
from headway.doctor.measurement_job import MeasurementJob, close_stream
from headway.doctor.rate_measurement import build_window, measure_rate
from headway.setup.recipe import TrainRecipe

# Samples without augmentation.
PLAIN: dict[str, Any] = {"crop": CropRecipe(), "flip": False, "translate": 0}


@final
@dataclass(frozen=True)
class LoaderMeasurement:
    """Rate and stages of a loader."""

    rate: Throughput
    # Seconds of a sample by stage; they add up to 1 / rate.
    seconds: Mapping[str, float]
    # Mean of one sample.
    record_bytes: float
    threads: int
    batches: int
    # The user's lines in the transforms that run beside the loop, the longest first.
    code: tuple[CodeLine, ...] = ()


def measure_loader(
    job: MeasurementJob, *, limit_s: float, batches: int | None = None, **options: Any
) -> LoaderMeasurement:
    """Reads the run's first batches as fast as the loader delivers them, again and again.

    Records that are fetched from an address and not kept take as long in each epoch: there one stream is read.

    Args:
        batches: reads this many, once. None: as many as come within a fifth of the limit, then the same again: by then
            their bytes are in memory and their checksums are verified.
        options: of the loader, instead of the recipe's.
    """
    if batches is None and "tier" not in options and _fetches_every_epoch(job):
        return _measure_remote_stream(job, limit_s=limit_s, options=options)
    if batches is None:
        # Not counted: it reads the records into memory, and finds how many batches come in time.
        first = _measure_batches(job, limit_s=limit_s / 5, most=None, options=options)
        count, rates = first.batches, list[float]()
        parts: list[LoaderMeasurement] = []

        def measure_window() -> float:
            parts.append(_measure_batches(job, limit_s=limit_s, most=count, options=options))
            rates.append(parts[-1].rate.value)
            return rates[-1]

        rate = measure_rate(measure_window, limit_s=limit_s)
        stages = {name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds}
        # The stages of all windows together, scaled to add up to the rate.
        scale = 1 / rate.value / max(sum(stages.values()), 1e-12)
        last = parts[-1]
        shares = {name: value * scale for name, value in stages.items()}
        return LoaderMeasurement(rate, shares, last.record_bytes, last.threads, count)
    return _measure_batches(job, limit_s=limit_s, most=batches, options=options)


def build_loader(job: MeasurementJob, options: Mapping[str, Any]) -> Iterable[Batch]:
    """Builds a new loader at the beginning of the run."""
    inputs, recipe = job.setup.inputs, job.setup.recipe
    inputs.batch_source = None
    if not options:
        return job.setup.batches(0)
    assert inputs.train is not None
    return inputs.build_training_loader(inputs.train, recipe, batch=job.setup.plan, **options)


def _measure_batches(
    job: MeasurementJob, *, limit_s: float, most: int | None, options: Mapping[str, Any]
) -> LoaderMeasurement:
    """Reads a stream once; `most` batches, or None: all that come in time, at least two."""
    loader = build_loader(job, options)
    stream = iter(loader)
    images = count = 0
    try:
        # The first batch contains the start of the threads.
        first = next(stream)
        begun = perf_counter()
        for batch in itertools.islice(stream, None if most is None else max(1, most - 1)):
            images, count = images + len(batch.images), count + 1
            spent = perf_counter() - begun
            if spent >= limit_s:
                break
        seconds = max(perf_counter() - begun, 1e-9)
    finally:
        close_stream(stream)
    del first
    rate = images / seconds
    stages, bytes_each, threads = _read_stages(loader, 1 / rate)
    return LoaderMeasurement(
        Throughput(value=rate, low=rate, high=rate, windows=1), stages, bytes_each, threads, count + 1
    )


def _fetches_every_epoch(job: MeasurementJob) -> bool:
    """Returns True if records come over a network in each epoch."""
    train = job.setup.train
    return train is not None and isinstance(train.source, RemoteShards) and job.setup.recipe.data.cache == "none"


def _measure_remote_stream(job: MeasurementJob, *, limit_s: float, options: Mapping[str, Any]) -> LoaderMeasurement:
    """Measures one stream of remote records, without those that were ready or requested when it began."""
    loader = build_loader(job, options)
    stream = iter(loader)
    images = count = 0
    try:
        begun = perf_counter()
        # What was requested before the clock began would look faster than the network is.
        while not count or perf_counter() - begun < limit_s / 5:
            next(stream)
            count += 1

        def take_batch() -> int:
            nonlocal images, count
            taken = len(next(stream).images)
            images, count = images + taken, count + 1
            return taken

        begun = perf_counter()
        measured = measure_rate(build_window(take_batch, least_s=limit_s / 10), limit_s=limit_s)
        # The mean and not the median: remote records come in bursts.
        rate = images / (perf_counter() - begun)
    finally:
        close_stream(stream)
    stages, bytes_each, threads = _read_stages(loader, 1 / rate)
    known = Throughput(value=rate, low=min(rate, measured.low), high=max(rate, measured.high), windows=measured.windows)
    return LoaderMeasurement(known, stages, bytes_each, threads, count)


def _read_stages(loader: Iterable[Batch], whole: float) -> tuple[dict[str, float], float, int]:
    """Returns seconds by stage, bytes per record and threads from the loader's own counters; time that no stage
    explains counts as `collate`."""
    if not isinstance(loader, Loader):
        return {"collate": whole}, 0.0, 0
    stats = loader.stats()
    of = {name: seconds / max(1, stats.stage_images) for name, seconds in stats.stage_s.items()}
    inner = {"storage": of["read"], "decode": of["decode"]}
    if "transform" in of:
        inner["transform"] = of["transform"]
    # Stages of several threads may overlap, and must not add up to more than the whole.
    scale = min(1.0, whole / max(sum(of.values()), 1e-12))
    inner = {name: seconds * scale for name, seconds in inner.items()}
    inner["collate"] = whole - sum(inner.values())
    return inner, stats.record_bytes / max(1, stats.stage_images), stats.threads


def measure_augmentation(job: MeasurementJob, plain_of: LoaderMeasurement, *, limit_s: float) -> float:
    """Returns the seconds of decoding a sample that crop, flip and shift take; 0 if the host does none of them."""
    recipe: TrainRecipe = job.setup.recipe
    if not (recipe.augment.select_host_augmentations(job.setup.device.type) or recipe.data.crop.is_random):
        return 0.0
    bare = measure_loader(job, limit_s=limit_s, **PLAIN)
    # Augmentation is a part of decoding, so noise must not make it longer than that.
    return max(0.0, min(plain_of.seconds["decode"], 1 / plain_of.rate.value - 1 / bare.rate.value))


def measure_by_threads(job: MeasurementJob, measured: LoaderMeasurement, most: int, *, limit_s: float) -> ThreadScaling:
    """Measures the loader with 1, 2, 4, ... up to `most` threads, and fits seconds = serial + parallel / threads."""
    counts = sorted({1, *(2**power for power in range(1, 12) if 2**power < most), most, measured.threads})
    rates = []
    for count in counts:
        one = measured if count == measured.threads else measure_loader(job, limit_s=limit_s, threads=count)
        rates.append(one.rate.value)
    serial, parallel = fit_threads(counts, [1 / rate for rate in rates])
    return ThreadScaling(threads=tuple(counts), images_s=tuple(rates), serial_s=serial, parallel_s=parallel)


def fit_threads(threads: list[int], seconds: list[float]) -> tuple[float, float]:
    """Fits (serial, parallel) of seconds = serial + parallel / threads by least squares, neither below 0."""
    n = len(threads)
    # One point has no slope: all of it counts as work that threads share.
    if n < 2:
        return 0.0, seconds[0] * threads[0]
    inverse = [1 / count for count in threads]
    mean_x, mean_y = sum(inverse) / n, sum(seconds) / n
    spread = sum((x - mean_x) ** 2 for x in inverse)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(inverse, seconds, strict=True)) / spread
    serial = mean_y - slope * mean_x
    # A negative part has no meaning: the other part is fitted alone.
    if serial < 0:
        return 0.0, sum(x * y for x, y in zip(inverse, seconds, strict=True)) / sum(x * x for x in inverse)
    if slope < 0:
        return mean_y, 0.0
    return serial, slope
