"""Who set the labels of a version: found in its history, as the newest entry that changed each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.lifecycle.store.history import Entry, History
from headway.lifecycle.store.rows import NO_LABEL, Rows
from headway.lifecycle.store.version_files import get_version_folder, read_rows

UNKNOWN = "unknown"
"""Stands for whoever set a label, if the version before it was collected as garbage."""


def count_setters(store: Path, history: History, entry: Entry) -> dict[str, int]:
    """Returns how many labels of an entry's version each person or program has set, by name.

    Labels that are older than the versions which the garbage collection has left count as UNKNOWN. Raises DataError if
    a version is damaged.
    """
    counts: Counter[str] = Counter()
    for keys, setters, by in _trace_labels(store, history, entry):
        if setters:
            counts.update(setters.get(_pad(key), by) for key in keys.tolist())
        elif len(keys):
            counts[by] += len(keys)
    return dict(counts.most_common())


def list_setters(store: Path, history: History, entry: Entry) -> dict[bytes, str]:
    """Returns who set the label of each sample of an entry's version that has one, by the digest that is its ID.

    UNKNOWN and DataError: as for `count_setters`.
    """
    return {
        _pad(key): setters.get(_pad(key), by)
        for keys, setters, by in _trace_labels(store, history, entry)
        for key in keys.tolist()
    }


def _pad(key: bytes) -> bytes:
    # numpy cuts zeros off the end.
    return key.ljust(32, b"\0")


def _trace_labels(
    store: Path, history: History, entry: Entry
) -> Iterator[tuple[NDArray[np.bytes_], Mapping[bytes, str], str]]:
    """Yields samples whose labels one version has set, who set some of them, and who set the others of them."""
    version = history.list_parents(entry)[0]
    rows = read_rows(store, version)
    # By entry: the samples whose label it has, and nobody later has set. Entries are visited from the newest on.
    pending = {entry: rows.keys[rows.label != NO_LABEL]}
    while pending:
        number = max(pending)
        keys = pending.pop(number)
        version, parents, by, setters = history.list_parents(number)
        rows = read_rows(store, version)
        for parent, parent_version in parents:
            if not get_version_folder(store, parent_version).is_dir():
                # Some of these labels may be new in this version, and nothing says which.
                yield keys, {}, UNKNOWN
                keys = keys[:0]
                continue
            before = read_rows(store, parent_version)
            is_equal = _find_equal_labels(rows, before, keys)
            if is_equal.any():
                # Two ways may lead to one entry, but each sample takes only one of them.
                pending[parent] = np.union1d(pending.get(parent, keys[:0]), keys[is_equal])
            keys = keys[~is_equal]
        yield keys, setters, by


def _find_equal_labels(rows: Rows, before: Rows, keys: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """Returns a mask of the samples that have the same label in both."""
    classes = tuple(sorted({*rows.classes, *before.classes}))
    found = before.find(keys)
    now = rows.name_classes(classes).label[rows.find(keys)]
    if not len(before):
        return np.zeros(len(keys), np.bool_)
    is_equal: NDArray[np.bool_] = (found >= 0) & (before.name_classes(classes).label[found] == now)
    return is_equal
