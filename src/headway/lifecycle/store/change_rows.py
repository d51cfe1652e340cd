"""Applies changes to the samples of a version. Pure: arrays in, arrays out, no file is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError, suggest_nearest
from headway.data.store_address import UNLABELLED
from headway.lifecycle.store.annotations import encode_annotations
from headway.lifecycle.store.copy_splits import FindCopies, follow_first_copies
from headway.lifecycle.store.manifest import Schema, normalise_label, normalise_name
from headway.lifecycle.store.records import Change, NearCopy, Rejected
from headway.lifecycle.store.rows import NO_LABEL, NOT_PLANNED, Ids, Names, Rows, join_rows

# Up to so many names are looked for one after the other, in less time than all names take to become Python's.
_FEW_NAMES = 8
_MAX_NAMED = 3


def change_rows(
    rows: Rows, changes: Sequence[Change], find_copies: FindCopies | None = None
) -> tuple[Rows, list[NearCopy]]:
    """Labels, annotates, moves and removes samples.

    The order of the changes counts only where they are about one sample, and for near copies among them.

    Args:
        find_copies: finds near copies of samples that get their first label; None: they are not looked for.

    Returns:
        the samples, and the near copies.

    Raises:
        UsageError: a sample, split or class does not exist, or a sample with a label would go to `unlabelled`.
    """
    if not changes:
        return rows, []
    schema, targets = rows.schema, find_targets(rows, changes)
    classes = list(rows.classes)
    numbers = {name: number for number, name in enumerate(classes)}
    label, split, planned = rows.label.copy(), rows.split.copy(), rows.get_planned().copy()
    is_kept = np.ones(len(rows), np.bool_)
    annotated = dict[int, str]()
    # Rows that come out of `unlabelled`, in the order of the changes; True if their split is asked for.
    first_labels = dict[int, bool]()
    for change, row in zip(changes, targets.tolist(), strict=True):
        if change.operation == "remove":
            is_kept[row] = False
            continue
        if change.operation == "label":
            label[row] = NO_LABEL if change.label is None else _number_class(change.label, schema, classes, numbers)
        name = rows.names[row]
        if change.annotations is not None:
            annotated[row] = encode_annotations(change.annotations, name)
        before, is_labelled = (int(split[row]), int(planned[row])), bool(label[row] != NO_LABEL)
        split[row], planned[row] = choose_split(schema, name, change.split, before, is_labelled=is_labelled)
        if is_labelled and rows.label[row] == NO_LABEL:
            is_asked = bool(change.split) or before[1] != NOT_PLANNED
            first_labels[row] = is_asked or first_labels.get(row, False)
    changed = replace(rows, classes=tuple(classes), label=label, split=split, planned=planned)
    if annotated:
        texts = [annotated.get(row, text) for row, text in enumerate(rows.get_annotations())]
        changed = replace(changed, annotations=Names.build(texts))
    new = [row for row in first_labels if is_kept[row] and label[row] != NO_LABEL]
    is_placed = np.array([first_labels[row] for row in new], np.bool_)
    if not is_kept.all():
        changed, new = changed.take(np.flatnonzero(is_kept)), (np.cumsum(is_kept)[new] - 1).tolist()
    if find_copies is None or not new:
        return changed, []
    return follow_first_copies(changed, np.array(new, np.int64), is_placed, find_copies)


def choose_split(
    schema: Schema, name: str, split: str, before: tuple[int, int] | None, *, is_labelled: bool
) -> tuple[int, int]:
    """Returns the number of a sample's split, and that of its planned split (`Rows.planned`).

    Args:
        split: the split that was asked for; empty: none.
        before: the two that the sample has now; None for a new sample.
        is_labelled: the sample has a label.

    Raises:
        UsageError: there is no such split, or a sample with a label cannot be in it.
    """
    unlabelled = schema.find_split(UNLABELLED)
    wanted = schema.find_split(split) if split else None
    old, planned = before or (unlabelled, NOT_PLANNED)
    if is_labelled:
        if wanted == unlabelled:
            what = f"{name!r} has a label, so it cannot be in the split {split!r}"
            raise UsageError(what, fix="Remove its label instead.")
        if wanted is not None:
            return wanted, NOT_PLANNED
        if old != unlabelled:
            return old, NOT_PLANNED
        return (int(schema.choose_splits([name])[0]) if planned == NOT_PLANNED else planned), NOT_PLANNED
    # Without a label it waits for one, and then goes where it was, or where somebody wants it.
    if wanted is not None:
        return unlabelled, NOT_PLANNED if wanted == unlabelled else wanted
    return unlabelled, planned if old == unlabelled else old


def choose_new_splits(
    schema: Schema, names: Sequence[str], changes: Sequence[Change]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the splits and the planned splits of new samples. Raises as `choose_split`."""
    found = [
        choose_split(schema, name, change.split, None, is_labelled=change.label is not None)
        for name, change in zip(names, changes, strict=True)
    ]
    split, planned = np.array(found, np.uint8).reshape(-1, 2).T
    return split, planned


