"""Hashes of the samples of a store, which it keeps beside its shards, and the near copies that they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.data.columns import DatasetDescription
from headway.data.columns import Shard as ShardFile
from headway.data.dataset import Dataset
from headway.data.version_columns import SAMPLE_ID
from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.copies.image_hashes import ImageHashes
from headway.lifecycle.copies.near_copies import find_near_copies_of, group_near_copies
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.rows import Ids, Rows
from headway.lifecycle.store.shard_objects import get_object_path


def hash_rows(store: Path, rows: Rows, *, kept_only: bool = False, progress: Progress | None = None) -> ImageHashes:
    """Returns the hashes of samples; those that the store does not have are made and kept.

    Args:
        kept_only: decode nothing: samples without hashes are not `is_good`.
        progress: called with (images decoded, images to decode).
    """
    columns: dict[str, NDArray[np.generic]] = {**rows.places, "shard": rows.shard.astype(np.uint16)}
    columns |= {"label": rows.label, SAMPLE_ID: rows.sample_id}
    description = DatasetDescription(
        pack_id=0,
        fingerprint="",
        format="recordio",
        mode=rows.schema.mode,
        label_kind="class",
        classes=rows.classes,
        class_counts=(),
        channels=3,
        common_size=None,
        shards=tuple(
            ShardFile(name=str(get_object_path(store, shard.digest)), size=shard.size, pack_id=shard.pack_id)
            for shard in rows.shards
        ),
        source="",
    )
    dataset = Dataset(store, columns, description)
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
