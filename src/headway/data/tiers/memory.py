"""MemoryTier: the whole set in this process's memory, decoded or as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import Decoder
from headway.data.decode_request import DecodeRequest
from headway.data.mapping import check_mappings
from headway.data.order import Order
from headway.data.records import Records
from headway.data.reference import DecodeStatus, find_record_kinds
from headway.data.tiers.next_use import HostSlots
from headway.data.tiers.tier import Ids, Tier

CHUNK_SAMPLES = 512
"""Read, and decoded, at once while a tier is filled."""

FillProgress = Callable[[int, int], object]
"""Is called with (samples done, samples in all)."""


@final
class MemoryTier(Tier):
    """Records side by side in one array; `decoded` and `copied` make one. Decoded ones look like a raw data set."""

    def __init__(self, dataset: Dataset, why: str, data: NDArray[np.uint8], ends: NDArray[np.uint64] | None) -> None:
        """`data`: [n, ...]; or flat, each record ending at its place of `ends` (uint64 [n])."""
        super().__init__(dataset, "memory", why)
        self._data, self._ends = data, ends

    @staticmethod
    def from_decoded(
        dataset: Dataset, source: Tier, decoder: Decoder, *, why: str, progress: FillProgress | None = None
    ) -> MemoryTier:
        """All images decoded, which have to share one size; `source` is read once."""
        (width, height), n = _get_common_size(dataset), len(dataset)
        pixels = np.empty((n, height, width, dataset.description.channels), np.uint8)
        tier = MemoryTier(dataset, why, pixels, None)
        for low, some in decode_all(dataset, source, decoder, tier, progress):
            pixels[low : low + len(some)] = some
        return tier

    @staticmethod
    def from_records(dataset: Dataset, source: Tier, *, why: str, progress: FillProgress | None = None) -> MemoryTier:
        """The bytes of all records as they are; `source` is read once."""
        n = len(dataset)
        ends = np.cumsum(dataset.length, dtype=np.uint64)
        data = np.empty(int(ends[-1]) if n else 0, np.uint8)
        view = data.data
        for ids in _split_into_chunks(n, source):
            records = source.read(ids)
            for sample, record in zip(ids.tolist(), records, strict=True):
                # A damaged record may be short: what is missing is zeros, which its checksum shows.
                end = int(ends[sample])
                begin = end - int(dataset.length[sample])
                view[begin : begin + len(record)] = record
                data[begin + len(record) : end] = 0
            check_mappings(records.address)
            if progress is not None:
                progress(int(ids[-1]) + 1, n)
        return MemoryTier(dataset, why, data, ends)

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Finds the records of these samples in memory."""
        ids = np.asarray(ids, np.int64)
        base = np.uint64(self._data.ctypes.data)
        if self._ends is None:
            size = np.uint64(self._data[0].nbytes)
            return Records(base + ids.astype(np.uint64) * size, np.full(len(ids), size), self._data)
        begin = np.where(ids > 0, self._ends[ids - 1], np.uint64(0))
        return Records(base + begin, self._ends[ids] - begin, self._data)

    def expect(
        self, spans: Iterator[tuple[int, int]], order: Order | None = None, slots: HostSlots | None = None
    ) -> None:
        """Nothing is brought: everything is here."""

    def close(self) -> None:
        """The memory goes with the last Records."""


def decode_all(
    dataset: Dataset, source: Tier, decoder: Decoder, tier: Tier, progress: FillProgress | None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """A whole set, checked and decoded: (first sample, uint8 [k, height, width, channels]), piece by piece.

    Makes the columns of `tier` those of the pixels. A sample that cannot be decoded is zeros, is marked in `damaged`,
    and has a wrong checksum.
    """
    (width, height), n, channels = _get_common_size(dataset), len(dataset), dataset.description.channels
    damaged, crc = np.zeros(n, np.uint8), np.zeros(n, np.uint32)
    for ids in _split_into_chunks(n, source):
        out = np.empty((len(ids), height, width, channels), np.uint8)
        request = DecodeRequest(
            source.read(ids),
            np.tile(np.array([0, 0, width, height], np.float32), (len(ids), 1)),
            out,
            kinds=find_record_kinds(source.flags[ids]),
            shapes=np.tile(np.array([height, width, channels], np.uint32), (len(ids), 1)),
            crc=source.crc32c[ids],
        )
        status = decoder.decode(request)
        damaged[ids] = status
        crc[ids] = [crc32c(image.data) for image in out]
        yield int(ids[0]), out
        if progress is not None:
            progress(int(ids[-1]) + 1, n)
    tier.flags = np.full(n, FLAG_RAW, np.uint8)
    tier.damaged, tier.crc32c = damaged, np.where(damaged != DecodeStatus.OK, ~crc, crc)


def _split_into_chunks(n: int, source: Tier) -> Iterator[Ids]:
    spans = [(low, min(n, low + CHUNK_SAMPLES)) for low in range(0, n, CHUNK_SAMPLES)]
    source.expect(iter(spans))
    return (np.arange(*span) for span in spans)


def _get_common_size(dataset: Dataset) -> tuple[int, int]:
    size = dataset.description.common_size
    assert size is not None, "choose has seen to it"
    return size