def number_labels(
    schema: Schema, labels: Sequence[str | None], known: Sequence[str] = ()
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Returns the class numbers of labels, and the list of classes, which begins with the known ones.

    Raises UsageError if a label is not one of the classes of the data set.
    """
    classes = list(known)
    numbers = {name: number for number, name in enumerate(classes)}
    found = [NO_LABEL if label is None else _number_class(label, schema, classes, numbers) for label in labels]
    return np.array(found, np.int64), tuple(classes)


def _number_class(label: str, schema: Schema, classes: list[str], numbers: dict[str, int]) -> int:
    name = normalise_label(label)
    if schema.classes is not None and name not in schema.classes:
        fix = suggest_nearest(name, schema.classes)
        raise UsageError(f"{name!r:.80} is not one of the classes of the data set", fix=fix)
    if name not in numbers:
        numbers[name] = len(classes)
        classes.append(name)
    return numbers[name]


def find_targets(rows: Rows, changes: Sequence[Change]) -> Ids:
    """Returns the row of each change's sample, int64 [k]. Raises UsageError if one is not there."""
    by_name = [index for index, change in enumerate(changes) if not change.sample]
    found = rows.find(np.array([bytes.fromhex(change.sample) for change in changes], "S32"))
    if by_name:
        names = [normalise_name(changes[index].name) for index in by_name]
        wanted = set(names)
        if len(wanted) <= _FEW_NAMES:
            places = {name: rows.names.find(name) for name in wanted}
        else:
            places = {name: row for row, name in enumerate(rows.names) if name in wanted}
        found[by_name] = [places.get(name, -1) for name in names]
    if (missing := np.flatnonzero(found < 0)).size:
        named = [changes[index] for index in missing[:_MAX_NAMED]]
        shown = ", ".join(f"{change.name or change.sample!r:.120}" for change in named)
        more = f", and {missing.size - len(named):,} more that are named" if missing.size > len(named) else ""
        what = f"the newest version has no sample {shown}{more}"
        raise UsageError(what, fix="Take their names from headway dataset show NAME --samples, with their folders.")
    return found


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ChangedRows:
    """The samples after a change, in their canonical form, and what was noticed. See `Outcome` for the lists."""

    rows: Rows
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    near_copies: list[NearCopy] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def add_rows(rows: Rows, new: Rows, is_placed: NDArray[np.bool_], find_copies: FindCopies | None = None) -> ChangedRows:
    """Adds samples, but for those that the data set has already.

    Samples are refused if their name is taken, or if their bytes have another label or other annotations.

    Args:
        is_placed: True for new samples whose split was asked for, bool [k].
        find_copies: finds near copies of the new samples; None: they are not looked for.
    """
    if not len(new):
        return ChangedRows(rows=rows.settle())
    duplicates: list[tuple[str, str]] = []
    rejected: list[Rejected] = []
    keys = new.keys
    # The first of equal bytes stays, so a later copy never moves it to another split.
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first_copy = first[inverse]
    there = rows.find(keys)
    is_copy = (there >= 0) | (first_copy != np.arange(len(new)))
    for row in np.flatnonzero(is_copy).tolist():
        old = rows.get_sample(there[row]) if there[row] >= 0 else new.get_sample(int(first_copy[row]))
        copy = new.get_sample(row)
        if copy.label not in (None, old.label):
            label = "has no label" if old.label is None else f"has the label {old.label!r}"
            fix = "set the label of that one instead"
            rejected.append(Rejected(name=copy.name, reason=f"its bytes are those of {old.name}, which {label}: {fix}"))
        elif copy.annotations not in (None, old.annotations):
            reason = f"its bytes are those of {old.name}, which has other annotations: set those of that one instead"
            rejected.append(Rejected(name=copy.name, reason=reason))
        else:
            duplicates.append((copy.name, old.name))
    taken = set(rows.names)
    accepted = []
    for row in np.flatnonzero(~is_copy).tolist():
        name = new.names[row]
        if name in taken:
            reason = "another image has this name: give the new ones a prefix, or remove the other one"
            rejected.append(Rejected(name=name, reason=reason))
        else:
            taken.add(name)
            accepted.append(row)
    joined, near_copies = join_rows([rows, new.take(np.array(accepted, np.int64))]), list[NearCopy]()
    if find_copies is not None and accepted:
        places = len(rows) + np.arange(len(accepted))
        joined, near_copies = follow_first_copies(joined, places, is_placed[accepted], find_copies)
    return ChangedRows(rows=joined.settle(), duplicates=duplicates, near_copies=near_copies, rejected=rejected)


def restate_rows(stored: Rows, changes: Sequence[Change]) -> Rows:
    """Returns samples to add whose bytes are in the store, with the name, label and split of each change.

    Args:
        stored: the samples with these bytes, in the order of the changes.
        changes: additions.
    """
    schema = stored.schema
    names = [normalise_name(change.name) for change in changes]
    label, classes = number_labels(schema, [change.label for change in changes])
    split, planned = choose_new_splits(schema, names, changes)
    return replace(
        stored,
        names=Names.build(names),
        classes=classes,
        label=label,
        split=split,
        planned=planned,
        annotations=build_annotations(changes),
    )


def build_annotations(changes: Sequence[Change]) -> Names | None:
    """Returns the texts of the annotations of new samples; None if none has any. Raises UsageError."""
    if not any(change.annotations for change in changes):
        return None
    return Names.build([encode_annotations(change.annotations, change.name) for change in changes])
