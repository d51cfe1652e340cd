"""Gives new samples the split of the first sample that they are near copies of. Pure: arrays in, arrays out.

Evaluation on a near copy of a training image measures memory. So a new sample, and one that gets its first label, goes
where the first of its near copies is, unless its split was asked for. Samples that are there already never move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.lifecycle.store.records import NearCopy
from headway.lifecycle.store.rows import NO_LABEL, Ids, Rows

FindCopies = Callable[[Rows, Ids, Ids], tuple[Ids, Ids]]
"""Called with samples, the rows of known and of new ones; see `headway.lifecycle.store.hash_rows.find_copies`."""


def follow_first_copies(
    rows: Rows, new: Ids, is_placed: NDArray[np.bool_], find: FindCopies
) -> tuple[Rows, list[NearCopy]]:
    """Moves new samples to the split of the first sample that they are near copies of, also by others between them.

    Args:
        new: rows in their order. Only those with a label move; they are compared with samples that have one.
        is_placed: True for those whose split was asked for, bool [k]. They stay there.

    Returns:
        the samples, and the near copies among the new ones.
    """
    # A split that was asked for counts, so others follow such a sample, whatever their order.
    new = np.concatenate([new[is_placed], new[~is_placed]]).astype(np.int64)
    is_placed = np.sort(is_placed)[::-1]
    is_new = np.zeros(len(rows), np.bool_)
    is_new[new] = True
    is_labelled = rows.label != NO_LABEL
    split, found = rows.split.copy(), list[NearCopy]()
    for asked, known, stays in (
        (new[is_labelled[new]], np.flatnonzero(is_labelled & ~is_new), is_placed[is_labelled[new]]),
        # Samples without a label are only named, whatever they are copies of.
        (new[~is_labelled[new]], np.flatnonzero(is_labelled | ~is_new), np.ones(len(new), np.bool_)),
    ):
        if not len(asked):
            continue
        copied, group = find(rows, known, asked)
        # The sample that each group follows: a known one, if any of the group is a near copy of it, else its first.
        leader: dict[int, int] = {}
        for first, other in zip(group.tolist(), copied.tolist(), strict=True):
            if other >= 0:
                leader.setdefault(first, other)
        for index, row in enumerate(asked.tolist()):
            first = int(copied[index]) if copied[index] >= 0 else leader.get(int(group[index]), int(group[index]))
            if first == row:
                continue
            if not stays[index]:
                split[row] = split[first]
            is_apart = bool(is_labelled[row] and split[row] != split[first])
            found.append(NearCopy(name=rows.names[row], first=rows.names[first], is_apart=is_apart))
    return replace(rows, split=split), found
