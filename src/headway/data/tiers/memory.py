"""MemoryTier: the whole set in the memory of this process, decoded or as records."""

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
from headway.data.tiers.tier import Ids, Spans, Tier

CHUNK_SAMPLES = 512
"""Samples that are read and decoded together while a tier is filled."""

FillProgress = Callable[[int, int], object]
"""Callback that gets (samples done, samples in all)."""


@final
class MemoryTier(Tier):
    """Records in one array; `from_decoded` and `from_records` fill it. Decoded ones look like a raw data set."""

    def __init__(self, dataset: Dataset, why: str, data: NDArray[np.uint8], ends: NDArray[np.uint64] | None) -> None:
        """Takes `data`: [n, ...]; or flat, with the end of each record in `ends` (uint64 [n])."""
        super().__init__(dataset, "memory", why)
        self._data, self._ends = data, ends

    @staticmethod
    def from_decoded(
        dataset: Dataset, source: Tier, decoder: Decoder, *, why: str, progress: FillProgress | None = None
    ) -> MemoryTier:
        """Decodes all images, which must share one size; `source` is read once."""
        (width, height), n = _get_common_size(dataset), len(dataset)
        pixels = np.empty((n, height, width, dataset.description.channels), np.uint8)
        tier = MemoryTier(dataset, why, pixels, None)
        for low, some in decode_all(dataset, source, decoder, tier, progress):
            pixels[low : low + len(some)] = some
        return tier

    @staticmethod
    def from_records(dataset: Dataset, source: Tier, *, why: str, progress: FillProgress | None = None) -> MemoryTier:
        """Copies the bytes of all records; `source` is read once."""
        n = len(dataset)
        # Records of different sizes lie end to end; offsets are a running sum.
        ends = np.cumsum(dataset.length, dtype=np.uint64)
        data = np.empty(int(ends[-1]) if n else 0, np.uint8)
        view = data.data
        for ids in _split_into_chunks(n, source):
            records = source.read(ids)
            for sample, record in zip(ids.tolist(), records, strict=True):
                # A damaged record may be short; its missing bytes become zeros, and its checksum fails.
                end = int(ends[sample])
                begin = end - int(dataset.length[sample])
                view[begin : begin + len(record)] = record
                data[begin + len(record) : end] = 0
            # A mapped file that was cut meanwhile gave zeros.
            check_mappings(records.address)
            if progress is not None:
                progress(int(ids[-1]) + 1, n)
        return MemoryTier(dataset, why, data, ends)

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the records of these samples, without a copy."""
        ids = np.asarray(ids, np.int64)
        base = np.uint64(self._data.ctypes.data)
        if self._ends is None:
            # Images of one size: an address is a multiplication.
            size = np.uint64(self._data[0].nbytes)
            return Records(base + ids.astype(np.uint64) * size, np.full(len(ids), size), self._data)
        # Record i begins at the end of record i - 1.
        begin = np.where(ids > 0, self._ends[ids - 1], np.uint64(0))
        return Records(base + begin, self._ends[ids] - begin, self._data)

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Does nothing: every record is in memory."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the last Records."""


def decode_all(
    dataset: Dataset, source: Tier, decoder: Decoder, tier: Tier, progress: FillProgress | None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Decodes a whole set: yields (first sample, uint8 [k, height, width, channels]), chunk by chunk.

    Sets the columns of `tier` to those of the pixels. A sample that cannot be decoded is zeros, is marked in `damaged`,
    and gets a wrong checksum.
    """
    (width, height), n, channels = _get_common_size(dataset), len(dataset), dataset.description.channels
    damaged, crc = np.zeros(n, np.uint8), np.zeros(n, np.uint32)
    for ids in _split_into_chunks(n, source):
        out = np.empty((len(ids), height, width, channels), np.uint8)
        # The box of a sample is its whole image, so the pixels are those of the file.
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
    # A wrong checksum makes the loader treat the sample like any damaged one.
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
