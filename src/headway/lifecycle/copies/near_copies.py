"""Near copies: images that show the same picture as one that is kept.

Hashes are compared first, and pairs that differ in few bits again by the correlation of their thumbnails, which
brightness and contrast do not change. Crops, rotations and mirror images are not found. Images of nearly one colour
all look alike, so they are copies only if their bytes are equal.

An image is out only if it is itself a copy of a kept one. A chain, in which each image is like the next one but the
first is unlike the last, so keeps some of its images: the frames of a slow pan do not become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.lifecycle.copies.hash_search import MAX_BITS, HashSearch, Ids, count_bits
from headway.lifecycle.copies.image_hashes import THUMBNAIL_SIZE, ImageHashes, find_equal, view_keys

MIN_CORRELATION = 0.985
"""Least correlation of the thumbnails of near copies. With it 620 of 625 copies of photographs that did not choose it
are found (bench/_lifecycle/near_copies.py); of plain handwritten digits 6 of 100 look like another at 0.98, and 2 at
0.985."""
_BLOCK = 256
"""Images that are compared with the kept ones at once, and then with each other."""
_PAIRS = 1 << 14
"""Pairs of thumbnails that are correlated at once: 40 MB as float32."""
_FEW = 4
"""Pairs of an image that are correlated before all of its pairs: most copies are found among these."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class NearCopies:
    """Which images are copies of which.

    Attributes:
        kept: place of the image that is kept for each image, int64 [n]; its own place if it is kept itself.
        is_equal: True if its stored bytes are those of the kept one, bool [n].
    """

    kept: Ids
    is_equal: NDArray[np.bool_]

    @property
    def is_out(self) -> NDArray[np.bool_]:
        """True for images that are copies of a kept one, bool [n]."""
        return np.asarray(self.kept != np.arange(len(self.kept)))

    @property
    def clusters(self) -> list[list[int]]:
        """Places of each kept image that has copies, and then of its copies."""
        found: dict[int, list[int]] = {}
        for place in np.flatnonzero(self.is_out).tolist():
            kept = int(self.kept[place])
            found.setdefault(kept, [kept]).append(place)
        return [found[kept] for kept in sorted(found)]


