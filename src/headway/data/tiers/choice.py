"""Chooses the tier of a data set, and says why."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final, get_args

import numpy as np

from headway.core.cpu_count import read_local_ranks
from headway.core.errors import UsageError, suggest_nearest
from headway.core.free_memory import read_free_memory_bytes
from headway.core.mounts import is_on_network
from headway.core.text_format import format_bytes
from headway.data.columns import FLAG_RAW
from headway.data.data_recipe import CacheMode
from headway.data.dataset import Dataset
from headway.data.decode import Backend, build_decoder
from headway.data.shards import MappedShards
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.memory import FillProgress, MemoryTier
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.tiers.tier import MappedTier, Tier, TierName
from headway.storage.addresses import get_cache_folder

# Importing torch takes seconds.
if TYPE_CHECKING:
    import torch

BUDGET_BYTES = 50 * 10**9
FREE_MEMORY_DIVISOR = 4
"""`auto` takes at most a quarter of the free memory: the rest is for the network, its activations, and others."""
REQUESTED_SHARE = 0.8
"""Share of the free memory that a set may take if the user asks for it."""


def choose_tier(
    dataset: Dataset,
    cache: CacheMode = "auto",
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    backend: Backend = "auto",
    folder: str | os.PathLike[str] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    progress: FillProgress | None = None,
) -> Tier:
    """Returns the tier that `cache` names, filled; its `why` says what `auto` chose and the reason.

    - `device`, `memory`: the decoded set, if all images share one size. Crops are made of these pixels, which are the
      images' own, so nothing is lost. If sizes differ or pixels do not fit, `memory` keeps the records, which helps
      with slow file systems.
    - `disk`: remote records, fetched ahead of need into `folder`, at most `budget_bytes` with the other sets there.
    - `none`: local files are mapped; remote records are fetched, and kept until they are read.
    - `auto`: a small set decoded on the device or in memory; else local files mapped, and remote ones on the disk.

    Args:
        threads, backend: of the decoder that fills a tier; see `decoder`.
        folder: None is `headway` in the user's cache folder.
        progress: called with (samples done, samples in all) while a tier is filled.

    Raises:
        UsageError: the request is impossible; the message says what is possible.
        DataError: a remote address cannot be read.
    """
    # Recipes are checked earlier; this is for calls from Python.
    if cache not in get_args(CacheMode):
        fix = suggest_nearest(cache, get_args(CacheMode))
        raise UsageError(f"{cache!r} is not a cache", where="data.cache", fix=fix)
    planner = CachePlanner(dataset, str(device), Path(folder or get_cache_folder()), budget_bytes)
    place = planner.choose_automatically() if cache == "auto" else planner.choose_requested(cache)
    # These tiers hold nothing yet, so there is nothing to fill.
    if place.name == "none" or place.name == "disk":
        return planner.build_tier(place)
    # A tier in memory is filled through the tier without a cache, once.
    source = planner.build_tier(planner.choose_uncached())
    try:
        if not place.decoded:
            return MemoryTier.from_records(dataset, source, why=place.why, progress=progress)
        with contextlib.closing(build_decoder(threads, backend)) as decode:
            if place.name == "memory":
                return MemoryTier.from_decoded(dataset, source, decode, why=place.why, progress=progress)
            return DeviceTier(dataset, source, decode, device, why=place.why, progress=progress)
    finally:
        source.close()


@final
@dataclass(frozen=True, slots=True)
class _TierChoice:
    """A tier to be made, the reason, and whether it keeps pixels."""

    name: TierName
    reason: str
    decoded: bool = False

    @property
    def why(self) -> str:
        return f"{self.name}, {self.reason}"


@final
class CachePlanner:
    """Chooses the tier of a data set by its size and the free memory."""

    def __init__(self, dataset: Dataset, device: str, folder: Path, budget_bytes: int) -> None:
        self._dataset, self._device, self._folder, self._budget_bytes = dataset, device, folder, budget_bytes
        self._remote = dataset.source.remote if isinstance(dataset.source, RemoteShards) else None
        # All sizes come from the columns: no record is read to choose.
        self._bytes = int(dataset.length.sum(dtype=np.int64))
        self._pixels = dataset.pixel_bytes
        self._raw = bool(len(dataset)) and bool((dataset.flags & FLAG_RAW).all())

    def choose_automatically(self) -> _TierChoice:
        """Chooses the tier for `data.cache: auto`."""
        # Fastest first: decoded on the GPU, decoded in memory, records in memory, no cache.
        is_mapped = isinstance(self._dataset.source, MappedShards)
        if self._pixels is not None and self._is_on_gpu:
            free = self._measure_free_device_bytes()
            if self._pixels <= free // FREE_MEMORY_DIVISOR:
                return _TierChoice("device", _describe_fit(self._pixels, "its", free), decoded=True)
        free = self._measure_free_host_bytes()
        limit = free // FREE_MEMORY_DIVISOR
        if self._pixels is not None and self._pixels <= limit and not (self._raw and is_mapped):
            return _TierChoice("memory", _describe_fit(self._pixels, "the", free), decoded=True)
        is_slow = not self._remote and not is_mapped and is_on_network(self._dataset.folder)
        if is_slow and self._bytes <= limit:
            size = format_bytes(self._bytes)
            return _TierChoice(
                "memory", f"its {size} are on a network file system; a quarter of the free memory holds them"
            )
        return self.choose_uncached()

    def choose_uncached(self) -> _TierChoice:
        """Returns the tier for records that are kept neither in memory nor on the device."""
        if self._remote:
            budget = format_bytes(self._budget_bytes)
            return _TierChoice("disk", f"the set is remote: at most {budget} of it in {self._folder}")
        # Loose files and pread have no mapping that the page cache could serve without a copy.
        if isinstance(self._dataset.source, MappedShards):
            return _TierChoice("none", "local files are mapped, and the page cache keeps them")
        return _TierChoice("none", "its files are read as they are needed")

    def choose_requested(self, cache: CacheMode) -> _TierChoice:
        """Returns the tier that the recipe asks for. Raises UsageError if the set does not fit there."""
        if cache == "none" and self._remote:
            return _TierChoice("none", "remote records are kept until they are read")
        if cache == "none":
            return self.choose_uncached()
        # A local set gains nothing from a second copy on the local disk.
        if cache == "disk":
            if self._remote:
                return self.choose_uncached()
            raise _build_refusal("the set is on a local disk already", "Leave data.cache out: local files are mapped.")
        # A device without CUDA keeps its images in host memory.
        free, owner = self._measure_free_host_bytes(), "process"
        if cache == "device":
            if self._pixels is None:
                fix = "Pack them to one size (headway pack --transform, with ImageOps.fit), or leave data.cache out."
                raise _build_refusal("a device keeps decoded images of one size, and these have different sizes", fix)
            if self._is_on_gpu:
                free, owner = self._measure_free_device_bytes(), "device"
        if self._pixels is not None and self._pixels <= REQUESTED_SHARE * free:
            name: TierName = "device" if cache == "device" and self._is_on_gpu else "memory"
            return _TierChoice(name, f"as asked: the decoded set of {format_bytes(self._pixels)}", decoded=True)
        if cache == "memory" and self._bytes <= REQUESTED_SHARE * free:
            return _TierChoice("memory", f"as asked: the set of {format_bytes(self._bytes)} as it is, not decoded")
        # The message names the smaller of the two sizes that would do.
        needed = self._pixels if cache == "device" else min(self._bytes, self._pixels or self._bytes)
        size, room = format_bytes(needed or 0), format_bytes(free)
        what = f"the set needs {size}, and the {owner} has {room} free, of which 80 % may be taken"
        raise _build_refusal(what, "Leave data.cache out, or make the images smaller.")

    def build_tier(self, place: _TierChoice) -> Tier:
        """Builds the tier that reads without loading the set into memory."""
        if self._remote is None:
            return MappedTier(self._dataset, place.why)
        folder = self._folder if place.name == "disk" else None
        return DiskTier(self._dataset, self._remote, folder, self._budget_bytes, why=place.why)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    @staticmethod
    def _measure_free_host_bytes() -> int:
        """Returns the memory for this process: each rank on a host keeps a copy of its own."""
        # Every rank of this host measures the same free memory at the same time.
        return read_free_memory_bytes() // (read_local_ranks() or 1)

    def _measure_free_device_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(torch.device(self._device))[0])


def _build_refusal(what: str, fix: str) -> UsageError:
    return UsageError(what, where="data.cache", fix=fix)


def _describe_fit(pixel_bytes: int, whose: str, free: int) -> str:
    size = format_bytes(pixel_bytes)
    return f"the decoded set of {size} fits into a quarter of {whose} free memory of {format_bytes(free)}"
