"""Warnings about data sets that can be trained on, and probably should not be: each is a sentence for the user."""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import LabelKind
from headway.data.dataset import Dataset

_MAX_SHOWN = 3
_MAX_COMPARED = 64
"""Pairs of images with equal checksum and length whose bytes are compared. In sets of millions of images of one length,
chance alone gives pairs of equal 32-bit checksums; bytes tell them from copies."""

NO_EVALUATION = "There is no evaluation set, so nothing shows how well the network does on images that it has not seen."


def describe_large_batch(batch: int, samples: int) -> str:
    """Returns a warning about a batch with more samples than the data set."""
    return f"The batch of {batch} is larger than the data set of {samples}: each step spans epochs."


def list_class_warnings(kind: LabelKind, classes: Sequence[str]) -> list[str]:
    """Returns warnings about the names of classes: a single class, and names that are nearly equal."""
    if kind == "class" and len(classes) == 1:
        return [
            f"All images are of one class ({classes[0]}), so there is nothing to tell apart. Is the folder that you "
            "named one level too high or too low?"
        ]
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault(_simplify(name), []).append(name)
    similar = [names for names in groups.values() if len(names) > 1]
    if kind == "value" or not similar:
        return []
    shown = "; ".join(" and ".join(map(_show, names)) for names in similar[:_MAX_SHOWN])
    more = f"; and {len(similar) - _MAX_SHOWN:,} more" if len(similar) > _MAX_SHOWN else ""
    return [
        "Some class names differ only in capitals, spaces or Unicode encoding, and count as several classes: "
        f"{shown}{more}. If they are one class, give them one name."
    ]


def describe_shared_images(train: Dataset, evaluation: Dataset) -> str:
    """Returns a warning if images of the training set are in the evaluation set too, by their bytes; else empty."""
    # The fingerprint covers names, labels and checksums: a copy or a link has that of the original.
    if train.fingerprint == evaluation.fingerprint:
        return (
            f"The evaluation set is the training set ({train.folder}), so its accuracy says nothing about new images. "
            "Hold some images out: headway pack SRC DST --split 0.1"
        )
    train_keys, evaluation_keys = _compute_keys(train), _compute_keys(evaluation)
    shared = np.flatnonzero(np.isin(evaluation_keys, train_keys))
    if not len(shared):
        return ""
    order = np.argsort(train_keys, kind="stable")
    copies = order[np.searchsorted(train_keys, evaluation_keys[shared], sorter=order)]
    # The keys of 32 bits only propose; evenly spaced pairs are compared, and stand for the others.
    chosen = np.unique(np.linspace(0, len(shared) - 1, min(_MAX_COMPARED, len(shared))).astype(np.int64))
    confirmed = chosen[_compare_bytes(train, copies[chosen], evaluation, shared[chosen])]
    if not len(confirmed):
        return ""
    count = round(len(shared) * len(confirmed) / len(chosen))
    is_exact = len(confirmed) == len(chosen) or len(chosen) == len(shared)
    names = ", ".join(_show(evaluation.name(int(shared[index]))) for index in confirmed[:_MAX_SHOWN])
    return (
        f"{'' if is_exact else 'About '}{count:,} of {len(evaluation):,} evaluation images "
        f"{'is' if count == 1 else 'are'} in the training set too ({names}{', ...' if count > _MAX_SHOWN else ''}), "
        "so the accuracy comes out too high. Remove them from one of the sets."
    )


def _compute_keys(dataset: Dataset) -> NDArray[np.uint64]:
    """Returns checksum and length of each record as one number; uint64 [n]."""
    return (dataset.crc32c.astype(np.uint64) << np.uint64(32)) | dataset.length.astype(np.uint64)


def _compare_bytes(
    first: Dataset, first_ids: NDArray[np.int64], second: Dataset, second_ids: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Returns a mask of the pairs of records with equal bytes; bool [k]."""
    equal = np.zeros(len(first_ids), np.bool_)
    # A shard that cannot be read is reported by the run itself.
    with contextlib.suppress(DataError, OSError):
        records = zip(first.read(first_ids), second.read(second_ids), strict=True)
        equal[:] = [len(one) > 0 and one == other for one, other in records]
    return equal


def _simplify(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name).casefold()).strip()


def _show(name: str) -> str:
    # Composed and decomposed letters look alike: only escapes show the difference.
    return repr(name) if unicodedata.is_normalized("NFC", name) else ascii(name)
