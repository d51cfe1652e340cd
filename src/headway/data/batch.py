"""Batch: one rank's share of one step, as a Loader gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.random_keys import UInt64, make_keys


@final
@dataclass(frozen=True, slots=True)
class BadSample:
    """A damaged sample: its position, the requested (`asked`) and the served sample (-1: masked), and the reason."""

    position: int
    asked: int
    served: int
    reason: str


# Not frozen: that would take 2 us more for each batch.
@final
@dataclass(slots=True, kw_only=True, repr=False)
class Batch:
    """One rank's share of one step. Unpacks as `images, labels`.

    On a CPU, `images` (uint8 [b, H, W, C]) is a slot of the ring: it is valid until you ask for the next batch.
    """

    images: torch.Tensor
    """uint8 [b, H, W, C]; with a `transform` of your own, what it returned, stacked."""
    labels: torch.Tensor
    """int64 [b], or float32 [b] or [b, k]."""
    positions: NDArray[np.int64]
    """Positions in the run, [b]."""
    epochs: NDArray[np.int64]
    """Epoch of each position, [b]."""
    samples: NDArray[np.int64]
    """Samples that the Order requested, [b]; random parameters come from these."""
    served: NDArray[np.int64]
    """Samples that were served, [b]: a substitute if the requested one is damaged, -1 if it is masked."""
    seed: int
    """Seed of the run."""
    boxes: NDArray[np.float32] | None = None
    """Part of each image that was resized to the batch's size: (left, top, width, height), [b, 4]; None: the whole."""
    flips: NDArray[np.bool_] | None = None
    """Images that the loader mirrored left to right, [b]."""
    vertical_flips: NDArray[np.bool_] | None = None
    """Images that the loader mirrored top to bottom, [b]."""
    shifts: NDArray[np.int64] | None = None
    """Pixels by which the loader moved each image: (down, right), [b, 2]."""
    bad: tuple[BadSample, ...] = field(default=())
    """Damaged samples of the batch."""

    def keys(self, view: int = 0) -> UInt64:
        """Returns the random keys of the samples, uint64 [b]; each `view` has independent ones."""
        # A substitute is augmented as the sample that it replaces.
        return make_keys(self.seed, self.epochs, self.samples, view)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape))
        return f"Batch of {shape} from position {self.positions[0] if len(self.positions) else 0}"

    def __iter__(self) -> Iterator[torch.Tensor]:
        # What most training loops need: `for images, labels in loader`.
        return iter((self.images, self.labels))
