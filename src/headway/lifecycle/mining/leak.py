"""Leaks: images of one set that are copies, or near copies, of images of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from headway.core.errors import UsageError
from headway.data.dataset import Dataset
from headway.lifecycle.copies.hash_images import hash_sets
from headway.lifecycle.copies.image_hashes import join_hashes
from headway.lifecycle.copies.near_copies import find_near_copies_of


@final
@dataclass(frozen=True, kw_only=True)
class Leak:
    """An image and its copy in a set that was named before.

    Attributes:
        first_set, second_set: places of the two sets in the order in which they were named.
        first, second: numbers of the two images in their sets.
        is_equal: True if their bytes are equal, False for near copies.
    """

    first_set: int
    first: int
    second_set: int
    second: int
    is_equal: bool


@final
@dataclass(frozen=True, kw_only=True)
class LeakReport:
    """The leaks between sets.

    Attributes:
        folders: the sets.
        sizes: images of each set.
        counts: images of each set that have a copy in another one.
        leaks: each image with its copy in the first set that has one, by set and number.
    """

    folders: tuple[str, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    leaks: tuple[Leak, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns sets, counts and leaks."""
        sets = [
            {"set": folder, "images": size, "with_copies_elsewhere": count}
            for folder, size, count in zip(self.folders, self.sizes, self.counts, strict=True)
        ]
        return {"sets": sets, "leaks": [asdict(leak) for leak in self.leaks]}

    def describe(self) -> str:
        """Returns a line for each set, for the terminal."""
        return "\n".join(
            f"{folder}: {count:,} of {size:,} images ({count / size:.2%}) have a copy in another set."
            for folder, size, count in zip(self.folders, self.sizes, self.counts, strict=True)
        )


def find_leaks(sets: Sequence[Dataset], progress: Callable[[int, int], None] = lambda done, total: None) -> LeakReport:
    """Finds images that occur in two sets or more, also resized, compressed again, brighter or darker.

    Args:
        sets: two or more.
        progress: called with (images hashed, images of all sets).

    Raises:
        UsageError: there are fewer than two sets.
    """
    if len(sets) < 2:
        raise UsageError("leaks are between two sets or more", fix="Name another set, for example train and eval.")
    hashes, leaks = hash_sets(sets, progress), list[Leak]()
    has_copy = [np.zeros(len(one), np.bool_) for one in sets]
    for second in range(len(sets)):
        for first in range(len(sets)):
            if first == second:
                continue
            # Both ways: an image may have several copies, of which only one is listed.
            both = join_hashes([hashes[first], hashes[second]])
            found = find_near_copies_of(both, len(sets[first]))
            # Each image is listed once, with its copy in the first set that has one.
            new = (found >= 0) & ~has_copy[second]
            has_copy[second] |= found >= 0
            if first > second:
                continue
            is_equal = (hashes[first].digests[found] == hashes[second].digests).all(axis=1)
            for place in np.flatnonzero(new).tolist():
                leaks.append(
                    Leak(
                        first_set=first,
                        first=int(found[place]),
                        second_set=second,
                        second=place,
                        is_equal=bool(is_equal[place]),
                    )
                )
    leaks.sort(key=lambda leak: (leak.first_set, leak.second_set, leak.first, leak.second))
    return LeakReport(
        folders=tuple(str(one.folder) for one in sets),
        sizes=tuple(map(len, sets)),
        counts=tuple(int(one.sum()) for one in has_copy),
        leaks=tuple(leaks),
    )
