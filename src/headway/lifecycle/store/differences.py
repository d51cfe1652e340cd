"""Differences of two versions, by the IDs of their samples. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.lifecycle.store.records import Difference
from headway.lifecycle.store.rows import NOT_PLANNED, Ids, Names, Rows


class RowDifference(NamedTuple):
    """Rows that differ; `before` and `after` are the rows of the same samples."""

    added: Ids
    """Rows of the second version."""
    removed: Ids
    """Rows of the first version."""
    before: Ids
    after: Ids
    is_relabelled: NDArray[np.bool_]
    is_annotated: NDArray[np.bool_]
    is_moved: NDArray[np.bool_]
    is_renamed: NDArray[np.bool_]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of samples, as `Difference.counts`."""
        return {
            "added": len(self.added),
            "relabelled": int(self.is_relabelled.sum()),
            "annotated": int(self.is_annotated.sum()),
            "moved": int(self.is_moved.sum()),
            "renamed": int(self.is_renamed.sum()),
            "removed": len(self.removed),
        }


def compare_rows(first: Rows, second: Rows) -> RowDifference:
    """Compares two versions, which are sorted."""
    in_first = first.find(second.keys)
    is_removed = np.ones(len(first), np.bool_)
    is_removed[in_first[in_first >= 0]] = False
    after = np.flatnonzero(in_first >= 0)
    before = in_first[after]
    # One list of classes for both, so that numbers can be compared.
    classes = tuple(sorted({*first.classes, *second.classes}))
    is_relabelled = first.name_classes(classes).label[before] != second.name_classes(classes).label[after]
    splits = sorted({*first.schema.splits, *second.schema.splits})
    tables = [np.array([splits.index(name) for name in rows.schema.splits]) for rows in (first, second)]
    is_moved = tables[0][first.split[before]] != tables[1][second.split[after]]
    # A planned split counts as the split: both are None where no sample has one.
    if first.planned is not None or second.planned is not None:
        planned = [
            np.concatenate([table, [-1] * (NOT_PLANNED + 1 - len(table))])[rows.get_planned()]
            for table, rows in zip(tables, (first, second), strict=True)
        ]
        is_moved |= planned[0][before] != planned[1][after]
    is_renamed = _find_different(first.names, before, second.names, after)
    is_annotated = np.zeros(len(after), np.bool_)
    if first.annotations is not None or second.annotations is not None:
        is_annotated = _find_different(first.get_annotations(), before, second.get_annotations(), after)
    is_changed = is_relabelled | is_annotated | is_moved | is_renamed
    return RowDifference(
        added=np.flatnonzero(in_first < 0),
        removed=np.flatnonzero(is_removed),
        before=before[is_changed],
        after=after[is_changed],
        is_relabelled=is_relabelled[is_changed],
        is_annotated=is_annotated[is_changed],
        is_moved=is_moved[is_changed],
        is_renamed=is_renamed[is_changed],
    )


def build_difference(first: Rows, second: Rows) -> Difference:
    """Returns the samples that differ between two versions, which are sorted."""
    found = compare_rows(first, second)
    return Difference(
        added=tuple(map(second.get_sample, found.added.tolist())),
        removed=tuple(map(first.get_sample, found.removed.tolist())),
        changed=tuple(
            (first.get_sample(before), second.get_sample(after))
            for before, after in zip(found.before.tolist(), found.after.tolist(), strict=True)
        ),
    )


def _find_different(first: Names, first_rows: Ids, second: Names, second_rows: Ids) -> NDArray[np.bool_]:
    """Returns a mask of the pairs of texts that differ; bool [k]."""
    if first is second and np.array_equal(first_rows, second_rows):
        return np.zeros(len(first_rows), np.bool_)
    lengths = [
        names.offset[rows + 1] - names.offset[rows] for names, rows in ((first, first_rows), (second, second_rows))
    ]
    is_different: NDArray[np.bool_] = lengths[0] != lengths[1]
    # Texts of equal lengths have equal offsets once the others are left out, so their bytes can be compared at once.
    same = np.flatnonzero(~is_different)
    one, other = first.take(first_rows[same]), second.take(second_rows[same])
    wrong_bytes = np.flatnonzero(one.text != other.text)
    is_different[same[np.unique(np.searchsorted(one.offset, wrong_bytes, side="right") - 1)]] = True
    return is_different
