"""Records: memory addresses and lengths of samples' bytes, so that a batch needs no Python object per sample."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.random_keys import UInt64


@final
@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Bytes of k samples, which stay valid while this object lives.

    Attributes:
        address: memory address of each record; uint64 [k].
        length: bytes of each record; uint64 [k].
        keep: the object that owns the memory.
    """

    address: UInt64
    length: UInt64
    keep: object

    @staticmethod
    def from_buffers(buffers: Sequence[bytes | memoryview]) -> Records:
        """Builds Records of separate buffers."""
        # The arrays keep the buffers alive.
        arrays: list[NDArray[np.uint8]] = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        address = np.fromiter((array.ctypes.data for array in arrays), np.uint64, len(arrays))
        return Records(address, np.fromiter(map(len, arrays), np.uint64, len(arrays)), arrays)

    @staticmethod
    def from_rows(array: NDArray[np.uint8]) -> Records:
        """Builds Records of the rows of a contiguous array, [k, ...]."""
        row_bytes = array[0].nbytes if len(array) else 0
        # Addresses are computed, without a Python object per row.
        address = array.ctypes.data + np.arange(len(array), dtype=np.uint64) * np.uint64(row_bytes)
        return Records(address, np.full(len(array), row_bytes, np.uint64), array)

    def __len__(self) -> int:
        return len(self.address)

    def __getitem__(self, index: int) -> memoryview:
        """Returns one record's bytes, read-only; the view keeps these Records alive."""
        length = int(self.length[index])
        if not length:
            return memoryview(b"")
        # A ctypes array can wrap a bare address, and hold a reference to the owner of the memory.
        array = (ctypes.c_ubyte * length).from_address(int(self.address[index]))
        array.keep = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B").toreadonly()

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self)))
