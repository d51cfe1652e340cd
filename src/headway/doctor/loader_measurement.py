"""What the loader gives when nothing holds it back, and which of its stages takes how long."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

from headway.core.profile import Rate, Threads
from headway.data.batch import Batch
from headway.data.loader import Loader
from headway.data.options import CropRecipe
from headway.data.tiers.opened import RemoteShards
from headway.doctor.measurement_job import MeasurementJob, close_stream
from headway.doctor.rate_measurement import build_window, measure_rate
from headway.setup.recipe import TrainRecipe

PLAIN: dict[str, Any] = {"crop": CropRecipe(), "flip": False, "translate": 0}
"""A view of the samples without augmentation."""


@final
@dataclass(frozen=True)
class LoaderMeasurement:
    """Attributes: seconds: of a sample, by stage; they add up to 1 / rate. record_bytes: of one sample. threads: that
    decode. batches: that were gone through."""

    rate: Rate
    seconds: Mapping[str, float]
    record_bytes: float
    threads: int
    batches: int


def measure_loader(
    job: MeasurementJob, *, limit_s: float, batches: int | None = None, **options: Any
) -> LoaderMeasurement:
    """Goes through the run's first batches as fast as the loader gives them, again and again.

    Args:
        batches: so many of them, once; None: as many as come within a fifth of the limit, and then those again and
            again: their bytes are in memory by then, and their checksums were looked at.
        options: of the loader, in place of the recipe's.

    What is fetched from an address and not kept comes as fast in each epoch: one stream is gone through.
    """
    if batches is None and "tier" not in options and _fetches_every_epoch(job):
        return _measure_remote_stream(job, limit_s=limit_s, options=options)
    if batches is None:
        first = _measure_batches(job, limit_s=limit_s / 5, most=None, options=options)
        count, rates = first.batches, list[float]()
        parts: list[LoaderMeasurement] = []

        def window() -> float:
            parts.append(_measure_batches(job, limit_s=limit_s, most=count, options=options))
            rates.append(parts[-1].rate.value)
            return rates[-1]

        rate = measure_rate(window, limit_s=limit_s)
        stages = {name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds}
        scale = 1 / rate.value / max(sum(stages.values()), 1e-12)
        last = parts[-1]
        shares = {name: value * scale for name, value in stages.items()}
        return LoaderMeasurement(rate, shares, last.record_bytes, last.threads, count)
    return _measure_batches(job, limit_s=limit_s, most=batches, options=options)


def build_loader(job: MeasurementJob, options: Mapping[str, Any]) -> Iterable[Batch]:
    """A new loader from the beginning of the run."""
    inputs, recipe = job.setup.inputs, job.setup.recipe
    inputs.feed = None
    if not options:
        return job.setup.batches(0)
    assert inputs.train is not None
    return inputs.training(inputs.train, recipe, batch=job.setup.plan, **options)


def _measure_batches(
    job: MeasurementJob, *, limit_s: float, most: int | None, options: Mapping[str, Any]
) -> LoaderMeasurement:
    """Args: most: batches; None: what comes in time, and at least two."""
    loader = build_loader(job, options)
    stream = iter(loader)
    images = count = 0
    try:
        first = next(stream)  # what the threads need to begin
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
    return LoaderMeasurement(Rate(value=rate, low=rate, high=rate, windows=1), stages, bytes_each, threads, count + 1)


def _fetches_every_epoch(job: MeasurementJob) -> bool:
    """Whether records come over a network in each epoch."""
    train = job.setup.train
    return train is not None and isinstance(train.source, RemoteShards) and job.setup.recipe.data.cache == "none"


def _measure_remote_stream(job: MeasurementJob, *, limit_s: float, options: Mapping[str, Any]) -> LoaderMeasurement:
    """One stream; what lay ready or was under way when it began is left out."""
    loader = build_loader(job, options)
    stream = iter(loader)
    images = count = 0
    try:
        begun = perf_counter()
        while not count or perf_counter() - begun < limit_s / 5:
            next(stream)
            count += 1

        def take_batch() -> int:
            nonlocal images, count
            taken = len(next(stream).images)
            images, count = images + taken, count + 1
            return taken

        begun = perf_counter()
        found = measure_rate(build_window(take_batch, least_s=limit_s / 10), limit_s=limit_s)
        rate = images / (perf_counter() - begun)  # the mean: they come in bursts
    finally:
        close_stream(stream)
    stages, bytes_each, threads = _read_stages(loader, 1 / rate)
    known = Rate(value=rate, low=min(rate, found.low), high=max(rate, found.high), windows=found.windows)
    return LoaderMeasurement(known, stages, bytes_each, threads, count)


def _read_stages(loader: Iterable[Batch], whole: float) -> tuple[dict[str, float], float, int]:
    """What the loader's thread has noted of its time; what is left of a sample's is its handing over."""
    if not isinstance(loader, Loader):
        return {"collate": whole}, 0.0, 0
    stats = loader.stats()
    of = {name: seconds / max(1, stats.stage_images) for name, seconds in stats.stage_s.items()}
    inner = {"storage": of["read"], "decode": of["decode"]}
    scale = min(1.0, whole / max(sum(of.values()), 1e-12))
    inner = {name: seconds * scale for name, seconds in inner.items()}
    inner["collate"] = whole - sum(inner.values())
    return inner, stats.record_bytes / max(1, stats.stage_images), stats.threads


def measure_augmentation(job: MeasurementJob, plain_of: LoaderMeasurement, *, limit_s: float) -> float:
    """Seconds of a sample's decoding that its crop, flip and shift take; 0 where the host does none of them."""
    recipe: TrainRecipe = job.setup.recipe
    if not (recipe.augment.on_host(job.setup.device.type) or recipe.data.crop.random):
        return 0.0
    bare = measure_loader(job, limit_s=limit_s, **PLAIN)
    return max(0.0, min(plain_of.seconds["decode"], 1 / plain_of.rate.value - 1 / bare.rate.value))


def measure_by_threads(job: MeasurementJob, measured: LoaderMeasurement, most: int, *, limit_s: float) -> Threads:
    """What the loader gives with 1, 2, 4... threads, up to `most`; and the fit of seconds = serial + parallel / threads
    by least squares, neither below 0."""
    counts = sorted({1, *(2**power for power in range(1, 12) if 2**power < most), most, measured.threads})
    rates = []
    for count in counts:
        one = measured if count == measured.threads else measure_loader(job, limit_s=limit_s, threads=count)
        rates.append(one.rate.value)
    serial, parallel = fit_threads(counts, [1 / rate for rate in rates])
    return Threads(threads=tuple(counts), images_s=tuple(rates), serial_s=serial, parallel_s=parallel)


def fit_threads(threads: list[int], seconds: list[float]) -> tuple[float, float]:
    """(serial, parallel) of seconds = serial + parallel / threads."""
    n = len(threads)
    if n < 2:
        return 0.0, seconds[0] * threads[0]
    inverse = [1 / count for count in threads]
    mean_x, mean_y = sum(inverse) / n, sum(seconds) / n
    spread = sum((x - mean_x) ** 2 for x in inverse)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(inverse, seconds, strict=True)) / spread
    serial = mean_y - slope * mean_x
    if serial < 0:  # through the origin
        return 0.0, sum(x * y for x, y in zip(inverse, seconds, strict=True)) / sum(x * x for x in inverse)
    if slope < 0:
        return mean_y, 0.0
    return serial, slope
