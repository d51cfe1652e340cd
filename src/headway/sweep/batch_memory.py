"""Batches in memory that processes share: arrays one after another, then a JSON text that says what lies where.

Nothing is pickled. The memory has no name: it is freed when the last process that maps it has ended, however it ended.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.batch import BadSample, Batch

ALIGNMENT = 64
"""Bytes at whose multiples arrays begin: a line of the cache."""
TENSORS = ("images", "labels")
ARRAYS = ("positions", "epochs", "samples", "served", "boxes", "flips", "vertical_flips", "shifts")


@final
class PackedBatch:
    """A batch as it lies in a `BatchMemory`.

    Attributes:
        parts: (offset, bytes) of all that is written.
        text: (offset, length) of the description.
        size: bytes of all parts.
    """

    def __init__(self, batch: Batch) -> None:
        arrays: dict[str, NDArray[Any]] = {name: getattr(batch, name).numpy() for name in TENSORS}
        arrays |= {name: array for name in ARRAYS if (array := getattr(batch, name)) is not None}
        fields, end = dict[str, Any](), 0
        self.parts: list[tuple[int, NDArray[np.uint8]]] = []
        for name, array in arrays.items():
            fields[name] = [array.dtype.str, list(array.shape), end]
            self.parts.append((end, np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
            end = _align(end + array.nbytes)
        bad = [[int(one.position), int(one.asked), int(one.served), one.reason] for one in batch.bad]
        text = json.dumps({"arrays": fields, "seed": int(batch.seed), "bad": bad}).encode()
        self.parts.append((end, np.frombuffer(text, np.uint8)))
        self.text, self.size = (end, len(text)), end + len(text)


@final
class BatchMemory:
    """Memory for one batch. The descriptor can be sent to another process, which opens it with `size`.

    Args:
        descriptor: of memory that another process has made; None makes new memory. It is closed here.

    Attributes:
        size: bytes.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        if descriptor is None:
            descriptor = os.memfd_create("headway-batch", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def descriptor(self) -> int:
        """The descriptor, until `close`."""
        return self._descriptor

    def close(self) -> None:
        """Closes the descriptor. The memory stays as long as an array in it is in use."""
        os.close(self._descriptor)

    def write(self, batch: PackedBatch) -> None:
        """Writes a batch of at most `size` bytes."""
        for offset, part in batch.parts:
            self.bytes[offset : offset + part.nbytes] = part

    def read(self, offset: int, length: int) -> Batch:
        """Returns the batch whose `text` lies at an offset. Its images lie in this memory; all else is copied."""
        text = json.loads(self.bytes[offset : offset + length].tobytes())
        arrays = {name: self._get_array(*field) for name, field in text["arrays"].items()}
        rest = {name: array.copy() for name, array in arrays.items() if name != "images"}
        return Batch(
            images=torch.from_numpy(arrays["images"]),
            labels=torch.from_numpy(rest.pop("labels")),
            seed=text["seed"],
            bad=tuple(BadSample(*one) for one in text["bad"]),
            **rest,
        )

    def _get_array(self, dtype: str, shape: list[int], offset: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        end = offset + kind.itemsize * int(np.prod(shape))
        return self.bytes[offset:end].view(kind).reshape(shape)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
