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

DEFAULT_BUDGET_BYTES = 50 * 10**9
"""Default limit of all sets in the cache folder together."""
FREE_MEMORY_DIVISOR = 4
"""`auto` takes at most a quarter of the free memory: the rest is for the network, its activations, and others."""
MAX_REQUESTED_SHARE = 0.8
"""Fraction of the free memory that a set may take if the recipe names the tier."""


def choose_tier(
    dataset: Dataset,
    cache: CacheMode = "auto",
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    backend: Backend = "auto",
    folder: str | os.PathLike[str] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: FillProgress | None = None,
) -> Tier:
    """Builds and fills the tier that `cache` names; `Tier.why` gives the reason for the choice.

    - `device`, `memory`: the decoded set, if all images share one size. Crops are made of these pixels, which are
      those of the files, so nothing is lost. If sizes differ or pixels do not fit, `memory` keeps the records, which
      helps with slow file systems.
    - `disk`: remote records, fetched ahead of need into `folder`, at most `budget_bytes` with the other sets there.
    - `none`: local files are mapped; remote records are fetched, and kept until they are read.
    - `auto`: a small set decoded on the device or in memory; else local files mapped, and remote ones on the disk.

    Args:
        device: device of the batches.
        threads, backend: of the decoder that fills a tier; see `build_decoder`.
        folder: folder of the `disk` tier; None: see `headway.storage.addresses.get_cache_folder`.
        budget_bytes: limit of all sets in `folder` together.
        progress: called with (samples done, samples in all) while a tier is filled.

    Raises:
        UsageError: the request is impossible; the message says what is possible.
        DataError: records cannot be read.
    """
    # Recipes are checked earlier; this is for calls from Python.
    if cache not in get_args(CacheMode):
        fix = suggest_nearest(cache, get_args(CacheMode))
        raise UsageError(f"{cache!r} is not a cache", where="data.cache", fix=fix)
    planner = CachePlanner(dataset, str(device), Path(folder or get_cache_folder()), budget_bytes)
    choice = planner.choose_automatically() if cache == "auto" else planner.choose_requested(cache)
    # These tiers hold nothing yet, so there is nothing to fill.
    if choice.name == "none" or choice.name == "disk":
        return planner.build_tier(choice)
    # A tier in memory is filled through the tier without a cache, once.
    source = planner.build_tier(planner.choose_uncached())
    try:
        if not choice.decoded:
            return MemoryTier.from_records(dataset, source, why=choice.why, progress=progress)
        with contextlib.closing(build_decoder(threads, backend)) as decoder:
            if choice.name == "memory":
                return MemoryTier.from_decoded(dataset, source, decoder, why=choice.why, progress=progress)
            return DeviceTier(dataset, source, decoder, device, why=choice.why, progress=progress)
    finally:
        source.close()


@final
@dataclass(frozen=True, slots=True)
class _TierChoice:
    """A tier to build.

    Attributes:
        reason: why it was chosen, as part of a sentence.
        decoded: True if it keeps pixels, False if it keeps records.
    """

    name: TierName
    reason: str
    decoded: bool = False

    @property
    def why(self) -> str:
        """Name and reason; see `Tier.why`."""
        return f"{self.name}, {self.reason}"


