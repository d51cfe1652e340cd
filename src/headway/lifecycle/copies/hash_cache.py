"""Hashes that a store keeps beside each shard, so that no image is decoded twice.

    objects/sha256/ab/abcd....rec       the shard
    objects/sha256/ab/abcd....hashes    thumbnails of its samples, by their IDs

A file of hashes can be deleted at any time. It may have fewer samples than the shard: those that nobody has asked for
are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from headway.core.files import read_regular, write_atomically
from headway.data.dataset import Dataset
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.version_columns import SAMPLE_ID
from headway.lifecycle.copies.image_hashes import THUMBNAIL_SIZE, find_equal, view_keys

EXTENSION = ".hashes"
_FORMAT = "1"
"""Changed when hashes are made in another way, so that old ones are not compared with new ones."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class KeptHashes:
    """Hashes of n images, as far as they are known.

    Attributes:
        is_there: the image was decoded once, bool [n].
        dhash, thumbnails, is_good, is_flat: see `ImageHashes`.
    """

    is_there: NDArray[np.bool_]
    dhash: NDArray[np.uint64]
    thumbnails: NDArray[np.uint8]
    is_good: NDArray[np.bool_]
    is_flat: NDArray[np.bool_]

    @staticmethod
    def build_empty(count: int) -> KeptHashes:
        """Returns no known hash."""
        return KeptHashes(
            is_there=np.zeros(count, np.bool_),
            dhash=np.zeros(count, np.uint64),
            thumbnails=np.zeros((count, *THUMBNAIL_SIZE), np.uint8),
            is_good=np.zeros(count, np.bool_),
            is_flat=np.zeros(count, np.bool_),
        )


def find_hashes_file(shard: Path) -> Path:
    """Returns the path of the hashes of a shard."""
    return shard.with_suffix(EXTENSION)


def read_kept_hashes(dataset: Dataset) -> KeptHashes:
    """Reads the hashes that the store of a version has."""
    found = KeptHashes.build_empty(len(dataset))
    for shard, rows in _list_shards(dataset):
        _fill(found, rows, dataset.columns[SAMPLE_ID][rows], find_hashes_file(shard))
    return found


def write_kept_hashes(dataset: Dataset, hashes: KeptHashes, new: NDArray[np.int64]) -> None:
    """Keeps the hashes of new samples in the store of a version, if it can be written.

    Args:
        hashes: of all samples.
        new: samples whose hashes the store does not have.
    """
    ids = dataset.columns[SAMPLE_ID]
    is_new = np.zeros(len(dataset), np.bool_)
    is_new[new] = True
    for shard, rows in _list_shards(dataset):
        if is_new[rows].any():
            known = _read(find_hashes_file(shard))
            _write(shard, [*known, _choose(ids, hashes, rows)])


def copy_kept_hashes(shards: Iterable[Path], target: Path, ids: NDArray[np.uint8]) -> None:
    """Keeps the hashes of samples of several shards beside a new shard, which has them too.

    Args:
        ids: IDs of the samples of the new shard, uint8 [n, 32].
    """
    found = KeptHashes.build_empty(len(ids))
    for shard in shards:
        _fill(found, np.arange(len(ids)), ids, find_hashes_file(shard))
    if found.is_there.any():
        _write(target, [_choose(ids, found, np.flatnonzero(found.is_there))])


_FIELDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "sample_id": ("uint8", (32,)),
    "dhash": ("uint64", ()),
    "thumbnails": ("uint8", THUMBNAIL_SIZE),
    "is_good": ("bool", ()),
    "is_flat": ("bool", ()),
}
"""Tensors of a file: type, and shape of the entry of one sample. Sorted by ID."""
_HASHES = tuple(_FIELDS)[1:]


def _choose(ids: NDArray[np.uint8], hashes: KeptHashes, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    return {"sample_id": ids[rows], **{name: getattr(hashes, name)[rows] for name in _HASHES}}


def _fill(found: KeptHashes, rows: NDArray[np.int64], wanted: NDArray[np.uint8], file: Path) -> None:
    """Sets the hashes of some rows, which have these IDs, from a file."""
    for tensors in _read(file):
        places = find_equal(tensors["sample_id"], wanted)
        there, places = rows[places >= 0], places[places >= 0]
        found.is_there[there] = True
        for name in _HASHES:
            getattr(found, name)[there] = tensors[name][places]


def _read(path: Path) -> list[dict[str, NDArray[Any]]]:
    """Reads a file of hashes; an empty list if there is none, or none that can be used."""
    try:
        tensors = load(read_regular(path))
    except (OSError, SafetensorError):
        return []
    if set(tensors) != {f"{name}.{_FORMAT}" for name in _FIELDS}:
        return []
    found = {name: tensors[f"{name}.{_FORMAT}"] for name in _FIELDS}
    count = len(found["dhash"])
    is_whole = all(
        found[name].shape == (count, *shape) and found[name].dtype == kind for name, (kind, shape) in _FIELDS.items()
    )
    return [found] if is_whole else []


def _write(shard: Path, parts: Sequence[dict[str, NDArray[Any]]]) -> None:
    """Writes the file of a shard: each ID once, sorted."""
    joined = {name: np.concatenate([part[name] for part in parts]) for name in _FIELDS}
    _, order = np.unique(view_keys(joined["sample_id"]), return_index=True)
    # A store that can only be read gives its images all the same; they are decoded again the next time.
    with contextlib.suppress(OSError):
        data = save({f"{name}.{_FORMAT}": joined[name][order] for name in _FIELDS})
        write_atomically(find_hashes_file(shard), data)


def _list_shards(dataset: Dataset) -> list[tuple[Path, NDArray[np.int64]]]:
    """Returns the path of each shard, and its samples."""
    order = np.argsort(dataset.shard, kind="stable")
    # The hashes of shards at an address are on this machine all the same.
    home = dataset.source.home if isinstance(dataset.source, RemoteShards) else None
    names = [(home or dataset.folder) / shard.name for shard in dataset.description.shards]
    ends = np.searchsorted(dataset.shard[order], np.arange(len(names) + 1))
    return [(name, order[ends[number] : ends[number + 1]]) for number, name in enumerate(names)]
