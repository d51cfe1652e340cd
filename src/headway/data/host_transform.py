"""HostTransform: what the loader's host threads do with each image, from stored pixels to those of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, make_keys
from headway.data.augment_recipe import FlipMode
from headway.data.crops import compute_center_boxes, draw_flip_masks, draw_random_resized_boxes, draw_shifts
from headway.data.data_recipe import CropRecipe
from headway.data.resolution import ProgressiveRecipe, compute_progressive_size

Size = tuple[int, int]


@final
@dataclass(slots=True)
class HostDraws:
    """Random parameters of k samples; None if the transform does not use them.

    Attributes:
        keys: uint64 [k]; empty if nothing is random.
        flips: bool [k], images to mirror left to right.
        shifts: int64 [k, 2], (down, right) in pixels.
        vertical_flips: bool [k], images to mirror top to bottom.
    """

    keys: UInt64
    flips: NDArray[np.bool_] | None
    shifts: NDArray[np.int64] | None
    vertical_flips: NDArray[np.bool_] | None

    def select(self, low: int, high: int) -> HostDraws:
        """Returns the parameters of entries [low, high)."""
        # Views: slices of a batch cost no copy.
        rows = slice(low, high)
        arrays = (self.keys, self.flips, self.shifts, self.vertical_flips)
        return HostDraws(*(None if array is None else array[rows] for array in arrays))  # type: ignore[arg-type]


@final
@dataclass(frozen=True, kw_only=True)
class HostTransform:
    """Crop, resize, flip and shift of each image on the host.

    Attributes:
        size: (height, width) at the end of training.
        channels: 1 or 3.
        crop: box of the image that is resized.
        flip, translate: as in `AugmentRecipe`; applied while decoding.
        progressive: smaller sizes in earlier epochs.
        scaled: decode a large JPEG at 1/2, 1/4 or 1/8; see `DecodeRequest`.

    Raises:
        UsageError: `translate` is no less than the side of the smallest image.
    """

    size: Size
    channels: int
    crop: CropRecipe
    flip: FlipMode | None = None
    translate: int = 0
    progressive: ProgressiveRecipe | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        # Progressive resolution begins with the smallest size.
        smallest = min(self.compute_size(0))
        if self.translate >= smallest:
            what = f"images of {smallest} pixels cannot be moved by {self.translate}"
            raise UsageError(what, where="augment.translate", fix=f"Set it to at most {smallest - 1}.")

    @property
    def takes_whole_images(self) -> bool:
        """True if an image of the batch's size needs no crop and no resize."""
        return not self.crop.is_random and self.crop.share == 1 and self.progressive is None

    @property
    def needs_keys(self) -> bool:
        """True if random parameters are drawn from the samples' keys."""
        return self.crop.is_random or self.flip is not None or self.translate > 0

    def compute_size(self, epoch: int) -> Size:
        """Returns (height, width) of the images of an epoch."""
        return self.size if self.progressive is None else compute_progressive_size(self.progressive, self.size, epoch)

    def compute_boxes(
        self, sample_keys: UInt64, width: NDArray[np.uint32], height: NDArray[np.uint32], size: Size
    ) -> NDArray[np.float32]:
        """Returns the box of each image that is resized to `size`, (left, top, width, height); float32 [k, 4]."""
        crop = self.crop
        if crop.is_random:
            return draw_random_resized_boxes(sample_keys, width, height, scale=crop.scale, ratio=crop.ratio)
        # `share` shrinks the centred box around its own centre.
        boxes = compute_center_boxes(width, height, size)
        if crop.share < 1:
            boxes[:, :2] += boxes[:, 2:] * np.float32((1 - crop.share) / 2)
            boxes[:, 2:] *= np.float32(crop.share)
        return boxes

    def draw(self, seed: int, epochs: NDArray[np.int64], samples: NDArray[np.int64]) -> HostDraws:
        """Draws the random parameters of samples, each from the key of (seed, epoch, sample)."""
        # Evaluation has no random parameters, so it needs no keys.
        if not self.needs_keys:
            return HostDraws(np.empty(0, np.uint64), None, None, None)
        keys = make_keys(seed, epochs, samples)
        flips = vertical_flips = None
        if self.flip:
            # An alternating flip needs one choice per sample that stays the same: that of epoch 0.
            first_epoch_keys = make_keys(seed, 0, samples) if self.flip == "alternating" else None
            flips, vertical_flips = draw_flip_masks(self.flip, keys, epochs, first_epoch_keys)
        return HostDraws(keys, flips, draw_shifts(keys, self.translate) if self.translate else None, vertical_flips)
