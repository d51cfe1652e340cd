"""Facts about a loop's own `headway.Loader`, from its statistics, and advice for it, each with the exact code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from headway.core.free_memory import read_free_memory_bytes
from headway.core.text_format import pluralise
from headway.data import native
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.data.loader_stats import LoaderStats
from headway.data.pack_mode import PackMode
from headway.doctor.smaller_images import choose_stored_side, measure_shorter_side

# Factor on the smallest sufficient number of threads or workers, because batches do not always take the same time.
SPARE = 1.25
# Share of the free memory that a decoded set may take to be offered a place there.
MEMORY_SHARE = 0.5
# Samples whose flags are read: the columns of a set of millions are not worth a pass.
LOOKED_AT = 4096


@final
@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """Statistics and options of a `headway.Loader`."""

    stats: LoaderStats
    # Seconds of a sample by stage; the decoding threads' checking, decoding and resizing are parts of `decode`.
    stages: dict[str, float]
    # True: worker processes load the samples of a data set of the user's own.
    is_own: bool = False
    # The native core can be used here.
    has_native: bool = True
    # Name of the tier; empty: none was chosen yet.
    tier: str = ""
    # Decoded bytes of the set fit into memory, and the records are not kept there yet.
    fits_memory: bool = False
    # The data set has JPEGs that are larger than the batch needs, and `scaled` is off.
    can_scale: bool = False
    # Pack mode that stores the images as small as the batch needs; None: they are not much larger now.
    smaller_mode: PackMode | None = None

    @property
    def slowest(self) -> str | None:
        """Stage that takes most time of a sample; None: nothing was timed."""
        return max(self.stages, key=self.stages.__getitem__, default=None)

    def describe(self) -> str:
        """Returns the loader's rates by stage, for a report."""
        stats, unit = self.stats, "samples/s" if self.is_own else "images/s"
        rates = ", ".join(f"{name} {1 / seconds:,.0f}" for name, seconds in self.stages.items())
        kind = "worker process" if self.is_own else "decoding thread"
        ready = f"{stats.occupancy:.1f} of {stats.prefetch_batches} batches ready"
        makers = "no workers" if not stats.threads else pluralise(stats.threads, kind)
        return f"headway.Loader, {makers}, {ready}; each stage alone in {unit}: {rates or 'not timed yet'}"


def collect_loader_facts(loader: Loader[Any]) -> LoaderFacts:
    """Collects the facts about a Loader that has served batches."""
    stats, dataset, spec = loader.stats(), loader.dataset, loader.spec
    count = max(stats.stage_images, 1)
    stages = {name: seconds / count for name, seconds in stats.stage_s.items() if seconds > 0}
    if not isinstance(dataset, Dataset):
        return LoaderFacts(stats=stats, stages=stages, is_own=True)
    tier = stats.tier.partition(", ")[0]
    is_kept = tier in ("memory", "device")
    pixel_bytes = dataset.pixel_bytes
    is_encoded = not bool((dataset.flags[:LOOKED_AT] & FLAG_RAW).any())
    side = choose_stored_side(dataset, loader.size, loader.transform.crop) if is_encoded and not is_kept else None
    return LoaderFacts(
        stats=stats,
        stages=stages,
        has_native=native.is_available(),
        tier=tier,
        fits_memory=not is_kept
        and not spec.scaled
        and pixel_bytes is not None
        and pixel_bytes <= MEMORY_SHARE * read_free_memory_bytes(),
        # A decode at half size needs images at least twice as large as the batch's.
        can_scale=not is_kept
        and is_encoded
        and not spec.scaled
        and measure_shorter_side(dataset) >= 2 * max(loader.size),
        smaller_mode=None if side is None else PackMode(kind="encode", side=side),
    )


def advise_loader(facts: LoaderFacts, *, wait: float, cores: int, shares_cores: bool) -> Iterator[tuple[str, str]]:
    """Yields (reason, change) for a loader whose loop waits for it, the cheapest change first.

    Args:
        wait: share of the loop's time in which it waits for batches.
        cores: cores that this process may use.
        shares_cores: the loop computes on the same cores.
    """
    threads, slowest = facts.stats.threads, facts.slowest
    most = max(1, cores - 1)
    # Enough for the loop's rate without its waits. Without workers the wait is the time of a batch.
    wanted = min(most, math.ceil(SPARE * (threads or wait) / max(1 - wait, 0.01)))
    shared = " (they share the cores with the training)" if shares_cores else ""
    if facts.is_own:
        if threads < most:
            why = (
                f"{threads} workers load the samples{shared}"
                if threads
                else f"the loop loads the samples itself{shared}"
            )
            yield why, f"headway.Loader(..., workers={wanted})"
        else:
            why = f"{threads} {'worker is' if threads == 1 else 'workers are'} too slow, on {cores} cores"
            more = "add workers only if they wait for storage; otherwise make a sample cheaper"
            yield why, f"{more}: headway pack IMAGES PACKED, and headway.Loader('PACKED', batch=...), for images"
        return
    if facts.stats.backend == "pillow":
        build = "build the native core: install a C++ compiler, cmake and libjpeg-turbo, and headway again"
        yield "Pillow decodes the images", "headway.Loader(..., backend='native')" if facts.has_native else build
    if slowest == "transform":
        why = f"your transform takes {1e6 * facts.stages['transform']:,.0f} us of each image's time"
        yield why, "make it cheaper, or give the Loader more workers: headway.Loader(..., workers=...)"
    elif slowest == "decode" and threads < most:
        why = f"{threads} decoding {'thread is' if threads == 1 else 'threads are'} too slow{shared}"
        yield why, f"headway.Loader(..., threads={wanted})"
    name = "reading the records" if slowest == "read" else "decoding"
    if slowest in ("read", "decode") and facts.fits_memory:
        yield f"{name} limits the loader, and the decoded set fits in memory", "headway.Loader(..., cache='memory')"
    elif slowest == "read":
        yield f"{name} limits the loader", "headway.Loader(..., cache='disk') for remote data, or faster storage"
    if slowest == "decode" and facts.can_scale:
        why = "the images are at least twice as large as the batch needs"
        yield why, "headway.Loader(..., scaled=True) decodes them smaller, with slightly different pixels"
    if slowest == "decode" and facts.smaller_mode is not None:
        why = "the images are much larger than the batch needs"
        yield why, f"headway pack IMAGES PACKED --mode {facts.smaller_mode}, and headway.Loader('PACKED', batch=...)"
