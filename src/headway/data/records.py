"""Records: where the bytes of some samples lie in memory, so that a batch is handed on without a word per sample."""

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
    """Bytes of k samples. They stay where they are for as long as this object lives.

    Attributes:
        address, length: of each record's bytes; uint64 [k].
        keep: what holds the bytes.
    """

    address: UInt64
    length: UInt64
    keep: object

    @staticmethod
    def from_buffers(buffers: Sequence[bytes | memoryview]) -> Records:
        """Records of buffers that lie anywhere."""
        arrays: list[NDArray[np.uint8]] = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        address = np.fromiter((array.ctypes.data for array in arrays), np.uint64, len(arrays))
        return Records(address, np.fromiter(map(len, arrays), np.uint64, len(arrays)), arrays)

    @staticmethod
    def from_rows(array: NDArray[np.uint8]) -> Records:
        """Records of the entries of a contiguous array, [k, ...]."""
        size = array[0].nbytes if len(array) else 0
        address = array.ctypes.data + np.arange(len(array), dtype=np.uint64) * np.uint64(size)
        return Records(address, np.full(len(array), size, np.uint64), array)

    def __len__(self) -> int:
        return len(self.address)

    def __getitem__(self, place: int) -> memoryview:
        """One record's bytes, read-only; the view keeps these Records alive."""
        length = int(self.length[place])
        if not length:
            return memoryview(b"")
        array = (ctypes.c_ubyte * length).from_address(int(self.address[place]))
        array.keep = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B").toreadonly()

    def __iter__(self) -> Iterator[memoryview]:
        return (self[place] for place in range(len(self)))