@final
class CachePlanner:
    """Chooses the tier of a data set by its size and the free memory.

    Args:
        device: device of the batches, such as `cuda:0`.
        folder: folder of the `disk` tier.
        budget_bytes: limit of all sets in `folder` together.
    """

    def __init__(self, dataset: Dataset, device: str, folder: Path, budget_bytes: int) -> None:
        self._dataset = dataset
        self._device = device
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._remote = dataset.source.remote if isinstance(dataset.source, RemoteShards) else None
        # All sizes come from the columns: no record is read to choose.
        self._record_bytes = int(dataset.length.sum(dtype=np.int64))
        self._pixel_bytes = dataset.pixel_bytes
        self._is_raw = bool(len(dataset)) and bool((dataset.flags & FLAG_RAW).all())

    def choose_automatically(self) -> _TierChoice:
        """Chooses the tier for `data.cache: auto`."""
        # Fastest first: decoded on the GPU, decoded in memory, records in memory, no cache.
        is_mapped = isinstance(self._dataset.source, MappedShards)
        if self._pixel_bytes is not None and self._is_on_gpu:
            free_bytes = self._measure_free_device_bytes()
            if self._pixel_bytes <= free_bytes // FREE_MEMORY_DIVISOR:
                return _TierChoice("device", _describe_fit(self._pixel_bytes, "its", free_bytes), decoded=True)
        free_bytes = self._measure_free_host_bytes()
        limit_bytes = free_bytes // FREE_MEMORY_DIVISOR
        if self._pixel_bytes is not None and self._pixel_bytes <= limit_bytes and not (self._is_raw and is_mapped):
            return _TierChoice("memory", _describe_fit(self._pixel_bytes, "the", free_bytes), decoded=True)
        is_on_slow_disk = not self._remote and not is_mapped and is_on_network(self._dataset.folder)
        if is_on_slow_disk and self._record_bytes <= limit_bytes:
            size = format_bytes(self._record_bytes)
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
        # A local set gains nothing from another copy on the local disk.
        if cache == "disk":
            if self._remote:
                return self.choose_uncached()
            raise _build_refusal("the set is on a local disk already", "Leave data.cache out: local files are mapped.")
        # A device without CUDA keeps its images in host memory.
        free_bytes = self._measure_free_host_bytes()
        owner = "process"
        if cache == "device":
            if self._pixel_bytes is None:
                fix = "Pack them to one size (headway pack --transform, with ImageOps.fit), or leave data.cache out."
                raise _build_refusal("a device keeps decoded images of one size, and these have different sizes", fix)
            if self._is_on_gpu:
                free_bytes = self._measure_free_device_bytes()
                owner = "device"
        if self._pixel_bytes is not None and self._pixel_bytes <= MAX_REQUESTED_SHARE * free_bytes:
            name: TierName = "device" if cache == "device" and self._is_on_gpu else "memory"
            return _TierChoice(name, f"as asked: the decoded set of {format_bytes(self._pixel_bytes)}", decoded=True)
        if cache == "memory" and self._record_bytes <= MAX_REQUESTED_SHARE * free_bytes:
            return _TierChoice(
                "memory", f"as asked: the set of {format_bytes(self._record_bytes)} as it is, not decoded"
            )
        # The message names the smaller of the two sizes that would do.
        needed_bytes = (
            self._pixel_bytes if cache == "device" else min(self._record_bytes, self._pixel_bytes or self._record_bytes)
        )
        size_text, free_text = format_bytes(needed_bytes or 0), format_bytes(free_bytes)
        what = f"the set needs {size_text}, and the {owner} has {free_text} free, of which 80 % may be taken"
        raise _build_refusal(what, "Leave data.cache out, or make the images smaller.")

    def build_tier(self, choice: _TierChoice) -> Tier:
        """Builds a tier that need not be filled: mapped files, or the disk."""
        if self._remote is None:
            return MappedTier(self._dataset, choice.why)
        folder = self._folder if choice.name == "disk" else None
        return DiskTier(self._dataset, self._remote, folder, self._budget_bytes, why=choice.why)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    @staticmethod
    def _measure_free_host_bytes() -> int:
        """Returns this process's part of the free memory: each rank on a host keeps a copy of the set."""
        return read_free_memory_bytes() // (read_local_ranks() or 1)

    def _measure_free_device_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(torch.device(self._device))[0])


def _build_refusal(what: str, fix: str) -> UsageError:
    return UsageError(what, where="data.cache", fix=fix)


def _describe_fit(pixel_bytes: int, owner: str, free_bytes: int) -> str:
    size_text = format_bytes(pixel_bytes)
    return f"the decoded set of {size_text} fits into a quarter of {owner} free memory of {format_bytes(free_bytes)}"
