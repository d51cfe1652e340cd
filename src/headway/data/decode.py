"""Decodes one batch: by the native core, or by Pillow, the reference, which defines what the core does.

The two differ by 1 at most. A bad image fills zeros and sets its status; it never touches its neighbours.
"""

from __future__ import annotations

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
from headway.data.mapping import check_mappings as check_mapped
from headway.data.records import Records
from headway.data.reference import Batch, Kind, Pixels, Stats, move
from headway.data.reference import Status as Status

Backend = Literal["auto", "native", "pillow"]

TIMED_EVERY = 16
"""Batches. Reading the clock at every row costs the native core 3 % of a batch: so it costs 0.2 % of all time."""


_FOREIGN = 3
"""The native core's status of what is no JPEG, or none that it knows: for the reference."""


class Decoder(ABC):
    """Decodes batches on threads of its own. `decoder()` makes one.

    Attributes:
        backend: part of a run's fingerprint, since backends may differ by 1 in a pixel.
        threads: that decode.
        stats: what one batch of 16 cost.
    """

    backend: Literal["native", "pillow"]

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.stats = Stats()
        self._calls = 0

    def __call__(
        self,
        records: Records,
        boxes: NDArray[np.float32],
        out: Pixels,
        *,
        flips: NDArray[np.bool_] | None = None,
        kinds: NDArray[np.uint8] | None = None,
        shapes: NDArray[np.uint32] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
        scaled: bool = False,
    ) -> NDArray[np.uint8]:
        """Decodes k records into `out` (uint8 [k, H, W, C], C 1 or 3). Returns `Status`, uint8 [k].

        Args:
            boxes: what of each image is resized to the output, (left, top, width, height) in pixels; float32 [k, 4].
            flips: which are mirrored left to right; bool [k].
            kinds: `Kind` of each; uint8 [k]; None: all are image files.
            shapes: height, width and channels of raw ones; uint32 [k, 3].
            crc: crc32c of each record; uint32 [k]; None: nothing is checked.
            check: which are checked; bool [k]; None: all.
            scaled: decode JPEGs at 1/2, 1/4 or 1/8 where the box is that much larger than the output: faster, inexact.

        Raises DataError: a mapped file of these records was cut meanwhile.
        """
        stats, timed = Stats(images=len(records)), self._calls % TIMED_EVERY == 0
        self._calls += 1
        batch = Batch(records, boxes, out, flips, kinds, shapes, crc, check, scaled)
        status = self._decode(batch, stats, timed)
        check_mapped(records.address)
        if timed:
            self.stats.add(stats)
        return status

    @abstractmethod
    def gather(
        self,
        records: Records,
        out: Pixels,
        *,
        planar: bool = False,
        shifts: NDArray[np.int64] | None = None,
        flips: NDArray[np.bool_] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.uint8]:
        """Copies k raw images of the output's size; the pixels of `headway.flip_and_translate`. Returns `Status`.

        Args:
            planar: the records are [C, H, W].
            shifts: how far each is moved, (down, right), the border filled by reflection; int64 [k, 2].
            flips: which are mirrored before that; bool [k].
            crc, check: as of a call.
        """

    @abstractmethod
    def _decode(self, batch: Batch, stats: Stats, timed: bool) -> NDArray[np.uint8]: ...

    @abstractmethod
    def close(self) -> None:
        """Ends the threads."""