def find_near_copies(
    hashes: ImageHashes,
    *,
    known: int = 0,
    by_quality: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NearCopies:
    """Finds the images that are copies of a kept one: of equal bytes, or near copies.

    Args:
        known: number of images at the beginning that are kept, whatever they show: they are labelled already.
        by_quality: of several copies, the one with the most pixels is kept, of these the one with the most bytes, and
            of these the first. False: always the first.
        progress: called with (images compared, images).
    """
    count = len(hashes)
    order = np.arange(count)
    if by_quality:
        order[known:] = known + np.lexsort((-hashes.size_bytes[known:], -hashes.resolution[known:]))
    # The first image of equal bytes stands for all of them, so thousands of equal files take no time.
    _, first, group = np.unique(view_keys(hashes.digests)[order], return_index=True, return_inverse=True)
    leader = np.empty(count, np.int64)
    leader[order] = order[first[group.reshape(-1)]]
    leader[:known] = np.arange(known)
    kept = np.arange(count)
    can_be_near = hashes.is_good & ~hashes.is_flat
    asked = order[can_be_near[order] & (leader[order] == order)]
    _take_near_copies_out(hashes, asked, known, kept, progress)
    # Images of equal bytes are copies of the same kept one.
    kept = kept[leader]
    return NearCopies(kept=kept, is_equal=(hashes.digests == hashes.digests[kept]).all(axis=1))


def find_near_copies_of(hashes: ImageHashes, first: int) -> Ids:
    """Finds for each image the copy of it among the first ones.

    Args:
        first: number of images that are looked through, and that all others are compared with.

    Returns:
        place of an image of equal bytes, else of a near copy, else -1; int64 [n - first].
    """
    found = np.full(len(hashes), -1, np.int64)
    found[first:] = find_equal(hashes.digests[:first], hashes.digests[first:])
    comparable = np.flatnonzero(hashes.is_good & ~hashes.is_flat)
    known = comparable[comparable < first]
    search = HashSearch()
    search.add(hashes.dhash[known])
    asked = comparable[(comparable >= first) & (found[comparable] < 0)]
    for low in range(0, len(asked), _BLOCK):
        block = asked[low : low + _BLOCK]
        match = _match(hashes, search, known, block)
        found[block[match >= 0]] = match[match >= 0]
    return found[first:]


def group_near_copies(hashes: ImageHashes) -> Ids:
    """Groups images that are copies of each other, or of images between them: the frames of a pan are one group.

    Two groups may have a pair of near copies all the same, if each of the two is out for another image.

    Returns:
        place of the first image of the group of each image, int64 [n].
    """
    kept = find_near_copies(hashes, by_quality=False).kept
    is_kept = kept == np.arange(len(hashes))
    comparable = hashes.is_good & ~hashes.is_flat
    centres, out = np.flatnonzero(comparable & is_kept), np.flatnonzero(comparable & ~is_kept)
    search = HashSearch()
    search.add(hashes.dhash[centres])
    parent = np.arange(len(hashes))

    def find_root(place: int) -> int:
        while parent[place] != place:
            place = int(parent[place])
        return place

    for low in range(0, len(out), _BLOCK):
        block = out[low : low + _BLOCK]
        for rows, numbers in search.find(hashes.dhash[block]):
            first, second = block[rows], centres[numbers]
            # An image that is a copy of two kept ones joins them.
            first, second = (side[kept[first] != second] for side in (first, second))
            is_near = correlate_pairs(hashes, first, second) >= MIN_CORRELATION
            for one, other in zip(kept[first[is_near]].tolist(), second[is_near].tolist(), strict=True):
                low_root, high_root = sorted((find_root(one), find_root(other)))
                parent[high_root] = low_root
    return np.array([find_root(place) for place in kept.tolist()], np.int64)


def correlate_pairs(hashes: ImageHashes, first: Ids, second: Ids) -> NDArray[np.float32]:
    """Returns the correlation of the thumbnails of each pair, float32 [p]."""
    flat = hashes.thumbnails.reshape(-1, math.prod(THUMBNAIL_SIZE))
    out = np.empty(len(first), np.float32)
    for low in range(0, len(first), _PAIRS):
        part = slice(low, low + _PAIRS)
        x, y = flat[first[part]].astype(np.float32), flat[second[part]].astype(np.float32)
        x -= x.mean(axis=1, keepdims=True)
        y -= y.mean(axis=1, keepdims=True)
        lengths = np.sqrt(np.einsum("pd,pd->p", x, x) * np.einsum("pd,pd->p", y, y))
        out[part] = np.einsum("pd,pd->p", x, y) / np.maximum(lengths, 1e-12)
    return out


def _take_near_copies_out(
    hashes: ImageHashes, asked: Ids, known: int, kept: Ids, progress: Callable[[int, int], None]
) -> None:
    """Sets `kept` of the near copies among images of different bytes, which come in the order of preference."""
    search = HashSearch()
    # Places of the words in the search.
    centres = asked[asked < known]
    search.add(hashes.dhash[centres])
    low = len(centres)
    while low < len(asked):
        block = asked[low : low + _BLOCK]
        low += len(block)
        match = _match(hashes, search, centres, block)
        kept[block[match >= 0]] = match[match >= 0]
        block = block[match < 0]
        block = block[_match_each_other(hashes, block, kept)]
        search.add(hashes.dhash[block])
        centres = np.concatenate([centres, block])
        progress(low, len(asked))


def _match(hashes: ImageHashes, search: HashSearch, centres: Ids, block: Ids) -> Ids:
    """Returns for each image of a block the place of a centre that it is a near copy of, or -1."""
    match, is_open = np.full(len(block), -1, np.int64), np.ones(len(block), np.bool_)
    for rows, numbers in search.find(hashes.dhash[block], is_open):
        rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
        for chosen in (rank < _FEW, rank >= _FEW):
            some_rows, some_numbers = rows[chosen & is_open[rows]], numbers[chosen & is_open[rows]]
            while len(some_rows):
                asked, centre = some_rows[:_PAIRS], centres[some_numbers[:_PAIRS]]
                is_near = correlate_pairs(hashes, block[asked], centre) >= MIN_CORRELATION
                # Backwards, so that the first of several stays.
                match[asked[is_near][::-1]] = centre[is_near][::-1]
                is_open[asked[is_near]] = False
                some_rows, some_numbers = some_rows[_PAIRS:], some_numbers[_PAIRS:]
                some_rows, some_numbers = some_rows[is_open[some_rows]], some_numbers[is_open[some_rows]]
    return match


def _match_each_other(hashes: ImageHashes, block: Ids, kept: Ids) -> NDArray[np.bool_]:
    """Sets `kept` of images that are near copies of earlier ones of the block that stay. Returns which stay."""
    stays = np.ones(len(block), np.bool_)
    bits = count_bits(hashes.dhash[block][:, None] ^ hashes.dhash[block][None, :])
    later, earlier = np.nonzero(np.tril(bits <= MAX_BITS, -1))
    is_near = correlate_pairs(hashes, block[later], block[earlier]) >= MIN_CORRELATION
    # Sorted by the later image, so whether the earlier one stays is known.
    for row, before in zip(later[is_near].tolist(), earlier[is_near].tolist(), strict=True):
        if stays[row] and stays[before]:
            stays[row] = False
            kept[block[row]] = block[before]
    return stays
