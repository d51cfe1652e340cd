"""Decoders: the native core, and Pillow as the reference that defines the result.

The two differ by at most 1 in a pixel. A bad image is filled with zeros and sets its status; its neighbours are never
touched.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.core.cpu_count import choose_thread_count, list_usable_cpus
from headway.core.errors import UsageError
from headway.data import native
from headway.data.decode_request import DecodeRequest, GatherRequest
from headway.data.mapping import check_mappings as check_mapped
from headway.data.reference import DecodeStats, DecodeStatus, RecordKind, copy_raw_image, decode_record, read_mirrors

LOG = logging.getLogger("headway.data")

Backend = Literal["auto", "native", "pillow"]

BATCHES_PER_TIMING = 16
"""One batch of so many is timed. Clock reads for every batch cost the native core 3 % of its time; this way, 0.2 %."""

_FOREIGN_STATUS = 3
"""Status from the native core for a record that is not a JPEG, or one it does not support: the reference decodes it."""


class Decoder(ABC):
    """Decodes batches on its own threads. `build_decoder()` makes one.

    Attributes:
        backend: part of a run's fingerprint, since backends may differ by 1 in a pixel.
        threads: number of decoding threads.
        stats: sums over the timed batches, one of BATCHES_PER_TIMING.
    """

    backend: Literal["native", "pillow"]

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # Sums of the timed batches only: rates divide them by `stats.images`, not by all images.
        self.stats = DecodeStats()
        self._calls = 0

    def decode(self, request: DecodeRequest) -> NDArray[np.uint8]:
        """Decodes a batch into `request.out` and returns each record's `DecodeStatus`, uint8 [k].

        Raises:
            DataError: a mapped file of these records was truncated meanwhile.
        """
        batch_stats = DecodeStats(images=len(request.records))
        is_timed = self._calls % BATCHES_PER_TIMING == 0
        self._calls += 1
        status = self._decode_batch(request, batch_stats, is_timed)
        # A truncated mapping reads as zeros, which may decode without an error: only this check reports it.
        check_mapped(request.records.address)
        if is_timed:
            self.stats.add(batch_stats)
        return status

    @abstractmethod
    def gather(self, request: GatherRequest) -> NDArray[np.uint8]:
        """Copies raw images into `request.out` and returns each record's `DecodeStatus`, uint8 [k]."""

    @abstractmethod
    def _decode_batch(self, request: DecodeRequest, stats: DecodeStats, is_timed: bool) -> NDArray[np.uint8]:
        """Decodes a batch, as `decode`; adds its costs to `stats`, times only if `is_timed`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads."""


@final
class PillowDecoder(Decoder):
    """The reference decoder. Pillow releases the GIL while it decodes, so threads help."""

    backend = "pillow"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def _decode_batch(self, request: DecodeRequest, stats: DecodeStats, is_timed: bool) -> NDArray[np.uint8]:
        status = np.zeros(len(request.records), np.uint8)
        self.decode_places(request, np.arange(len(status)), status, stats)
        return status

    def gather(self, request: GatherRequest) -> NDArray[np.uint8]:
        """Copies raw images; see `Decoder.gather`."""
        status = np.zeros(len(request.records), np.uint8)
        out, crc = request.out, request.crc
        for index, data in enumerate(request.records):
            is_checked = crc is not None and (request.check is None or request.check[index])
            # A failed record is zeros, as in the native core.
            if crc is not None and is_checked and crc32c(data) != crc[index]:
                out[index] = 0
                status[index] = DecodeStatus.CHECKSUM
            elif len(data) < out[index].size:
                out[index] = 0
                status[index] = DecodeStatus.UNDECODABLE
            else:
                shift = None if request.shifts is None else request.shifts[index]
                mirrors = read_mirrors(request, index)
                copy_raw_image(data, out[index], planar=request.planar, shift=shift, mirrors=mirrors)
        check_mapped(request.records.address)
        return status

    def decode_places(
        self, request: DecodeRequest, indices: NDArray[np.intp], status: NDArray[np.uint8], stats: DecodeStats
    ) -> None:
        """Decodes the records at `indices` of a batch; writes to `status` at these indices, and adds to `stats`."""

        def decode_chunk(chunk: NDArray[np.intp]) -> DecodeStats:
            """Decodes one thread's records; returns their costs."""
            chunk_stats = DecodeStats()
            for index in chunk:
                status[index] = decode_record(request, int(index), chunk_stats)
            return chunk_stats

        # With one thread, the caller decodes: a pool would only add a context switch.
        if self.threads == 1:
            stats.add(decode_chunk(indices))
            return
        for chunk_stats in self._open_pool().map(decode_chunk, np.array_split(indices, self.threads)):
            stats.add(chunk_stats)

    def _open_pool(self) -> ThreadPoolExecutor:
        # A forked child has none of its parent's threads, so it makes its own pool.
        if self._pool is None or self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self.threads, "headway-decode")
            self._process = os.getpid()
        return self._pool

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()


