"""Hashes of the samples of a store, which it keeps beside its shards, and the near copies that they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.copies.image_hashes import ImageHashes
from headway.lifecycle.copies.near_copies import find_near_copies_of, group_near_copies
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.rows import Ids, Rows
from headway.lifecycle.store.stored_rows import open_rows


def hash_rows(
    store: Path,
    rows: Rows,
    *,
    staging: Path | None = None,
    kept_only: bool = False,
    progress: Progress | None = None,
) -> ImageHashes:
    """Returns the hashes of samples; those that the store does not have are made and kept.

    Args:
        staging: see `open_rows`.
        kept_only: decode nothing: samples without hashes are not `is_good`.
        progress: called with (images decoded, images to decode).
    """
    dataset = open_rows(store, rows, staging)
    try:
        return hash_images(dataset, kept_only=kept_only, progress=progress or (lambda done, total: None))
    finally:
        dataset.close()


def find_copies(store: Path, rows: Rows, known: Ids, new: Ids) -> tuple[Ids, Ids]:
    """Finds near copies of new samples, by the hashes that the store has.

    Args:
        known: rows that were there before.
        new: rows in their order.

    Returns:
        row of a known sample that each new one is a near copy of, or -1; and the row of the first new sample of the
        group of each: those that are near copies of each other. Both int64 [k].
    """
    hashes = hash_rows(store, rows.take(np.concatenate([known, new]).astype(np.int64)), kept_only=True)
    found = find_near_copies_of(hashes, len(known))
    group = group_near_copies(hashes.take(np.arange(len(known), len(hashes))))
    return np.where(found >= 0, known[found] if len(known) else -1, -1), new[group]
