"""Batch: what a Loader gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.keys import UInt64, keys


@final
@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be served: what was asked at a position, what came instead (-1: nothing), and why."""

    position: int
    asked: int
    served: int
    reason: str


@final
@dataclass(slots=True, kw_only=True, repr=False)  # frozen would take 2 us more to make
class Batch:
    """One rank's share of one step. Unpacks as `images, labels`.

    `images` (uint8 [b, H, W, C]) is a slot of the ring on a CPU: it is valid until the next batch is asked for.
    """

    images: torch.Tensor
    labels: torch.Tensor
    """int64 [b], or float32 [b] or [b, k]."""
    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    """What the Order asked for; random choices come from these."""
    served: NDArray[np.int64]
    """What was served: another sample where the asked one is damaged; -1 where it is masked."""
    seed: int
    boxes: NDArray[np.float32] | None = None
    """What of each image was resized to the batch's size: (left, top, width, height), [b, 4]; None: all of it."""
    flips: NDArray[np.bool_] | None = None
    """Which were mirrored by the loader, [b]."""
    shifts: NDArray[np.int64] | None = None
    """How far each was moved by the loader: (down, right) in pixels, [b, 2]."""
    bad: tuple[BadSample, ...] = field(default=())

    def keys(self, view: int = 0) -> UInt64:
        """Keys of the samples, uint64 [b]."""
        return keys(self.seed, self.epochs, self.samples, view)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape))
        return f"Batch of {shape} from position {self.positions[0] if len(self.positions) else 0}"

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.images, self.labels))
