"""What a Loader measured of itself: where the time of its thread went, and how long the consumer waited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from headway.data.reference import DecodeStats as CoreStats

STAGES = ("order", "read", "decode", "labels")
"""Of the loader's thread, in order: which samples and what of them; where their bytes lie (or fetching them); pixels;
labels. What is left of its time it waits for a free slot: the consumer is slower then."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class LoaderStats:
    """Sums over all iterations of a Loader so far. Copies do not change."""

    images: int
    """That the consumer was given."""
    batches: int
    timed_images: int
    """Those of all batches but the first of each iteration, which has to be waited for."""
    seconds: float
    """From when these batches were asked for until the next one was."""
    wait_s: float
    """Of these seconds the consumer waited so long for batches."""
    occupancy: float
    """Batches that were ready when one was asked for, in the mean; at most `prefetch_batches`."""
    prefetch_batches: int
    stage_s: dict[str, float]
    """Seconds of the loader's thread by stage; see STAGES."""
    stage_images: int
    """Images that these took, more than `images` by what lies in the ring."""
    cores: CoreStats
    """What the decoding threads did in the batches that were timed."""
    record_bytes: int
    """Size of the records of all images."""
    threads: int
    backend: str
    """`native` or `pillow`."""
    tier: str
    """Where the bytes are kept, and why there."""

    @property
    def images_s(self) -> float:
        """Images a second, the first batch left out."""
        return self.timed_images / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the time, without the first batch, in which the consumer waited."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def stage_images_s(self) -> dict[str, float]:
        """Images a second that each stage would give alone."""
        return {name: self.stage_images / spent for name, spent in self.stage_s.items() if spent}

    @property
    def thread_images_s(self) -> dict[str, float]:
        """Images a second of one decoding thread, if it did nothing but one part of its work."""
        parts = {"check": self.cores.check_s, "decode": self.cores.decode_s, "resample": self.cores.resample_s}
        return {name: self.cores.images / spent for name, spent in parts.items() if spent}

    def __repr__(self) -> str:
        stages = ", ".join(f"{name} {rate:,.0f}" for name, rate in self.stage_images_s.items())
        return (
            f"{self.images:,} images, {self.images_s:,.0f} images/s, waiting {self.waiting_share:.1%} of the time, "
            f"{self.occupancy:.1f} of {self.prefetch_batches} batches ready; each stage alone: {stages} images/s; "
            f"{self.backend} decoder, {self.threads} thread{'s'[: self.threads > 1]}; {self.tier}"
        )

    def to_json(self) -> dict[str, Any]:
        """What a report shows."""
        names = ("images", "images_s", "waiting_share", "occupancy", "ahead", "stage_images_s", "thread_images_s")
        more = ("record_bytes", "threads", "backend", "tier")
        return {name: getattr(self, name) for name in (*names, *more)}


@final
@dataclass(slots=True)
class LoaderTally:
    """What the threads of a Loader add to; the producer writes the first part, the consumer the second."""

    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    stage_images: int = 0
    record_bytes: int = 0
    cores: CoreStats = field(default_factory=CoreStats)

    images: int = 0
    batches: int = 0
    timed_images: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    asked: int = 0
    ready: int = 0
