"""Opens samples of a store as a data set, wherever its shards lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import DatasetDescription
from headway.data.columns import Shard as ShardFile
from headway.data.dataset import Dataset
from headway.data.shards import RecordReader
from headway.data.store_objects import EXTENSION, find_remote_objects
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.version_columns import SAMPLE_ID
from headway.lifecycle.store.objects import get_object_path
from headway.lifecycle.store.rows import Ids, Rows
from headway.storage.remote_folder import RemoteFolder

_CHUNK = 64


def read_images(store: Path, rows: Rows, numbers: Ids) -> Iterator[tuple[int, bytes]]:
    """Yields (row, stored bytes) of samples, in their order.

    Raises DataError if bytes cannot be read, or are not those of the sample's ID; and as `open_rows`.
    """
    chosen = rows.take(numbers)
    with closing(open_rows(store, chosen)) as dataset:
        for first in range(0, len(chosen), _CHUNK):
            samples = range(first, min(first + _CHUNK, len(chosen)))
            for sample, record in zip(samples, dataset.read(samples), strict=True):
                data = bytes(record)
                if hashlib.sha256(data).digest() != chosen.sample_id[sample].tobytes():
                    what = "the stored bytes are not those of the sample's ID"
                    fix = "headway dataset verify lists what is damaged."
                    raise DataError(what, where=chosen.names[sample], fix=fix)
                yield int(numbers[sample]), data


def open_rows(store: Path, rows: Rows, staging: Path | None = None) -> Dataset:
    """Returns samples of a store as a data set; its `read` gives their stored bytes. Close it after use.

    Args:
        staging: folder in which shards may lie that were just brought to an address, so that they are not fetched.

    Raises:
        UsageError: no installed package reads the address of the shards.
        DataError: the address cannot be read.
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
    if (objects := find_remote_objects(store, description.shards)) is None:
        return Dataset(store, columns, description)
    staged = {} if staging is None else {path.name: str(path) for path in staging.rglob(f"*{EXTENSION}")}
    source: RecordReader
    if all(Path(shard.name).name in staged for shard in description.shards):
        here = tuple(replace(shard, name=staged[Path(shard.name).name]) for shard in description.shards)
        source = Dataset(store, columns, replace(description, shards=here)).source
    else:
        there = replace(description, shards=objects.shards)
        source = RemoteShards(RemoteFolder(objects.address), columns, there, objects.home)
    # With the names in the store: what is known of shards, such as hashes, lies there.
    return Dataset(store, columns, description, source=source)