@final
class PillowDecoder(Decoder):
    """The reference. Pillow lets go of the interpreter's lock while it decodes."""

    backend = "pillow"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def _decode(self, batch: Batch, stats: Stats, timed: bool) -> NDArray[np.uint8]:
        status = np.zeros(len(batch.records), np.uint8)
        self.fill(batch, np.arange(len(status)), status, stats)
        return status

    def gather(
        self,
        records: Records,
        out: Pixels,
        *,
        planar: bool = False,
        shifts: NDArray[np.int64] | None = None,
        flips: NDArray[np.bool_] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.uint8]:
        """Copies raw images into the batch; see `Decoder.gather`."""
        status = np.zeros(len(records), np.uint8)
        for place, data in enumerate(records):
            wanted = crc is not None and (check is None or check[place])
            flip = flips is not None and bool(flips[place])
            shift = None if shifts is None else shifts[place]
            if crc is not None and wanted and crc32c(data) != crc[place]:
                out[place], status[place] = 0, Status.CHECKSUM
            elif len(data) < out[place].size:
                out[place], status[place] = 0, Status.UNDECODABLE
            else:
                move(data, out[place], planar=planar, shift=shift, flip=flip)
        check_mapped(records.address)
        return status

    def fill(self, batch: Batch, places: NDArray[np.intp], status: NDArray[np.uint8], stats: Stats) -> None:
        """Decodes the records at some places."""

        def work(some: NDArray[np.intp]) -> Stats:
            mine = Stats()
            for place in some:
                status[place] = batch.decode_one(int(place), mine)
            return mine

        for mine in (
            map(work, [places])
            if self.threads == 1
            else self._threads().map(work, np.array_split(places, self.threads))
        ):
            stats.add(mine)

    def _threads(self) -> ThreadPoolExecutor:
        """Those of this process: a forked child has none of its parent's."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.threads, "headway-decode"), os.getpid()
        return self._pool

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()


@final
class NativeDecoder(Decoder):
    """The native core; what is no JPEG goes to the reference."""

    backend = "native"

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        super().__init__(threads)
        self._pool = native.Pool(threads, cpus)
        self._reference = PillowDecoder(threads)

    def _decode(self, batch: Batch, stats: Stats, timed: bool) -> NDArray[np.uint8]:
        kinds, core = batch.kinds, native.Stats() if timed else None
        if kinds is not None:  # the core sees for itself that it does not know another format
            kinds = np.where(kinds == Kind.OTHER, np.uint8(Kind.JPEG), kinds)
        status = self._pool.decode(
            batch.records,
            batch.boxes,
            batch.out,
            flips=batch.flips,
            kinds=kinds,
            shapes=batch.shapes,
            crc=batch.crc,
            check=batch.check,
            scaled=batch.scaled,
            stats=core,
        )
        foreign = np.flatnonzero(status == _FOREIGN)
        if len(foreign):  # checked already, and counted
            others = Stats()
            self._reference.fill(replace(batch, crc=None), foreign, status, others)
            stats.add(replace(others, record_bytes=0))
        if core is not None:
            stats.add(
                Stats(
                    check_s=core.ns_check * 1e-9,
                    decode_s=core.ns_decode * 1e-9,
                    resample_s=core.ns_resample * 1e-9,
                    record_bytes=core.bytes,
                    used_bytes=core.bytes_used,
                    pixels=core.pixels,
                    direct=core.direct,
                )
            )
        return status

    def gather(
        self,
        records: Records,
        out: Pixels,
        *,
        planar: bool = False,
        shifts: NDArray[np.int64] | None = None,
        flips: NDArray[np.bool_] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.uint8]:
        """Copies raw images into the batch; see `Decoder.gather`."""
        moved = None if shifts is None else shifts.astype(np.int16)
        status = self._pool.gather(records, out, planar=planar, shift=moved, flips=flips, crc=crc, check=check)
        check_mapped(records.address)
        return status

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()
        self._reference.close()


def chosen(backend: Backend = "auto") -> Literal["native", "pillow"]:
    """What `auto` is here: the native core where it is built."""
    if backend == "auto":
        return "native" if native.available() else "pillow"
    return backend


def decoder(threads: int | None = None, backend: Backend = "auto", *, pin: bool = False) -> Decoder:
    """A decoder of batches; close it after use.

    Args:
        threads: how many decode; None: see `choose_thread_count`.
        backend: see `chosen`.
        pin: each thread of the native core keeps to one of the usable CPUs. Not the default: processes that share
            the CPUs of a machine would all pin to the first of them, and on few cores a pinned thread waits for
            its CPU while another one is free. It helps on many cores that are this process's alone.

    Raises UsageError: fewer threads than one; the native core where it is not built, or pinning without it.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} decoding threads", fix="Set 1 or more, or leave it out.")
    threads = threads or choose_thread_count()
    if chosen(backend) == "native":
        return NativeDecoder(threads, list_usable_cpus() if pin else None)
    if pin:
        raise UsageError("Pillow's threads cannot be pinned", fix="Leave pin out, or build the native core.")
    return PillowDecoder(threads)
