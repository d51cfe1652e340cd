"""Images of a data set whose stored bytes other data sets have too. No image is decoded, and few are read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.version_columns import SAMPLE_ID, has_sample_ids

BATCH = 256
"""Records that are read at once."""


def find_equal_records(dataset: Dataset, others: Sequence[Dataset]) -> NDArray[np.bool_]:
    """Returns True for each sample whose stored bytes are those of a sample of another set, bool [n]."""
    found, keys = np.zeros(len(dataset), np.bool_), _build_keys(dataset)
    for other in others:
        if other.fingerprint == dataset.fingerprint:
            return np.ones(len(dataset), np.bool_)
        # Length and checksum are in the columns: only records with an equal pair are read, and hashed.
        other_keys = _build_keys(other)
        theirs = set(_hash_records(other, np.flatnonzero(np.isin(other_keys, keys))))
        own = np.flatnonzero(np.isin(keys, other_keys) & ~found)
        found[own] = [digest in theirs for digest in _hash_records(dataset, own)]
    return found


def _build_keys(dataset: Dataset) -> NDArray[np.uint64]:
    return dataset.length.astype(np.uint64) << np.uint64(32) | dataset.crc32c.astype(np.uint64)


def _hash_records(dataset: Dataset, samples: NDArray[Any]) -> list[bytes]:
    """Returns the SHA-256 of the stored bytes of each sample."""
    # A version of a store knows them.
    if has_sample_ids(dataset.columns):
        return [row.tobytes() for row in dataset.columns[SAMPLE_ID][samples]]
    digests = list[bytes]()
    for low in range(0, len(samples), BATCH):
        digests += [hashlib.sha256(record).digest() for record in dataset.read(samples[low : low + BATCH])]
    return digests
