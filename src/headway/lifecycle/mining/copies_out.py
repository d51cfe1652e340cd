"""Takes near copies out of a pool before anything is chosen from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.sample_progress import SampleProgress
from headway.data.dataset import Dataset
from headway.lifecycle.copies.hash_images import hash_sets
from headway.lifecycle.copies.image_hashes import join_hashes
from headway.lifecycle.copies.near_copies import find_near_copies
from headway.lifecycle.mining.known_sets import HELD_OUT, LABELLED, get_role

LOG = logging.getLogger("headway.lifecycle")


@final
@dataclass(frozen=True, kw_only=True)
class CopyCluster:
    """Images that show the same picture.

    Attributes:
        kept: the image that stands for all, as (set, sample).
        out: images of the pool that are not chosen because of it.
    """

    kept: tuple[str, int]
    out: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)
class CopiesOut:
    """Near copies of a pool.

    Attributes:
        is_out: True for images of the pool that are not chosen, bool [n].
        clusters: clusters with such an image. Sets are called `pool`, `labelled`, `labelled 2`, ... and `held-out`.
    """

    is_out: NDArray[np.bool_]
    clusters: tuple[CopyCluster, ...]

    def count_by_set(self) -> dict[str, int]:
        """Returns the number of images that are out because of a labelled image, a held-out one, or one of the pool."""
        counts = {LABELLED: 0, HELD_OUT: 0, "pool": 0}
        for cluster in self.clusters:
            counts[get_role(cluster.kept[0])] += len(cluster.out)
        return counts

    def to_json(self) -> dict[str, Any]:
        """Returns counts and clusters; images of the pool by their number."""
        clusters = [{"kept": list(one.kept), "out": list(one.out)} for one in self.clusters]
        return {"out": int(self.is_out.sum()), "because_of": self.count_by_set(), "clusters": clusters}


def take_copies_out(pool: Dataset, known: Sequence[tuple[str, Dataset]]) -> CopiesOut:
    """Finds the images of a pool that give nothing new.

    An image is out if it is a copy of a labelled or held-out one; of several copies in the pool, all but the best
    resolved one are out.

    Args:
        known: the other sets by name, in the order in which they are preferred.
    """
    sets = [*known, ("pool", pool)]
    with SampleProgress("Hashing", "images", LOG) as progress:
        hashes = join_hashes(hash_sets([dataset for _, dataset in sets], progress))
    ends = np.cumsum([0, *(len(dataset) for _, dataset in sets)])
    first = int(ends[-2])
    with SampleProgress("Comparing", "images", LOG) as progress:
        kept = find_near_copies(hashes, known=first, progress=progress).kept[first:]
    is_out, out = kept != first + np.arange(len(pool)), dict[int, list[int]]()
    for sample in np.flatnonzero(is_out).tolist():
        out.setdefault(int(kept[sample]), []).append(sample)
    clusters = []
    for place in sorted(out):
        owner = int(np.searchsorted(ends, place, side="right")) - 1
        clusters.append(CopyCluster(kept=(sets[owner][0], place - int(ends[owner])), out=tuple(out[place])))
    # An image that cannot be decoded is not a candidate either; the outputs of the networks leave it out.
    return CopiesOut(is_out=is_out, clusters=tuple(clusters))