@final
class NativeDecoder(Decoder):
    """The native core. Records that it cannot decode go to the reference."""

    backend = "native"

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        super().__init__(threads)
        self._pool = native.NativePool(threads, cpus)
        # It starts its threads only when a record needs it.
        self._reference = PillowDecoder(threads)

    def _decode_batch(self, request: DecodeRequest, stats: DecodeStats, is_timed: bool) -> NDArray[np.uint8]:
        core_stats = native.NativeStats() if is_timed else None
        kinds = request.kinds
        # The core has no kind for other formats: given as JPEG, they get _FOREIGN_STATUS.
        if kinds is not None and (kinds == RecordKind.OTHER).any():
            kinds = np.where(kinds == RecordKind.OTHER, np.uint8(RecordKind.JPEG), kinds)
            status = self._pool.decode(replace(request, kinds=kinds), core_stats)
        else:
            status = self._pool.decode(request, core_stats)
        foreign_indices = np.flatnonzero(status == _FOREIGN_STATUS)
        if len(foreign_indices):
            # The core has compared these checksums and counted these bytes already.
            reference_stats = DecodeStats()
            self._reference.decode_places(replace(request, crc=None), foreign_indices, status, reference_stats)
            stats.add(replace(reference_stats, record_bytes=0))
        if core_stats is not None:
            stats.add(
                DecodeStats(
                    check_s=core_stats.ns_check * 1e-9,
                    decode_s=core_stats.ns_decode * 1e-9,
                    resample_s=core_stats.ns_resample * 1e-9,
                    record_bytes=core_stats.bytes,
                    used_bytes=core_stats.bytes_used,
                    pixels=core_stats.pixels,
                    direct=core_stats.direct,
                )
            )
        return status

    def gather(self, request: GatherRequest) -> NDArray[np.uint8]:
        """Copies raw images; see `Decoder.gather`."""
        status = self._pool.gather(request)
        check_mapped(request.records.address)
        return status

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()
        self._reference.close()


def resolve_backend(backend: Backend = "auto") -> Literal["native", "pillow"]:
    """Returns `backend`, with `auto` replaced by "native" if the native core is available, else "pillow"."""
    if backend == "auto":
        return "native" if native.is_available() else "pillow"
    return backend


def choose_available_backend(backend: Backend) -> Backend:
    """Returns the backend that a run was trained with, or `pillow` with a warning if the native core is not here."""
    if backend != "native" or native.is_available():
        return backend
    LOG.warning("The native core is not here: Pillow decodes. It is slower, and pixels differ by 1 at most.")
    return "pillow"


def build_decoder(threads: int | None = None, backend: Backend = "auto", *, pin: bool = False) -> Decoder:
    """Builds a decoder of batches; close it after use.

    Args:
        threads: number of decoding threads; None: `headway.core.cpu_count.choose_thread_count()`.
        backend: see `resolve_backend`.
        pin: bind each thread of the native core to one of the usable CPUs. It helps on many cores that belong to this
            process alone.

    Raises:
        UsageError: `threads` is below 1; or the native core or pinning is requested and not available.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} decoding threads", fix="Set threads to 1 or more, or leave it out.")
    threads = threads or choose_thread_count()
    # Pinning is not the default: processes that share a machine would all pin to its first CPUs, and on few cores a
    # pinned thread waits for its CPU while another CPU is idle.
    if resolve_backend(backend) == "native":
        return NativeDecoder(threads, list_usable_cpus() if pin else None)
    if pin:
        raise UsageError("Pillow's threads cannot be pinned", fix="Leave pin out, or build the native core.")
    return PillowDecoder(threads)
