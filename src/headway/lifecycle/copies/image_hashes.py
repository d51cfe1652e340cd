"""Hashes of images: SHA-256 of the stored bytes for equal files, and dHash with a thumbnail for near copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import final

import numpy as np
from numpy.typing import NDArray

THUMBNAIL_SIZE = (16, 18)
"""Height and width of a thumbnail: two pixels each way for each pixel of the image that dHash compares."""
MIN_CONTRAST = 2.0
"""Least standard deviation of a thumbnail, in levels, below which an image is flat."""


@final
@dataclass(frozen=True, kw_only=True)
class ImageHashes:
    """Hashes of n images.

    Attributes:
        digests: SHA-256 of the stored bytes, uint8 [n, 32].
        dhash: bits of the difference hash, uint64 [n].
        thumbnails: gray pixels, uint8 [n, 16, 18].
        is_good: False for images that cannot be decoded, bool [n].
        is_flat: True for images of nearly one colour, which all look alike, bool [n].
        resolution: pixels of the whole image, int64 [n].
        size_bytes: length of the stored bytes, int64 [n].
    """

    digests: NDArray[np.uint8]
    dhash: NDArray[np.uint64]
    thumbnails: NDArray[np.uint8]
    is_good: NDArray[np.bool_]
    is_flat: NDArray[np.bool_]
    resolution: NDArray[np.int64]
    size_bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dhash)

    def take(self, rows: NDArray[np.int64]) -> ImageHashes:
        """Returns the hashes of these images."""
        return ImageHashes(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


def view_keys(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Returns digests, uint8 [n, 32], as one value each, which numpy can sort and search; [n]."""
    # numpy ignores zeros at the end of these, and all have the same length, so equal keys are equal digests.
    return np.ascontiguousarray(digests).view("S32").reshape(-1)


def find_equal(known: NDArray[np.uint8], digests: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the place of the first equal digest among the known ones, or -1; int64 [n]."""
    if not len(known):
        return np.full(len(digests), -1, np.int64)
    keys, wanted = view_keys(known), view_keys(digests)
    # The first of equal ones is found, since the sort is stable.
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[places] == wanted, places, -1).astype(np.int64)


def join_hashes(parts: Sequence[ImageHashes]) -> ImageHashes:
    """Returns the hashes of several sets as one, in their order."""
    names = [one.name for one in fields(ImageHashes)]
    return ImageHashes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def compute_dhash(thumbnails: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Computes the 64-bit difference hash: a bit is set where brightness rises from one pixel to the next.

    Args:
        thumbnails: gray pixels, uint8 [n, 16, 18]. Means of 2 x 2 pixels give the 8 x 9 that are compared.

    Returns:
        uint64 [n]; equal for all brightness and contrast that does not clip.
    """
    count = len(thumbnails)
    # Sums of four pixels in 16 bits: exact, and as good as means for a comparison.
    cells = thumbnails.reshape(count, 8, 2, 9, 2).sum(axis=(2, 4), dtype=np.uint16)
    rises = cells[:, :, 1:] > cells[:, :, :-1]
    return np.packbits(rises.reshape(count, 64), axis=1).view(">u8").astype(np.uint64).reshape(count)


def find_flat(thumbnails: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns True for thumbnails of nearly one colour, bool [n]."""
    pixels = thumbnails.reshape(-1, math.prod(THUMBNAIL_SIZE))
    # Variance from sums in whole numbers: no copy of the thumbnails as floats.
    sums, squares = pixels.sum(axis=1, dtype=np.int64), np.einsum("nd,nd->n", pixels, pixels, dtype=np.int64)
    variance = squares / pixels.shape[1] - (sums / pixels.shape[1]) ** 2
    return np.asarray(variance < MIN_CONTRAST**2)
