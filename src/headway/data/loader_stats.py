"""Measurements of a Loader: the time of its thread by stage, and the consumer's waiting time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, final

from headway.core.text_format import pluralise
from headway.data.reference import DecodeStats

LOADER_STAGES = ("order", "read", "decode", "labels")
"""Stages of the loader's thread, in order: samples and random parameters; records; pixels; labels. For the rest of its
time it waits for a free slot, because the consumer is slower.
"""

# Stages of the workers of a data set of the user's own: its samples, and the batch that is made of them.
SAMPLE_STAGES = ("samples", "collate")


@final
@dataclass(frozen=True, slots=True, repr=False)
class LoaderStats:
    """Sums over all iterations of a Loader until the time of the call."""

    images: int
    """Images that the consumer received."""
    batches: int
    """Batches that the consumer received."""
    timed_images: int
    """Images of the timed batches: all but the first of each iteration, for which the consumer always waits."""
    seconds: float
    """Time from the request of each timed batch to the next request, summed."""
    wait_s: float
    """Part of `seconds` in which the consumer waited for batches."""
    occupancy: float
    """Mean number of batches that were ready when one was requested; at most `prefetch_batches`."""
    prefetch_batches: int
    """Number of slots in the ring."""
    stage_s: dict[str, float]
    """Seconds of the loader's thread by stage; see LOADER_STAGES, and SAMPLE_STAGES for a data set of your own."""
    stage_images: int
    """Images that `stage_s` covers: those of `images` and of the batches in the ring."""
    cores: DecodeStats
    """Costs of the decoding threads in the timed batches."""
    record_bytes: int
    """Size of the records of all images."""
    threads: int
    """Number of decoding threads; for a data set of your own, of worker processes."""
    backend: str
    """Decoder: `native` or `pillow`; `own` for a data set of your own."""
    tier: str
    """Name of the tier, and why it was chosen; for a data set of your own, its class."""

    @property
    def images_s(self) -> float:
        """Images per second in the timed batches."""
        return self.timed_images / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Fraction of `seconds` in which the consumer waited."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def stage_images_s(self) -> dict[str, float]:
        """Images per second that each stage would reach alone."""
        # A stage that took no measurable time has no rate.
        return {name: self.stage_images / stage_s for name, stage_s in self.stage_s.items() if stage_s}

    @property
    def thread_images_s(self) -> dict[str, float]:
        """Images per second of one decoding thread if it did only one part of its work."""
        # Thread time, so one thread alone would need this much.
        parts = {"check": self.cores.check_s, "decode": self.cores.decode_s, "resample": self.cores.resample_s}
        return {name: self.cores.images / part_s for name, part_s in parts.items() if part_s}

    def __repr__(self) -> str:
        stages = ", ".join(f"{name} {rate:,.0f}" for name, rate in self.stage_images_s.items())
        kind, made_by = (
            ("worker process", "the data set") if self.backend == "own" else ("thread", f"{self.backend} decoder")
        )
        return (
            f"{self.images:,} images, {self.images_s:,.0f} images/s, waiting {self.waiting_share:.1%} of the time, "
            f"{self.occupancy:.1f} of {self.prefetch_batches} batches ready; each stage alone: {stages} images/s; "
            f"{made_by}, {pluralise(self.threads, kind)}; {self.tier}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the values that a report shows."""
        names = ("images", "images_s", "waiting_share", "occupancy", "ahead", "stage_images_s", "thread_images_s")
        other_names = ("record_bytes", "threads", "backend", "tier")
        # `ahead` is the name of the ring's size in run folders, whose format does not change.
        return {name: getattr(self, {"ahead": "prefetch_batches"}.get(name, name)) for name in (*names, *other_names)}


@final
@dataclass(slots=True)
class LoaderTally:
    """Running sums of a Loader. Each field has one writer, so the threads need no lock.

    The producer writes the fields up to `cores`, the consumer those from `images` on.

    Attributes:
        asked: number of requests for a batch.
        ready: number of ready batches, summed over the requests.
    """

    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOADER_STAGES, 0.0))
    stage_images: int = 0
    transformed_images: int = 0
    """Images that the user's transforms have changed, of those in `stage_images`."""
    record_bytes: int = 0
    cores: DecodeStats = field(default_factory=DecodeStats)
    images: int = 0
    batches: int = 0
    timed_images: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    asked: int = 0
    ready: int = 0

    def count_batch(self, images: int, asked: float, *, is_first: bool) -> None:
        """Counts a batch that the consumer is done with. Args: asked: the time at which it was asked for."""
        self.images += images
        self.batches += 1
        # The first batch always has to be waited for, so it is not part of the rate.
        if not is_first:
            self.timed_images += images
            self.seconds += perf_counter() - asked

    def summarise(self, *, prefetch_batches: int, threads: int, backend: str, tier: str) -> LoaderStats:
        """Returns the sums so far, with the facts about their loader."""
        # Copies, here and of `cores`: the producer goes on writing its own while the caller reads.
        stage_s = dict(self.stage_s)
        # The ring holds batches that are decoded and not transformed yet: all stages are given for as many images.
        if self.transformed_images:
            stage_s["transform"] *= self.stage_images / self.transformed_images
        return LoaderStats(
            images=self.images,
            batches=self.batches,
            timed_images=self.timed_images,
            seconds=self.seconds,
            wait_s=self.wait_s,
            occupancy=self.ready / self.asked if self.asked else 0.0,
            prefetch_batches=prefetch_batches,
            stage_s=stage_s,
            stage_images=self.stage_images,
            cores=replace(self.cores),
            record_bytes=self.record_bytes,
            threads=threads,
            backend=backend,
            tier=tier,
        )
