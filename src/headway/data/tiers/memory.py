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

FILL_CHUNK_SAMPLES = 512
"""Samples that are read and decoded together while a tier is filled."""

FillProgress = Callable[[int, int], object]
"""Callback that gets (samples done, samples in all)."""


@final
class MemoryTier(Tier):
    """Records in one array; build it with `from_decoded` or `from_records`. Decoded images look like a raw data set.

    Args:
        data: uint8 [n, ...], one record a row; or flat uint8, with `ends`.
        ends: the end of each record in `data`; uint64 [n].
    """

    def __init__(self, dataset: Dataset, why: str, data: NDArray[np.uint8], ends: NDArray[np.uint64] | None) -> None:
        super().__init__(dataset, "memory", why)
        self._data = data
        self._ends = ends

    @staticmethod
    def from_decoded(
        dataset: Dataset, source: Tier, decoder: Decoder, *, why: str, progress: FillProgress | None = None
    ) -> MemoryTier:
        """Builds a tier of decoded images, which must share one size; `source` is read once."""
        width, height = _get_common_size(dataset)
        num_samples = len(dataset)
        pixels = np.empty((num_samples, height, width, dataset.description.channels), np.uint8)
        tier = MemoryTier(dataset, why, pixels, None)
        for first, images in decode_all(dataset, source, decoder, tier, progress):
            pixels[first : first + len(images)] = images
        return tier

    @staticmethod
    def from_records(dataset: Dataset, source: Tier, *, why: str, progress: FillProgress | None = None) -> MemoryTier:
        """Builds a tier of the records as they are; `source` is read once."""
        num_samples = len(dataset)
        # Records of different sizes lie end to end; offsets are a running sum.
        ends = np.cumsum(dataset.length, dtype=np.uint64)
        data = np.empty(int(ends[-1]) if num_samples else 0, np.uint8)
        view = data.data
        for ids in _split_into_chunks(num_samples, source):
            records = source.read(ids)
            for sample, record in zip(ids.tolist(), records, strict=True):
                # A damaged record may be short; its missing bytes become zeros, and its checksum fails.
                end = int(ends[sample])
                begin = end - int(dataset.length[sample])
                view[begin : begin + len(record)] = record
                data[begin + len(record) : end] = 0
            # A mapped file that was truncated meanwhile gave zeros.
            check_mappings(records.address)
            if progress is not None:
                progress(int(ids[-1]) + 1, num_samples)
        return MemoryTier(dataset, why, data, ends)

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the records of these samples, without a copy."""
        ids = np.asarray(ids, np.int64)
        base = np.uint64(self._data.ctypes.data)
        if self._ends is None:
            # Images of one size: the address is computed from the index.
            image_bytes = np.uint64(self._data[0].nbytes)
            return Records(base + ids.astype(np.uint64) * image_bytes, np.full(len(ids), image_bytes), self._data)
        # Record i begins at the end of record i - 1.
        starts = np.where(ids > 0, self._ends[ids - 1], np.uint64(0))
        return Records(base + starts, self._ends[ids] - starts, self._data)

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Does nothing: every record is in memory."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the last Records."""


def decode_all(
    dataset: Dataset, source: Tier, decoder: Decoder, tier: Tier, progress: FillProgress | None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Decodes a whole set: yields (first sample, uint8 [k, height, width, channels]), chunk by chunk.

    After the last chunk, it sets the columns of `tier` to those of the pixels. A sample that cannot be decoded is
    zeros, is marked in `tier.damaged`, and gets a wrong checksum.
    """
    width, height = _get_common_size(dataset)
    num_samples = len(dataset)
    channels = dataset.description.channels
    damaged = np.zeros(num_samples, np.uint8)
    crc = np.zeros(num_samples, np.uint32)
    for ids in _split_into_chunks(num_samples, source):
        images = np.empty((len(ids), height, width, channels), np.uint8)
        # The box of a sample is its whole image, so the pixels are those of the file.
        request = DecodeRequest(
            source.read(ids),
            np.tile(np.array([0, 0, width, height], np.float32), (len(ids), 1)),
            images,
            kinds=find_record_kinds(source.flags[ids]),
            shapes=np.tile(np.array([height, width, channels], np.uint32), (len(ids), 1)),
            crc=source.crc32c[ids],
        )
        status = decoder.decode(request)
        damaged[ids] = status
        crc[ids] = [crc32c(image.data) for image in images]
        yield int(ids[0]), images
        if progress is not None:
            progress(int(ids[-1]) + 1, num_samples)
    # A wrong checksum makes the loader treat the sample like any damaged one.
    tier.flags = np.full(num_samples, FLAG_RAW, np.uint8)
    tier.damaged = damaged
    tier.crc32c = np.where(damaged != DecodeStatus.OK, ~crc, crc)


def _split_into_chunks(num_samples: int, source: Tier) -> Iterator[Ids]:
    """Announces all reads to `source`, and returns the samples of each chunk."""
    spans = [
        (first, min(num_samples, first + FILL_CHUNK_SAMPLES)) for first in range(0, num_samples, FILL_CHUNK_SAMPLES)
    ]
    source.expect(iter(spans))
    return (np.arange(*span) for span in spans)


def _get_common_size(dataset: Dataset) -> tuple[int, int]:
    size = dataset.description.common_size
    assert size is not None, "choose_tier checks this"
    return size
