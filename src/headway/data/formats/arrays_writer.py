"""Writes raw pixels as `.npy` shards, which numpy can map.

A shard is uint8 [n, h, w, c] if all its images share one size; else it is flat, uint8 [bytes], the pixels of one image
after another. Labels are beside it in `NAME.labels.npy`, int64 [n], float32 [n] or float32 [n, k]. A trailer follows
the array.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.data.formats.recordio import RecordPlace
from headway.data.formats.trailer import build_trailer

NPY_HEADER_BYTES = 128
"""Space for the header of any shape here; a multiple of 64, as the `.npy` format requires."""

_WRITE_BUFFER_BYTES = 1 << 20


@final
class ArraysWriter:
    """Writes one shard of raw pixels; see `ShardWriter`."""

    def __init__(self, path: Path, pack_id: int) -> None:
        self._file = open(path, "wb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115
        self._path = path
        self._pack_id = pack_id
        self._shapes: set[tuple[int, ...]] = set()
        self._labels: list[Any] = []
        # The header is written last; its space is reserved.
        self.size_bytes = self._file.write(bytes(NPY_HEADER_BYTES))

    def append(self, image: NDArray[np.uint8], label: Any, index: int) -> RecordPlace:
        """Appends the pixels of an image, uint8 [h, w, c] and contiguous; returns where they are stored."""
        offset = self.size_bytes
        self.size_bytes += self._file.write(image.data)
        self._shapes.add(image.shape)
        self._labels.append(label)
        return RecordPlace(offset, image.nbytes, False)

    def close(self) -> None:
        """Writes the labels, and the header, whose shape is known only now; flushes both files to the disk (fsync)."""
        shape: tuple[int, ...] = (self.size_bytes - NPY_HEADER_BYTES,)
        # numpy users can index images of one size; a flat array still holds any sizes.
        if len(self._shapes) == 1:
            shape = (len(self._labels), *self._shapes.pop())
        # numpy ignores bytes after the array.
        self.size_bytes += self._file.write(build_trailer(self._pack_id))
        self._file.seek(0)
        self._file.write(_build_header(shape))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        labels = np.array(self._labels)
        with self._path.with_suffix(".labels.npy").open("wb") as file:
            np.save(file, labels.astype(np.int64 if labels.dtype.kind == "i" else np.float32))
            file.flush()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Closes the file and ignores errors; see `ShardWriter`."""
        with contextlib.suppress(OSError):
            self._file.close()


def _build_header(shape: tuple[int, ...]) -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    # Version 1.0 of the format: 2 bytes of header length.
    magic = b"\x93NUMPY\x01\x00" + (NPY_HEADER_BYTES - 10).to_bytes(2, "little")
    return magic + header.ljust(NPY_HEADER_BYTES - 11) + b"\n"
