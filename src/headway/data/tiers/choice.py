"""Which tier a data set is read from, and why."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final, get_args

import numpy as np

from headway.core.byte_format import format_bytes
from headway.core.cpu_count import read_local_ranks
from headway.core.errors import UsageError, suggest_nearest
from headway.core.free_memory import read_free_memory_bytes
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import Backend, decoder
from headway.data.formats.unpack import cache_folder
from headway.data.options import Cache
from headway.data.shards import MappedShards, on_network
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.memory import MemoryTier, Progress
from headway.data.tiers.opened import RemoteShards
from headway.data.tiers.tier import MappedTier, Name, Tier

if TYPE_CHECKING:  # it takes seconds
    import torch

BUDGET_BYTES = 50 * 10**9
SHARE = 4
"""`auto` keeps a set in memory that takes at most a quarter of what is free: the rest is for the network, what it saves
for backward, and others."""
LIMIT = 0.8
"""Most of what is free that a set may take where the user asks for it."""


def choose(
    dataset: Dataset,
    cache: Cache = "auto",
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    backend: Backend = "auto",
    folder: str | os.PathLike[str] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
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
    if cache not in get_args(Cache):
        raise UsageError(
            f"{cache!r} is no place for a cache", where="data.cache", fix=suggest_nearest(cache, get_args(Cache))
        )
    near = Near(dataset, str(device), Path(folder or cache_folder()), budget_bytes)
    place = near.auto() if cache == "auto" else near.asked(cache)
    if place.name == "none" or place.name == "disk":
        return near.unfilled(place)
    source = near.unfilled(near.bare())
    try:
        if not place.decoded:
            return MemoryTier.copied(dataset, source, why=place.why, progress=progress)
        with contextlib.closing(decoder(threads, backend)) as decode:
            if place.name == "memory":
                return MemoryTier.decoded(dataset, source, decode, why=place.why, progress=progress)
            return DeviceTier(dataset, source, decode, device, why=place.why, progress=progress)
    finally:
        source.close()


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Where a set is to be kept, why, and whether as pixels."""

    name: Name
    reason: str
    decoded: bool = False

    @property
    def why(self) -> str:
        return f"{self.name}, {self.reason}"


@final
class Near:
    """Chooses where a data set is kept, by its size and the free memory."""

    def __init__(self, dataset: Dataset, device: str, folder: Path, budget_bytes: int) -> None:
        self._dataset, self._device, self._folder, self._budget_bytes = dataset, device, folder, budget_bytes
        self._remote = dataset.source.remote if isinstance(dataset.source, RemoteShards) else None
        self._bytes = int(dataset.length.sum(dtype=np.int64))
        self._pixels = dataset.pixel_bytes
        self._raw = bool(len(dataset)) and bool((dataset.flags & FLAG_RAW).all())

    def auto(self) -> _Place:
        """Chooses the place for `data.cache: auto`."""
        mapped = isinstance(self._dataset.source, MappedShards)
        if self._pixels is not None and self._on_gpu and self._pixels <= (free := self._free_device()) // SHARE:
            share = f"a quarter of its free memory of {format_bytes(free)}"
            reason = f"the decoded set of {format_bytes(self._pixels)} fits into {share}"
            return _Place("device", reason, decoded=True)
        free = self._free_host()
        if self._pixels is not None and self._pixels <= free // SHARE and not (self._raw and mapped):
            share = f"a quarter of the free memory of {format_bytes(free)}"
            reason = f"the decoded set of {format_bytes(self._pixels)} fits into {share}"
            return _Place("memory", reason, decoded=True)
        if not self._remote and not mapped and on_network(self._dataset.folder) and self._bytes <= free // SHARE:
            lies = f"its {format_bytes(self._bytes)} lie on a network file system"
            reason = f"{lies}; a quarter of the free memory holds them"
            return _Place("memory", reason)
        return self.bare()

    def bare(self) -> _Place:
        """Returns the place of records that are kept neither in memory nor on the device."""
        if self._remote:
            budget = format_bytes(self._budget_bytes)
            return _Place("disk", f"the set is remote: at most {budget} of it in {self._folder}")
        if isinstance(self._dataset.source, MappedShards):
            return _Place("none", "local files are mapped, and the page cache keeps them")
        return _Place("none", "its files are read as they are needed")

    def asked(self, cache: Cache) -> _Place:
        """Returns the place that the recipe asks for. Raises UsageError: the set does not fit there."""
        if cache == "none":
            return _Place("none", "remote records are kept until they are read") if self._remote else self.bare()
        if cache == "disk":
            if self._remote:
                return self.bare()
            raise _refusal("the set lies on a local disk already", "Leave data.cache out: local files are mapped.")
        free, owner = self._free_host(), "process"
        if cache == "device":
            if self._pixels is None:
                fix = "Pack them to one size (headway pack --transform, with ImageOps.fit), or leave data.cache out."
                raise _refusal("a device keeps decoded images of one size, and these have different sizes", fix)
            if self._on_gpu:
                free, owner = self._free_device(), "device"
        if self._pixels is not None and self._pixels <= LIMIT * free:
            name: Name = "device" if cache == "device" and self._on_gpu else "memory"
            return _Place(name, f"as asked: the decoded set of {format_bytes(self._pixels)}", decoded=True)
        if cache == "memory" and self._bytes <= LIMIT * free:
            return _Place("memory", f"as asked: the set of {format_bytes(self._bytes)} as it is, not decoded")
        needed = self._pixels if cache == "device" else min(self._bytes, self._pixels or self._bytes)
        what = f"the set needs {format_bytes(needed or 0)}, and the {owner} has {format_bytes(free)} free"
        what += ", of which 80 % may be taken"
        raise _refusal(what, "Leave data.cache out, or make the images smaller.")

    def unfilled(self, place: _Place) -> Tier:
        """Builds the tier that reads from such a place; nothing is loaded into memory yet."""
        if self._remote is None:
            return MappedTier(self._dataset, place.why)
        folder = self._folder if place.name == "disk" else None
        return DiskTier(self._dataset, self._remote, folder, self._budget_bytes, why=place.why)

    @property
    def _on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    @staticmethod
    def _free_host() -> int:
        """Memory for this process: each rank on a host keeps a copy of its own."""
        return read_free_memory_bytes() // (read_local_ranks() or 1)

    def _free_device(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(torch.device(self._device))[0])


def _refusal(what: str, fix: str) -> UsageError:
    return UsageError(what, where="data.cache", fix=fix)
