"""Joins small shards into large ones, so that many small additions do not make thousands of files to open.

The bytes of a sample, and so its ID and that of the version, stay the same; only their place changes. Older versions
keep the small shards.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.data.columns import FLAG_SPLIT
from headway.data.formats.recordio import RecordioWriter
from headway.lifecycle.copies.hash_cache import copy_kept_hashes
from headway.lifecycle.store.ingest import SHARD_BYTES
from headway.lifecycle.store.objects import get_object_path
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.rows import Ids, Rows, ShardObject
from headway.lifecycle.store.shard_objects import hash_file
from headway.lifecycle.store.stored_rows import read_images

SMALL_BYTES = 16 << 20
"""Shards below this size are joined: opening one takes about as long as reading 100 kB."""
MOST_SMALL_SHARDS = 64
"""Number of small shards that a version may have: each of their bytes is copied once for that many additions."""


def compact_rows(store: Path, staging: Path, rows: Rows) -> Rows:
    """Returns the same samples with few small shards, and writes the shards that this needs.

    Raises:
        DataError: a shard is damaged.
        OSError: the store cannot be written.
    """
    small = [number for number, shard in enumerate(rows.shards) if shard.size < SMALL_BYTES]
    if len(small) <= MOST_SMALL_SHARDS:
        return rows
    moving = np.flatnonzero(np.isin(rows.shard, small))
    length = rows.places["length"][moving].astype(np.int64)
    # Shards of about SHARD_BYTES: the small ones together may be larger than that.
    groups = np.cumsum(length) // SHARD_BYTES
    for group in np.unique(groups).tolist():
        rows = _join(store, staging / f"joined-{group}.rec", rows, moving[groups == group])
    return rows.settle()


def _join(store: Path, path: Path, rows: Rows, moving: Ids) -> Rows:
    """Writes these samples into one shard."""
    pack_id = int.from_bytes(hashlib.sha256(rows.sample_id[moving].tobytes()).digest()[:8])
    writer = RecordioWriter(path, path.with_suffix(".idx"), pack_id)
    places = {name: rows.places[name].copy() for name in ("offset", "flags")}
    try:
        # A damaged record must not be copied: its new shard would look sound.
        for index, (row, image) in enumerate(read_images(store, rows, moving)):
            place = writer.append(image, 0.0, index)
            places["offset"][row] = place.offset
            places["flags"][row] = int(places["flags"][row]) & ~FLAG_SPLIT | FLAG_SPLIT * place.split
        writer.close()
    finally:
        writer.abandon()
    digest = hash_file(path)
    open_objects(store).keep(path, digest)
    old = [get_object_path(store, rows.shards[number].digest) for number in np.unique(rows.shard[moving]).tolist()]
    copy_kept_hashes(old, get_object_path(store, digest), rows.sample_id[moving])
    shard = rows.shard.copy()
    shard[moving] = len(rows.shards)
    joined = ShardObject(digest, writer.size_bytes, pack_id)
    return replace(rows, shards=(*rows.shards, joined), shard=shard, places={**rows.places, **places})
