"""Which tier a data set is read from, and why."""

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
from headway.data.columns import FLAG_RAW
from headway.data.data_recipe import CacheMode
from headway.data.dataset import Dataset
from headway.data.decode import Backend, build_decoder
from headway.data.shards import MappedShards, is_on_network
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.memory import FillProgress, MemoryTier
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.tiers.tier import MappedTier, Tier, TierName
from headway.storage.addresses import get_cache_folder

if TYPE_CHECKING:  # it takes seconds
    import torch

BUDGET_BYTES = 50 * 10**9
FREE_MEMORY_DIVISOR = 4
"""`auto` keeps a set in memory that takes at most a quarter of what is free: the rest is for the network, what it saves
for backward, and others."""
REQUESTED_SHARE = 0.8
"""Most of what is free that a set may take where the user asks for it."""


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
    """The tier that `cache` names, filled; its `why` says what `auto` chose, and for what reason.

    - `device`, `memory`: the set decoded, where all images share one size. Crops are then made of these pixels, which
      are the images' own: nothing is lost. `memory` keeps the bytes as they are where sizes differ or pixels do not
      fit, which helps where files are slow.
    - `disk`: remote records, fetched ahead of need into `folder`, at most `budget_bytes` with the other sets there.
    - `none`: local files are mapped; remote records are fetched, and kept until they are read.
    - `auto`: a small set decoded on the device or in memory, else local files mapped and remote ones on the disk.

    Args:
        threads, backend: of the decoder that fills a tier; as of `decoder`.
        folder: None: `headway` in the user's cache folder.
        progress: is called with (samples done, samples in all) while a tier is filled.

    Raises:
        UsageError: what is asked cannot be; the sentence says what can.
        DataError: a remote address cannot be read.
    """
    if cache not in get_args(CacheMode):
        raise UsageError(
            f"{cache!r} is no place for a cache", where="data.cache", fix=suggest_nearest(cache, get_args(CacheMode))
        )
    planner = CachePlanner(dataset, str(device), Path(folder or get_cache_folder()), budget_bytes)
    place = planner.choose_automatically() if cache == "auto" else planner.choose_requested(cache)
    if place.name == "none" or place.name == "disk":
        return planner.build_tier(place)
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
    """Where a set is to be kept, why, and whether as pixels."""

    name: TierName
    reason: str
    decoded: bool = False

    @property
    def why(self) -> str:
        return f"{self.name}, {self.reason}"


@final
class CachePlanner:
    """Chooses where a data set is kept, by its size and the free memory."""

    def __init__(self, dataset: Dataset, device: str, folder: Path, budget_bytes: int) -> None:
        self._dataset, self._device, self._folder, self._budget_bytes = dataset, device, folder, budget_bytes
        self._remote = dataset.source.remote if isinstance(dataset.source, RemoteShards) else None
        self._bytes = int(dataset.length.sum(dtype=np.int64))
        self._pixels = dataset.pixel_bytes
        self._raw = bool(len(dataset)) and bool((dataset.flags & FLAG_RAW).all())

    def choose_automatically(self) -> _TierChoice:
        """Chooses the place for `data.cache: auto`."""
        mapped = isinstance(self._dataset.source, MappedShards)
        if (
            self._pixels is not None
            and self._on_gpu
            and self._pixels <= (free := self._measure_free_device_bytes()) // FREE_MEMORY_DIVISOR
        ):
            reason = f"the decoded set of {_size(self._pixels)} fits into a quarter of its free memory of {_size(free)}"
            return _TierChoice("device", reason, decoded=True)
        free = self._measure_free_host_bytes()
        if self._pixels is not None and self._pixels <= free // FREE_MEMORY_DIVISOR and not (self._raw and mapped):
            reason = f"the decoded set of {_size(self._pixels)} fits into a quarter of the free memory of {_size(free)}"
            return _TierChoice("memory", reason, decoded=True)
        if (
            not self._remote
            and not mapped
            and is_on_network(self._dataset.folder)
            and self._bytes <= free // FREE_MEMORY_DIVISOR
        ):
            reason = f"its {_size(self._bytes)} lie on a network file system; a quarter of the free memory holds them"
            return _TierChoice("memory", reason)
        return self.choose_uncached()

    def choose_uncached(self) -> _TierChoice:
        """Returns the place of records that are kept neither in memory nor on the device."""
        if self._remote:
            return _TierChoice(
                "disk", f"the set is remote: at most {_size(self._budget_bytes)} of it in {self._folder}"
            )
        if isinstance(self._dataset.source, MappedShards):
            return _TierChoice("none", "local files are mapped, and the page cache keeps them")
        return _TierChoice("none", "its files are read as they are needed")

    def choose_requested(self, cache: CacheMode) -> _TierChoice:
        """Returns the place that the recipe asks for. Raises UsageError: the set does not fit there."""
        if cache == "none":
            return (
                _TierChoice("none", "remote records are kept until they are read")
                if self._remote
                else self.choose_uncached()
            )
        if cache == "disk":
            if self._remote:
                return self.choose_uncached()
            raise _build_refusal(
                "the set lies on a local disk already", "Leave data.cache out: local files are mapped."
            )
        free, owner = self._measure_free_host_bytes(), "process"
        if cache == "device":
            if self._pixels is None:
                fix = "Pack them to one size (headway pack --transform, with ImageOps.fit), or leave data.cache out."
                raise _build_refusal("a device keeps decoded images of one size, and these have different sizes", fix)
            if self._on_gpu:
                free, owner = self._measure_free_device_bytes(), "device"
        if self._pixels is not None and self._pixels <= REQUESTED_SHARE * free:
            name: TierName = "device" if cache == "device" and self._on_gpu else "memory"
            return _TierChoice(name, f"as asked: the decoded set of {_size(self._pixels)}", decoded=True)
        if cache == "memory" and self._bytes <= REQUESTED_SHARE * free:
            return _TierChoice("memory", f"as asked: the set of {_size(self._bytes)} as it is, not decoded")
        needed = self._pixels if cache == "device" else min(self._bytes, self._pixels or self._bytes)
        what = f"the set needs {_size(needed or 0)}, and the {owner} has {_size(free)} free, of which 80 % may be taken"
        raise _build_refusal(what, "Leave data.cache out, or make the images smaller.")

    def build_tier(self, place: _TierChoice) -> Tier:
        """Builds the tier that reads from such a place; nothing is loaded into memory yet."""
        if self._remote is None:
            return MappedTier(self._dataset, place.why)
        folder = self._folder if place.name == "disk" else None
        return DiskTier(self._dataset, self._remote, folder, self._budget_bytes, why=place.why)

    @property
    def _on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    @staticmethod
    def _measure_free_host_bytes() -> int:
        """Memory for this process: each rank on a host keeps a copy of its own."""
        return read_free_memory_bytes() // (read_local_ranks() or 1)

    def _measure_free_device_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(torch.device(self._device))[0])


def _build_refusal(what: str, fix: str) -> UsageError:
    return UsageError(what, where="data.cache", fix=fix)


def _size(size_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= 0.9995 * scale:  # below it, three digits of the next smaller unit hold it
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes} bytes"
