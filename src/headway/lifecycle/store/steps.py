"""One step from a version to the next: changes, new samples, and samples whose bytes the store has already."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from headway.core.errors import UsageError
from headway.core.untrusted_json import is_sha256
from headway.lifecycle.store.additions import Additions
from headway.lifecycle.store.change_rows import ChangedRows, add_rows, change_rows, find_targets, restate_rows
from headway.lifecycle.store.copy_splits import FindCopies
from headway.lifecycle.store.manifest import Schema, normalise_name
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.rows import Rows, build_empty, join_rows


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Changes that one commit makes to a version."""

    changes: Sequence[Change] = ()
    """Labels, moves and removals."""
    additions: Additions = field(default_factory=Additions)
    stored: Sequence[Change] = ()
    """Additions of samples whose bytes are in the store."""
    source: Rows | None = None
    """Version that has the bytes of `stored`, if one is known."""
    find_copies: FindCopies | None = None
    """Finds near copies of new samples; None: they are not looked for."""

    def take(self, rows: Rows, others: Iterator[Rows]) -> ChangedRows:
        """Returns the samples after the step, and what was noticed.

        Args:
            rows: the samples before.
            others: versions that may have the bytes of `stored`.

        Raises:
            UsageError: a sample, class or split does not exist, or the store does not have the bytes.
        """
        parts = [build_empty(rows.schema), *self.additions.rows]
        if self.stored:
            parts.append(restate_rows(_find_stored(rows, self.source, others, self.stored), self.stored))
        is_placed = np.concatenate(
            [*self.additions.is_placed, np.array([bool(change.split) for change in self.stored], np.bool_)]
        )
        changed, near_copies = change_rows(rows, self.changes, self.find_copies)
        added = add_rows(changed, join_rows(parts), is_placed, self.find_copies)
        return replace(
            added,
            near_copies=[*near_copies, *added.near_copies],
            rejected=[*added.rejected, *self.additions.rejected],
        )


def _find_stored(rows: Rows, source: Rows | None, others: Iterator[Rows], changes: Sequence[Change]) -> Rows:
    """Returns the samples with these IDs, in the order of the changes, of whichever version has them."""
    keys = np.array([bytes.fromhex(change.sample) for change in changes], "S32")
    parts, place = list[Rows](), np.full(len(keys), -1, np.int64)

    def list_places() -> Iterator[Rows]:
        yield rows
        if source is not None:
            yield source
        # Read one after the other, and only as long as bytes are missing.
        yield from (other for other in others if other.schema.mode == rows.schema.mode)

    for where in list_places():
        found = where.find(keys)
        is_new = (found >= 0) & (place < 0)
        place[is_new] = sum(map(len, parts)) + np.arange(int(is_new.sum()))
        parts.append(_clear(where.take(found[is_new]), rows.schema))
        if (place >= 0).all():
            return join_rows(parts).take(place)
    missing = changes[int(np.flatnonzero(place < 0)[0])]
    what = f"the store has no bytes with the ID {missing.sample}, stored as {rows.schema.mode}"
    raise UsageError(what, fix="Give the file itself.")


def _clear(rows: Rows, schema: Schema) -> Rows:
    # Only the bytes count; `restate_rows` sets everything else.
    return replace(rows, schema=schema, split=np.zeros(len(rows), np.uint8))


def list_makers(before: Rows, after: Rows, changes: Sequence[Change], by: str) -> list[tuple[bytes, str]]:
    """Returns (ID, who set the label) of the changed samples whose label another one has set than `by`.

    Args:
        before, after: the samples before the changes, and after them.
    """
    if all(change.by in ("", by) for change in changes):
        return []
    labels = [change for change in changes if change.operation == "label"]
    keys = before.sample_id[find_targets(before, labels)]
    # The last change of a sample wins, so that of whoever makes the version counts too.
    makers = {key.tobytes(): change.by or by for key, change in zip(keys, labels, strict=True)}
    new = np.flatnonzero(before.find(after.keys) < 0)
    added = dict(zip(after.names.take(new), after.sample_id[new], strict=True))
    for change in changes:
        if change.operation == "add" and (key := added.get(normalise_name(change.name))) is not None:
            makers[key.tobytes()] = change.by or by
    return [(key, maker) for key, maker in makers.items() if maker != by]


def label_sample(
    text: str, label: str | None, by: str = "", annotations: Mapping[str, Any] | None = None, split: str = ""
) -> Change:
    """Returns the change of the label of a sample, which is given by name or ID. Annotations and split: as `Change`."""
    sample, name = (text, "") if is_sha256(text) else ("", text)
    return Change(operation="label", sample=sample, name=name, label=label, by=by, annotations=annotations, split=split)


def remove_sample(text: str) -> Change:
    """Returns the removal of a sample, which is given by name or ID."""
    if is_sha256(text):
        return Change(operation="remove", sample=text)
    return Change(operation="remove", name=text)


def name_user(by: str | None) -> str:
    """Returns who makes a change; None: the user of this process."""
    if by:
        return by
    try:
        return getpass.getuser()
    # A container may have a user without a name.
    except (KeyError, OSError):
        return f"user {os.getuid()}"
